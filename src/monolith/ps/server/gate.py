"""`ChangeGate`: changes run concurrently, and a snapshot can keep all of them out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ChangeGate"]


class ChangeGate:
    """Lets changes run concurrently until it is closed, which waits for running changes and keeps out new ones.

    Closing has priority over new changes, so a busy server can still be snapshotted. Not reentrant.

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
        """The number of finished changes. A snapshot that is cut while the gate is closed holds all of them."""
        return self._changes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enter the gate for a block that changes the state."""
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
        """Keep out changes during the block. `changes`: the block changes the state itself, and counts as a change."""
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
