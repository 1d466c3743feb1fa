"""The exit code by which a role tells its launcher that a restart would fail in the same way."""

from __future__ import annotations

import sys
from types import TracebackType

from monolith.errors import CheckpointMismatchError, ConfigError

__all__ = ["WRONG_USAGE", "tell_wrong_usage"]

WRONG_USAGE = 2
"""Wrong usage, configuration or data. `monolith` ends with it, and so does a script after `tell_wrong_usage`."""


def tell_wrong_usage() -> None:
    """From now on, a `ConfigError` or `CheckpointMismatchError` that nobody catches ends this process with `WRONG_USAGE`.

    It is printed as before: `sys.excepthook` is called first. Calling this again is harmless.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, ConfigError | CheckpointMismatchError):
            raise SystemExit(WRONG_USAGE)

    sys.excepthook = hook
