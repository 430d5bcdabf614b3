# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention.

`api.attention` checks its inputs, `choose` picks kernel, algorithm and head groups, `plan` lists
what is sent and computed (pure), and the call runs: `blockwise` tile by tile, `flex` by
FlexAttention, either one inside `ulysses`.
"""
