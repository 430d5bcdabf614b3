# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention.

`plan` says what meets where (pure), `attend` carries it out (one autograd function for every
algorithm), `kernels` compute one block, `merge` puts blocks together, `attention` is the verb.
"""
