"""The journal of a dispatcher: one line for each event, on disk before it happens.

A line is the CRC-32C of its JSON as 8 hexadecimal digits, a space, the JSON, a line feed.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from monolith import _core
from monolith.data.service.events import EVENTS, Event
from monolith.durable_file import sync_to_disk
from monolith.errors import CorruptFileError, StorageError
from monolith.log.writer_lock import WriterLock

__all__ = ["Journal"]

NAME = "journal"


class Journal:
    """Events in a folder that one process has at a time.

    A last line that was cut short by a crash is dropped: nobody was told of its event. Any other damage is
    `CorruptFileError`.

    Example:
        >>> import tempfile
        >>> from monolith.data.service.dataset import DatasetConfig
        >>> from monolith.data.service.events import Registered
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with contextlib.closing(Journal(Path(folder))) as journal:
        ...         journal.append(Registered(job="clicks", dataset=DatasetConfig(kind="click_stream")))
        ...     with contextlib.closing(Journal(Path(folder))) as journal:
        ...         [event.job for event in journal.read()]
        ['clicks']
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder)
            self._file: BinaryIO = self._path.open("a+b", buffering=0)
            sync_to_disk(folder)
            sync_to_disk(folder.parent)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self._path}: cannot open: {error.strerror}") from error
        self._size: int | None = None
        """Bytes of whole lines; None until they were read."""

    def read(self) -> Iterator[Event]:
        """All events, in order; to be read to the end before the first `append`."""
        data = self._path.read_bytes()
        *lines, rest = data.split(b"\n")
        # A power cut may leave zeros inside a line that was being written; no JSON has one.
        torn = lines.pop() + b"\n" + rest if lines and b"\0" in lines[-1] else rest
        for number, line in enumerate(lines, start=1):
            yield self._event(line, number)
        if torn:
            self._file.truncate(len(data) - len(torn))
        self._size = len(data) - len(torn)

    def append(self, event: Event) -> None:
        """Write `event` down; when this returns it survives a power cut, when it raises it has not happened."""
        if self._size is None:
            deque(self.read(), maxlen=0)
        assert self._size is not None
        text = event.model_dump_json().encode()
        line = b"%08x %s\n" % (_core.crc32c(text), text)
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(None, "the disk is full")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._undo()
            raise StorageError(f"{self._path}: cannot write: {error.strerror}") from error
        self._size += len(line)

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()
        self._lock.release()

    def _undo(self) -> None:
        # Whether the line is on disk is open; the next one must not follow half of it.
        with contextlib.suppress(OSError):
            self._file.truncate(self._size)

    def _event(self, line: bytes, number: int) -> Event:
        digest, _, text = line.partition(b" ")
        if digest != b"%08x" % _core.crc32c(text):
            raise CorruptFileError(f"{self._path}: line {number} is damaged")
        try:
            return EVENTS.validate_json(text, strict=True)
        except ValidationError as error:
            raise CorruptFileError(f"{self._path}: line {number} is no event: {error.error_count()} errors") from None
