"""`python -m monolith.cli`: the `monolith` command of this interpreter, wherever its script is."""

from __future__ import annotations

import sys

from monolith.cli import main

if __name__ == "__main__":
    sys.exit(main())
