# SPDX-License-Identifier: Apache-2.0
"""Private names of torch and FSDP2, patches of them, and differences between versions.

Checked with torch 2.11, 2.13 and 2.15. Each function names the private attribute behind it and why
no public one serves. No other module uses private torch names; docs/private-names.md lists the
exceptions.
"""
