"""`WriterLock`: one writer per log, also across processes; a killed one leaves nothing that must be cleaned up."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from monolith.errors import StorageError

__all__ = ["WriterLock"]

_NAME = "writer.lock"


class WriterLock:
    """Held from creation to `release`, or to the end of the process.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = WriterLock(Path(folder))
        ...     try:
        ...         WriterLock(Path(folder))
        ...     except StorageError:
        ...         print("taken")
        ...     lock.release()
        taken
    """

    _descriptor = -1

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StorageError(
                f"{folder}: another writer has this log open; close it, or wait until its process has ended"
            ) from error
        _let_go_in_children(self)

    @property
    def held(self) -> bool:
        """Whether it was not released yet."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Let another writer in; harmless when called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


_locks: weakref.WeakSet[WriterLock] = weakref.WeakSet()
_children_let_go = False


def _let_go_in_children(lock: WriterLock) -> None:
    """Close the lock's file in processes forked from now on, data loaders for one.

    They would hold it beyond the death of the writer, whose successor could not begin. Closing a copy does not unlock.
    """
    global _children_let_go
    _locks.add(lock)
    if not _children_let_go:
        os.register_at_fork(after_in_child=_release_all)
        _children_let_go = True


def _release_all() -> None:
    for lock in list(_locks):
        lock.release()
