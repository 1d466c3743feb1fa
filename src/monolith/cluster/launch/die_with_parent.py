"""Run as a script: becomes a command that the kernel ends together with the process that started it.

    python tie.py PARENT COMMAND [ARGUMENT...]

It is run by its path, with Python's own modules alone: importing the package would cost each role a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["tie"]

_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127  # what a shell answers


def tie(parent: int, command: Sequence[str]) -> int:
    """Become `command`, which dies with `parent`; returns an exit code if that cannot be."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write("this system does not tie a process to the one that started it\n")
        return 1
    if os.getppid() != parent:  # it died before it could be asked to
        return 1
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
    return _NOT_FOUND


if __name__ == "__main__":
    sys.exit(tie(int(sys.argv[1]), sys.argv[2:]))
