# SPDX-License-Identifier: Apache-2.0
"""Scripts that time things, always beside the ideal; results lie in results/."""
