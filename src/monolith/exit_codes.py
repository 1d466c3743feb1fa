"""The exit codes of `monolith`, and of scripts that `monolith launch` runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from monolith.errors import (
    CheckpointMismatchError,
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    LogGapError,
    MissingPackageError,
    MonolithError,
    RepeatedFailureError,
    SchemaError,
    StorageError,
    StreamGapError,
)

__all__ = ["HEARTBEAT_VARIABLE", "WRONG_USAGE", "end_with_exit_codes", "exit_code_of", "is_launched"]

WRONG_USAGE = 2
"""Wrong usage, configuration or data. Another try would end in the same way, so `monolith launch` makes none."""
HEARTBEAT_VARIABLE = "MONOLITH_HEARTBEAT_PIPE"
"""Names the pipe in the environment of every process that `monolith launch` starts: its descriptor and its inode, by which a
stranger's descriptor is recognised."""

_EXIT_CODES: dict[type[MonolithError], int] = {
    CheckpointMismatchError: WRONG_USAGE,
    ConfigError: WRONG_USAGE,
    InvalidArgumentError: WRONG_USAGE,
    LogGapError: WRONG_USAGE,
    MissingPackageError: WRONG_USAGE,
    RepeatedFailureError: WRONG_USAGE,
    SchemaError: WRONG_USAGE,
    StreamGapError: WRONG_USAGE,
    CorruptFileError: 3,
    StorageError: 4,
}
_NOT_THE_SCRIPT = (str(Path(__file__).parent), str(Path(os.__file__).parent), "<")


def exit_code_of(error: BaseException) -> int:
    """Return the code of a process that `error` ends.

    Example:
        >>> exit_code_of(ConfigError("Feature.dim: ...")), exit_code_of(StorageError("...")), exit_code_of(KeyError("user"))
        (2, 4, 1)
    """
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `monolith launch` has started this process, and may restart it.

    Example:
        >>> is_launched({"MONOLITH_HEARTBEAT_PIPE": "7:123"}), is_launched({})
        (True, False)
    """
    return HEARTBEAT_VARIABLE in environ


def end_with_exit_codes() -> None:
    """Let an uncaught error of ours end this script with the exit code that `monolith` has for it.

    A mistake of the user is printed as its message and the line of the script, not as a traceback. A hook that the script has set
    before is called instead.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = exit_code_of(error)
        if code == WRONG_USAGE and before is sys.__excepthook__:
            sys.stderr.write(f"{_line_of_script(trace)}{kind.__name__}: {error}\n")
        else:
            before(kind, error, trace)
        if code != 1:
            raise SystemExit(code)

    sys.excepthook = hook


def _line_of_script(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code, as `train.py:26: `. Nothing if only packages were running."""
    callers = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(_NOT_THE_SCRIPT) and "site-packages" not in frame.filename
    ]
    return f"{Path(callers[-1].filename).name}:{callers[-1].lineno}: " if callers else ""
