# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes fit --config FILE`, `torchrun ... -m recipes fit ...`."""

import sys

if __name__ == "__main__":
    try:
        from recipes.cli import main
    except ImportError as error:
        cure = "" if "pip install" in str(error) else ": pip install 'lightning-cp[recipes]'"
        sys.stderr.write(f"error: {error}{cure}\n")
        raise SystemExit(2) from None
    raise SystemExit(main())
