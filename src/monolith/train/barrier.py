"""Hold all workers between two steps, so that what the chief does meanwhile sees none of them halfway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from monolith.errors import InvalidArgumentError, MonolithError

__all__ = ["BarrierAlreadyPlacedError", "LocalBarrier", "WorkerBarrier"]

Callback = Callable[[str], None]
"""Called with the action a barrier was placed for."""


class BarrierAlreadyPlacedError(MonolithError):
    """Someone else holds the workers; wait until they are let go."""


@runtime_checkable
class WorkerBarrier(Protocol):
    """A barrier for worker 0, the chief, and workers 1 to `capacity - 1`.

    The chief places and removes it and is never held itself. Every other worker calls `wait` between steps.
    """

    @property
    def capacity(self) -> int:
        """Workers, the chief included."""

    def place(self, action: str = "") -> None:
        """Hold every worker that comes by; `BarrierAlreadyPlacedError` if they are held already."""

    def remove(self) -> None:
        """Let all go; harmless without a barrier."""

    def is_placed(self) -> bool:
        """Whether workers are being held."""

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Worker `index` comes by: if there is a barrier, call `callbacks` with its action and return when it is removed.

        Whether there was one.
        """

    def unblocked(self) -> list[int]:
        """Workers that have not come by yet, the chief (0) if there is no barrier."""


class LocalBarrier:
    """A `WorkerBarrier` between threads of one process.

    Example:
        >>> barrier = LocalBarrier(2)
        >>> barrier.wait(1)
        False
        >>> barrier.place("Save")
        >>> barrier.unblocked()
        [1]
        >>> barrier.remove()
    """

    def __init__(self, capacity: int, callbacks: Sequence[Callback] = ()) -> None:
        """`callbacks` are called by `place`, in the chief."""
        if capacity < 1:
            raise InvalidArgumentError(f"capacity: expected at least the chief, 1, got {capacity}")
        self._blocked = [False] * capacity
        self._callbacks = tuple(callbacks)
        self._action = ""
        self._changed = threading.Condition()

    @property
    def capacity(self) -> int:
        """Workers, the chief included."""
        return len(self._blocked)

    def place(self, action: str = "") -> None:
        """Hold every worker that comes by, then call the chief's callbacks."""
        with self._changed:
            if self._blocked[0]:
                raise BarrierAlreadyPlacedError(f"there is a barrier already, for {self._action!r}")
            self._blocked[0], self._action = True, action
            self._changed.notify_all()
        for callback in self._callbacks:
            callback(action)

    def remove(self) -> None:
        """Let all go."""
        with self._changed:
            self._blocked[0] = False
            self._changed.notify_all()

    def is_placed(self) -> bool:
        """Whether workers are being held."""
        return self._blocked[0]

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Worker `index` comes by; returns when it may go on."""
        if not 0 < index < self.capacity:
            raise InvalidArgumentError(f"index: expected a worker from 1 to {self.capacity - 1}, got {index}")
        with self._changed:
            if not self._blocked[0]:
                return False
            action = self._action
        # Before it counts as blocked: who waits for all to be blocked may rely on their callbacks' effects.
        for callback in callbacks:
            callback(action)
        with self._changed:
            self._blocked[index] = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._blocked[0])
            self._blocked[index] = False
            self._changed.notify_all()
        return True

    def unblocked(self) -> list[int]:
        """Workers that have not come by yet, the chief (0) if there is no barrier."""
        with self._changed:
            return [index for index, blocked in enumerate(self._blocked) if not blocked]

    def wait_all_blocked(self, timeout: float | None = None) -> bool:
        """Return when every worker is held, or `timeout` seconds have passed; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: all(self._blocked), timeout)

    def wait_none_blocked(self, timeout: float | None = None) -> bool:
        """Return when nobody is held any more, or `timeout` seconds have passed; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._blocked), timeout)
