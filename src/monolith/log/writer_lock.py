"""`WriterLock`: one writer per log, also across processes; a killed one leaves nothing that must be cleaned up.

A writer that is paused, or on a machine that cannot be reached, still holds the lock. Its successor may take it: it puts a
file of its own in the place of the locked one. Who finds that the file has another inode than the one it locked has been
replaced, and must not write any more.

A holder can leave a note in the file it has locked. Who was replaced writes into a file that is not there any more: there is no
moment in which a writer that was paused could still overwrite a note.
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

    def __init__(self, folder: Path, *, take_over: bool = False) -> None:
        """Lock the log in `folder`; `take_over` takes it from a writer that holds it, who then counts as replaced."""
        self._path = folder / _NAME
        self.replaced = False
        """Whether it was taken from a writer that may still run."""
        while not self._locks_the_file_there():
            self.release()
        if self._descriptor < 0 and take_over:
            self._replace_the_file()
        if self._descriptor < 0:
            raise StorageError(
                f"{folder}: another writer has this log open; close it, or wait until its process has ended"
            )
        # A child, such as a data loader, would hold the file beyond the death of the writer, whose successor could not begin.
        let_go_in_children(self)

    @property
    def held(self) -> bool:
        """Whether it was not released yet."""
        return self._descriptor >= 0

    def note(self) -> str:
        """The last that a holder left here, also one before this; nothing if none did.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     lock = WriterLock(Path(folder))
            ...     lock.leave_note("a")
            ...     lock.release()
            ...     WriterLock(Path(folder)).note()
            'a'
        """
        # A line that a crash cut short was not left yet.
        lines = _content(self._descriptor).split(b"\n")[:-1]
        return lines[-1].decode(errors="replace") if lines else ""

    def leave_note(self, text: str) -> None:
        """Leave a line for whoever holds the lock next; durable when this returns."""
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
        """Let another writer in; harmless when called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def let_go(self) -> None:
        """Close the file in a forked child. Closing a copy does not unlock it."""
        self.release()

    def __del__(self) -> None:
        self.release()

    def _locks_the_file_there(self) -> bool:
        """Lock the file if nobody has; False if it was replaced meanwhile, and another one is to be locked."""
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
            # Once more: a note may have been left until the moment of the rename.
            self._copy_notes(earlier)
        finally:
            os.close(earlier)
        self.replaced = True

    def _copy_notes(self, earlier: int) -> None:
        """What was noted stays noted, whenever this process dies."""
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
