"""Things to do every so many steps, also where the global step jumps: several workers move it on together."""

from __future__ import annotations

from monolith.errors import InvalidArgumentError

__all__ = ["EverySteps"]


class EverySteps:
    """Says whether a multiple of `every` was reached or passed since it was asked last.

    Example:
        >>> timer = EverySteps(10)
        >>> [step for step in (3, 9, 11, 12, 20, 45, 49) if timer.is_due(step)]
        [11, 20, 45]
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise InvalidArgumentError(f"every: expected at least one step, got {every}")
        self._every = every
        self._asked: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether it is time at `step`; the first time, whether `step` is a multiple."""
        before = step - 1 if self._asked is None else self._asked
        self._asked = step
        return step // self._every > before // self._every
