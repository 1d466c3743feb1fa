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
from monolith.durable_file import sync_to_disk, write_durably
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

    def __init__(self, folder: Path, *, take_over: bool = False) -> None:
        """`take_over` takes it from a process that still has it: that one is fenced, and its events do not happen any more."""
        self._path = folder / NAME
        self._take_over = take_over
        with self._our_errors("open"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder, take_over=take_over)
            self._file: BinaryIO = self._path.open("a+b", buffering=0)
            sync_to_disk(folder)
            sync_to_disk(folder.parent)
        self._size: int | None = None
        """Bytes of whole lines; None until they were read."""
        self._in_doubt = False
        """Whether there may be a part of a line behind them."""

    def read(self) -> Iterator[Event]:
        """All events, in order; to be read to the end before the first `append`."""
        with self._our_errors("read"):
            data = self._path.read_bytes()
        *lines, rest = data.split(b"\n")
        # A power cut may leave zeros inside a line that was being written; no JSON has one.
        torn = lines.pop() + b"\n" + rest if lines and b"\0" in lines[-1] else rest
        for number, line in enumerate(lines, start=1):
            yield self._event(line, number)
        self._size = len(data) - len(torn)
        with self._our_errors("write"):
            if self._take_over:
                # A file of its own: whoever had the old one open may still write to that.
                write_durably(self._path, data[: self._size])
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
            elif torn:
                self._file.truncate(self._size)

    def append(self, event: Event) -> None:
        """Write `event` down; when this returns it survives a power cut, when it raises it has not happened."""
        if self._size is None:
            deque(self.read(), maxlen=0)
        assert self._size is not None
        text = event.model_dump_json().encode()
        line = b"%08x %s\n" % (_core.crc32c(text), text)
        with self._our_errors("write"):
            if self._in_doubt:
                # Whatever is there of a line that failed did not happen, and this one must not follow half of it.
                self._file.truncate(self._size)
            self._in_doubt = True
            if self._file.write(line) != len(line):
                raise OSError(None, "the disk is full")
            os.fsync(self._file.fileno())
        self._in_doubt = False
        self._size += len(line)
        # Only now: a successor that was not there yet when the line was durable has read it.
        self.require_own()

    def require_own(self) -> None:
        """Raise `FencedError` if a successor has taken the journal."""
        self._lock.require_own()

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()
        self._lock.release()

    @contextlib.contextmanager
    def _our_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self._path}: cannot {verb}: {error.strerror}") from error

    def _event(self, line: bytes, number: int) -> Event:
        digest, _, text = line.partition(b" ")
        if digest != b"%08x" % _core.crc32c(text):
            raise CorruptFileError(f"{self._path}: line {number} is damaged")
        try:
            return EVENTS.validate_json(text, strict=True)
        except ValidationError as error:
            raise CorruptFileError(f"{self._path}: line {number} is no event: {error.error_count()} errors") from None
