"""The file in a server's folder that has what `Coordination` must not forget."""

from __future__ import annotations

import os
from pathlib import Path

from monolith.durable_file import write_durably
from monolith.errors import StorageError

__all__ = ["CoordinationFile"]


class CoordinationFile:
    """`<folder>/coordination/<number>`: every incarnation of the server writes a file of its own and reads the newest one.

    So an incarnation that was replaced while it hung cannot overwrite what its successor has written. Whoever writes must
    check after the write, and before it acknowledges anything, that the folder is still its own: then the successor has read
    what was written. Made when the folder is locked.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = CoordinationFile(Path(folder))
        ...     first.write("a")
        ...     second = CoordinationFile(Path(folder))
        ...     second.write("b")
        ...     first.write("late")
        ...     CoordinationFile(Path(folder)).text
        'b'
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "coordination"
        try:
            self._folder.mkdir(exist_ok=True)
            earlier = self._numbers()
            # Taken before anything is read: what an earlier incarnation writes from now on is older.
            self._number = self._taken(earlier[-1] + 1 if earlier else 1)
            texts = (self._path(number).read_text() for number in reversed(earlier))
            self.text = next(filter(None, texts), None)
            """What the last incarnation has written; None: there was none."""
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{self._folder}: cannot be read: {error}") from error
        if self.text is not None:
            self.write(self.text)

    def write(self, text: str) -> None:
        """Replace what is kept. It is durable when this returns."""
        try:
            write_durably(self._path(self._number), text.encode())
            for number in self._numbers():
                if number < self._number:
                    self._path(number).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be written: {os.strerror(error.errno or 0)}") from error

    def _taken(self, number: int) -> int:
        while True:
            try:
                self._path(number).open("x").close()
            except FileExistsError:
                number += 1
            else:
                return number

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _numbers(self) -> list[int]:
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())
