"""`python benchmarks/freshbench`, see `--help` and docs/freshbench.md."""

from __future__ import annotations

import sys
from pathlib import Path

# A folder that is run as a program has its own path only, and is no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from freshbench.command import main

if __name__ == "__main__":
    sys.exit(main())
