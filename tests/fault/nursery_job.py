"""The smallest job for a nursery: writes a file and reports it."""

from __future__ import annotations

import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Write the second argument to a file in the folder that is the first."""
    folder, text = arguments
    Path(folder, "file").write_text(text)
    sys.stdout.write(f"wrote {text}\n")
