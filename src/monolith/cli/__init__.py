"""The command line `monolith`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: what the `monolith` script calls.

    0 is success, 1 a failure such as a diverged training, 2 wrong usage, configuration or data, 3 a damaged file, 4 a file that
    the operating system refused, and 130 an interrupt.
    """
    from monolith.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)
