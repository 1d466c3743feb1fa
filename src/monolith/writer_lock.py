"""`WriterLock`: one writer per folder, also across processes. A killed writer leaves nothing to clean up.

A writer that is paused, or on a machine that cannot be reached, still holds the lock. Its successor may take the lock over: it
replaces the locked file by one of its own. A writer that finds another inode than the one it locked has been fenced off and must
stop writing.

The holder can leave a note in the file it has locked. A fenced writer writes into a file that has no name any more, so it can
never overwrite a note.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from monolith.durable import sync_to_disk
from monolith.errors import FencedError, StorageError
from monolith.process_bound import let_go_in_children

__all__ = ["WriterLock"]

_NAME = "writer.lock"


class WriterLock:
    """An exclusive lock, held from creation to `release` or to the end of the process.

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

    def __init__(self, folder: Path, *, take_over: bool = False) -> None:
        """Lock the log in `folder`. `take_over` takes it from a writer that holds it, which is then fenced off."""
        self._path = folder / _NAME
        self.replaced = False
        """Whether the lock was taken from a writer that may still run."""
        while not self._locks_the_file_there():
            self.release()
        if self._descriptor < 0 and take_over:
            self._replace_the_file()
        if self._descriptor < 0:
            raise StorageError(
                f"{folder}: another writer has this log open; close it, or wait until its process has ended"
            )
        # A child process, such as a data loader, would hold the lock beyond the death of the writer and block its successor.
        let_go_in_children(self)

    @property
    def held(self) -> bool:
        """Whether it has not been released yet."""
        return self._descriptor >= 0

    def note(self) -> str:
        """Return the last note that this or an earlier holder left, or "" if there is none.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     lock = WriterLock(Path(folder))
            ...     lock.leave_note("a")
            ...     lock.release()
            ...     WriterLock(Path(folder)).note()
            'a'
        """
        # A line that a crash cut short does not count.
        lines = _content(self._descriptor).split(b"\n")[:-1]
        return lines[-1].decode(errors="replace") if lines else ""

    def leave_note(self, text: str) -> None:
        """Leave a line for the next holder of the lock. It is durable when this returns."""
        line = text.encode() + b"\n"
        size = _content(self._descriptor).rfind(b"\n") + 1
        if os.pwrite(self._descriptor, line, size) != len(line):
            raise StorageError(f"{self._path}: the disk is full")
        os.fsync(self._descriptor)

    def require_own(self) -> None:
        """Raise `FencedError` if a successor has taken the log."""
        if self.held and not self._is_there():
            raise FencedError(f"{self._path.parent}: another process has taken this log over; this one should end")

    def release(self) -> None:
        """Let another writer in. Calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def let_go(self) -> None:
        """Close the file in a forked child. Closing a copy does not unlock it."""
        self.release()

    def __del__(self) -> None:
        self.release()

    def _locks_the_file_there(self) -> bool:
        """Try to lock the file. Returns False if it was replaced meanwhile, so the new one has to be locked."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return True
        return self._is_there()

    def _replace_the_file(self) -> None:
        own = self._path.with_name(f"{_NAME}.{secrets.token_hex(8)}")
        self._descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        earlier = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._copy_notes(earlier)
            own.rename(self._path)
            sync_to_disk(self._path.parent)
            # Again: a note may have been left until the moment of the rename.
            self._copy_notes(earlier)
        finally:
            os.close(earlier)
        self.replaced = True

    def _copy_notes(self, earlier: int) -> None:
        """Copy the notes durably, so they survive whenever this process dies."""
        os.pwrite(self._descriptor, _content(earlier), 0)
        os.fsync(self._descriptor)

    def _is_there(self) -> bool:
        mine = os.fstat(self._descriptor)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
