"""`ChangeGate`: changes run beside each other, and now and then nobody changes anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ChangeGate"]


class ChangeGate:
    """Lets changes through until somebody closes it, who then waits for those inside and has the state for himself.

    Whoever closes goes before changes that come later: a server that is never idle can still be cut. Neither may be entered
    by a thread that is inside already.

    Example:
        >>> gate = ChangeGate()
        >>> with gate.changing():
        ...     pass
        >>> with gate.closed():
        ...     gate.changes
        1
    """

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._inside = 0
        self._closed = False
        self._changes = 0

    @property
    def changes(self) -> int:
        """How many changes have ended: what is cut while the gate is closed holds all up to this number."""
        return self._changes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around everything that changes the state."""
        with self._moved:
            while self._closed:
                self._moved.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._moved:
                self._inside -= 1
                self._changes += 1
                if not self._inside:
                    self._moved.notify_all()

    @contextmanager
    def closed(self, *, changes: bool = False) -> Iterator[None]:
        """Around everything that needs the state to stand still; `changes`: it is changed here, and counts as changed."""
        with self._moved:
            while self._closed:
                self._moved.wait()
            self._closed = True
            while self._inside:
                self._moved.wait()
        try:
            yield
        finally:
            with self._moved:
                self._closed = False
                self._changes += changes
                self._moved.notify_all()
