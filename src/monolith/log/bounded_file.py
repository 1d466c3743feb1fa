"""`BoundedFile`: a file read by place and length, where a length from the file itself is never believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

import numpy as np

from monolith.errors import CorruptFileError, LogGapError, StorageError

__all__ = ["BoundedFile"]


class BoundedFile:
    """A file open for reading; it is not mapped, so that an error of the disk is an exception and not a signal.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as temporary:
        ...     _ = temporary.write(b"abcdef")
        ...     temporary.flush()
        ...     with BoundedFile(Path(temporary.name)) as file:
        ...         file.bytes(2, 3)
        b'cde'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without waiting: a pipe under this name may never have a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise LogGapError(f"{path}: is not there; it was removed by retention, or lost") from None
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        found = os.fstat(self._descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise StorageError(f"{path}: is not a file")

    def __enter__(self) -> BoundedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int, *, end: int | None = None) -> np.ndarray:
        """uint8 [size] from `offset`, memory of its own; refused before it is asked for if it would reach beyond `end`."""
        if offset < 0 or size < 0 or offset + size > (self.size if end is None else end):
            raise CorruptFileError(
                f"{self.path}: {size} bytes at byte {offset} reach beyond its end; the file is damaged"
            )
        buffer = np.empty(size, dtype=np.uint8)
        done = 0
        while done < size:
            got = self._read_some(buffer[done:], offset + done)
            if got == 0:
                raise CorruptFileError(f"{self.path}: became shorter while it was read")
            done += got
        return buffer

    def bytes(self, offset: int, size: int, *, end: int | None = None) -> bytes:
        """The same as bytes."""
        return self.read(offset, size, end=end).tobytes()

    def _read_some(self, buffer: np.ndarray, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [buffer.data], offset)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
