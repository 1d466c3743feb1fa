"""Moments of the past as an operator writes them, and what can go back to one."""

from __future__ import annotations

import re
from typing import Protocol, runtime_checkable

from monolith.errors import InvalidArgumentError

__all__ = ["RollbackTarget", "moment_of"]

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EXPECTED = "10m-ago (s, m, h or d), step=N, sequence=N, time=SECONDS since 1970, or now"


@runtime_checkable
class RollbackTarget(Protocol):
    """Something that follows a run and can restore an earlier state of it."""

    def rollback_to(self, moment: str) -> str:
        """Restore the newest state at or before `moment`, and stay there. Returns a sentence that says what was restored.

        `moment` is as `moment_of` returns it: step=N, sequence=N, time=SECONDS, or now to follow the run again. Raises a
        `MonolithError` if the log has nothing as old as that. Then nothing has changed.
        """


def moment_of(text: str, *, now: float) -> str:
    """Return a moment as `RollbackTarget` takes it: step=N, sequence=N, time=SECONDS since 1970, or now.

    Args:
        text: `10m-ago` with a unit of s, m, h or d, or one of the forms that are returned.
        now: Seconds since 1970.

    Raises:
        InvalidArgumentError: The text has another form, or the moment is in the future or before 1970.

    Example:
        >>> moment_of("10m-ago", now=1_700_000_000.0)
        'time=1699999400.000'
        >>> moment_of("step=500", now=0.0)
        'step=500'
    """
    if text == "now":
        return text
    if match := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])-ago", text):
        time = now - float(match[1]) * _SECONDS[match[2]]
        if time < 0:
            raise InvalidArgumentError(f"moment: {text!r} is before 1970; expected {_EXPECTED}")
        return f"time={time:.3f}"
    if re.fullmatch(r"(step|sequence)=[0-9]{1,18}", text):
        return text
    if match := re.fullmatch(r"time=([0-9]{1,12}(?:\.[0-9]{1,9})?)", text):
        if float(match[1]) > now:
            raise InvalidArgumentError(
                f"moment: {text!r} is {float(match[1]) - now:.0f} s in the future; expected one in the past"
            )
        return text
    hint = "; a moment in the past ends in -ago" if re.fullmatch(r"[0-9.]+[smhd]", text) else ""
    raise InvalidArgumentError(f"moment: expected {_EXPECTED}, got {text!r}{hint}")
