"""Deadlines: one sleeping thread for the whole process that ends what has taken too long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from monolith.process_bound import let_go_in_children

__all__ = ["Deadlines"]

_log = logging.getLogger(__name__)


class Deadlines:
    """Calls a function if a block has not ended in time. Entering and leaving a block wakes no thread.

    Example:
        >>> with Deadlines().watch(time.monotonic() + 60, lambda: print("too late")) as late:
        ...     pass
        >>> late.is_set()
        False
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[float, Callable[[], None], threading.Event]] = {}
        self._changed = threading.Condition()
        self._wakes_at = float("inf")
        self._next = 0
        self._is_running = False
        let_go_in_children(self)

    def let_go(self) -> None:
        """Begin again in a forked child, which has none of the parent's threads."""
        self._watched, self._changed = {}, threading.Condition()
        self._wakes_at, self._is_running = float("inf"), False

    @contextmanager
    def watch(self, at: float, expire: Callable[[], None]) -> Iterator[threading.Event]:
        """Call `expire`, in another thread, if the block still runs at `at` (of `time.monotonic`); the event tells."""
        late = threading.Event()
        with self._changed:
            self._start()
            self._next += 1
            number = self._next
            self._watched[number] = (at, expire, late)
            # The thread is woken only if it would sleep too long; what ended before is found when it wakes.
            if at < self._wakes_at:
                self._changed.notify()
        try:
            yield late
        finally:
            with self._changed:
                self._watched.pop(number, None)

    def _start(self) -> None:
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._run, name="monolith-deadlines", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                over = [number for number, (at, _, _) in self._watched.items() if at <= now]
                expired = [self._watched.pop(number) for number in over]
                if not expired:
                    self._wakes_at = min((at for at, _, _ in self._watched.values()), default=float("inf"))
                    self._changed.wait(None if self._wakes_at == float("inf") else self._wakes_at - now)
                    self._wakes_at = 0.0
            for _, expire, late in expired:
                late.set()
                try:
                    expire()
                except Exception:
                    # The thread goes on: without it nothing would ever be too late.
                    _log.exception("what has taken too long could not be ended")
