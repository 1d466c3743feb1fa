"""The command line: `train`, `evaluate`, `predict`, `export`, `inspect`, `import-table`, `export-table`, `checkpoint`, `log`,
`ps`, `probe`, `launch`, `env`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: what the `monolith` script calls.

    0 done; 1 something broke, a diverged training for one; 2 wrong usage, configuration or data; 3 a damaged file; 4 the
    operating system refused a file; 130 interrupted.
    """
    from monolith.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)
