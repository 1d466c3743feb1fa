"""A script that becomes a command which the kernel kills when the process that started it dies.

    python die_with_parent.py PARENT COMMAND [ARGUMENT...]

It is run by its path and uses only the standard library: importing the package would cost each role a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["run_command"]

_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127  # as a shell does


def run_command(parent: int, command: Sequence[str]) -> int:
    """Become `command`, which dies with `parent`. Returns an exit code if that fails."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is None or prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write("this system cannot end a process together with its parent\n")
        return 1
    if os.getppid() != parent:  # it died before the call above
        return 1
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
    return _NOT_FOUND


if __name__ == "__main__":
    sys.exit(run_command(int(sys.argv[1]), sys.argv[2:]))
