"""`Wakeup`: waiting until files in some folders change, or until another thread says so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Iterable
from functools import cache
from pathlib import Path

__all__ = ["Wakeup"]

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
# Where changes are not reported, as on file systems of other machines, files are looked at this often.
_LOOK_SECS = 0.05
_LOOK_SECS_WITHOUT_INOTIFY = 0.005


class Wakeup:
    """Waits for changes by inotify, and looks itself now and then, as not every file system reports changes.

    Example:
        >>> wakeup = Wakeup([])
        >>> wakeup.wake()
        >>> wakeup.wait(60)
        True
        >>> wakeup.close()
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._called, self._caller = os.pipe()
        os.set_blocking(self._called, False)
        os.set_blocking(self._caller, False)
        self._changes = _watch(folders)
        self._poll = select.poll()
        self._poll.register(self._called, select.POLLIN)
        if self._changes >= 0:
            self._poll.register(self._changes, select.POLLIN)
        self._look_secs = _LOOK_SECS_WITHOUT_INOTIFY if self._changes < 0 else _LOOK_SECS

    def wait(self, timeout: float) -> bool:
        """Return after a change, after at most `timeout` seconds, or after a fraction of a second. True if `wake` was called."""
        for descriptor, _ in self._poll.poll(1000 * min(timeout, self._look_secs)):
            if descriptor == self._called:
                return self.was_called()
            # All changes until now: the caller looks at the files next.
            os.read(self._changes, 65536)
        return False

    def was_called(self) -> bool:
        """Return whether `wake` was called since the last time."""
        try:
            return len(os.read(self._called, 65536)) > 0
        except BlockingIOError:
            return False

    def wake(self) -> None:
        """Let `wait` return at once, in any thread, now or when it is called next."""
        if self._caller >= 0:
            # A full pipe wakes as well.
            with contextlib.suppress(BlockingIOError):
                os.write(self._caller, b"w")

    def close(self) -> None:
        """Release the descriptors. Calling it twice is harmless."""
        descriptors = self._called, self._caller, self._changes
        self._called = self._caller = self._changes = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _watch(folders: Iterable[Path]) -> int:
    """Return an inotify descriptor for the folders, or -1 if the system has none left."""
    libc = _libc()
    if not hasattr(libc, "inotify_init1"):
        return -1
    changes = int(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    for folder in folders:
        if (
            changes < 0
            or libc.inotify_add_watch(changes, os.fsencode(folder), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0
        ):
            if changes >= 0:
                os.close(changes)
            return -1
    return changes
