"""The write-ahead journal of a dispatcher: one line for each event, on disk before the event takes effect.

A line is the CRC-32C of its JSON as 8 hexadecimal digits, a space, the JSON, a line feed. `rewrite` replaces a long journal by a
shorter one with the same result.

A process that takes a journal over continues in a file of another name, and notes the name in the lock, so that the process
before it can only write to its own file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, TypeAdapter, ValidationError

from monolith import _core
from monolith.config import Config
from monolith.dataservice.dataset import DatasetConfig, Split
from monolith.durable import sync_to_disk, write_durably
from monolith.errors import CorruptFileError, StorageError
from monolith.writer_lock import WriterLock

__all__ = [
    "EVENTS",
    "EpochState",
    "JobEvent",
    "JobState",
    "Journal",
    "Registered",
    "SplitGranted",
    "SplitMade",
    "TrainerEnded",
    "TrainerJoined",
    "TrainerLeft",
]


class Registered(Config):
    """A job was created."""

    event: Literal["registered"] = "registered"
    job: str
    dataset: DatasetConfig


class TrainerJoined(Config):
    """A trainer started. What it was granted after the first `granted` splits of `epoch` was taken back."""

    event: Literal["joined"] = "joined"
    job: str
    trainer: int
    trainers: int
    session: int
    nonce: int
    epoch: int
    granted: int


class SplitMade(Config):
    """The next split of an epoch was made. `files` is the state of the queue of files, None if there is none."""

    event: Literal["made"] = "made"
    job: str
    epoch: int
    split: Split
    files: dict[str, int | str] | None = None


class SplitGranted(Config):
    """A split was granted to a trainer."""

    event: Literal["granted"] = "granted"
    job: str
    epoch: int
    trainer: int
    split: int


class TrainerEnded(Config):
    """A trainer was notified that the epoch has no more splits for it. It gets no more in this session."""

    event: Literal["ended"] = "ended"
    job: str
    epoch: int
    trainer: int


class TrainerLeft(Config):
    """A trainer has left for good. Others get what it had not read of `epoch`, from its positions in `opened` on."""

    event: Literal["left"] = "left"
    job: str
    trainer: int
    session: int
    nonce: int
    epoch: int
    granted: int
    opened: tuple[tuple[int, str], ...]


class EpochState(Config):
    """The state of one epoch."""

    splits: int
    """How many were made."""
    files: tuple[str, ...] | None
    """The file of each group of splits. None: as in the epoch before, or no files."""
    queue: dict[str, int | str] | None
    """The state of the queue of files."""
    given: tuple[tuple[int, tuple[int, ...]], ...]
    """Trainers, and the splits of each in the order they were granted."""
    ended: tuple[int, ...]
    waiting: tuple[int, ...]
    places: tuple[tuple[int, str], ...] = ()
    """Splits that were partly read, and the position to continue from."""


class JobState(Config):
    """The state of a job after all events so far."""

    event: Literal["state"] = "state"
    job: str
    dataset: DatasetConfig
    trainers: int
    sessions: tuple[tuple[int, int, int], ...]
    """Trainers, the newest session of each, and its nonce."""
    epochs: tuple[tuple[int, EpochState], ...]


JobEvent = Registered | TrainerJoined | SplitMade | SplitGranted | TrainerEnded | TrainerLeft | JobState
EVENTS: TypeAdapter[JobEvent] = TypeAdapter(Annotated[JobEvent, Field(discriminator="event")])
"""Parses the JSON of an event."""


NAME = "journal"
_NOTED = re.compile(rf"{NAME}\.[0-9a-f]{{16}}")
LEAST_BYTES = 2**20
"""A journal smaller than this is not rewritten."""
GROWTH = 2
"""A journal is rewritten when it has grown by this factor since the last time."""


class Journal:
    """Events in a folder that one process holds at a time.

    A last line that was torn by a crash is dropped: its event was never acknowledged. Any other damage is
    `CorruptFileError`.

    Example:
        >>> import tempfile
        >>> from monolith.dataservice.dataset import DatasetConfig
        >>> from monolith.dataservice.journal import Registered
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with contextlib.closing(Journal(Path(folder))) as journal:
        ...         journal.append(Registered(job="clicks", dataset=DatasetConfig(kind="click_stream")))
        ...     with contextlib.closing(Journal(Path(folder))) as journal:
        ...         [event.job for event in journal.read()]
        ['clicks']
    """

    def __init__(self, folder: Path, *, take_over: bool = False) -> None:
        """Open the journal. `take_over` takes it from a process that still holds it, and whose events then fail."""
        self._path = folder / NAME
        with self._our_errors("open"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder, take_over=take_over)
            self._path = self._valid(folder)
            self._file: BinaryIO = self._path.open("a+b", buffering=0)
            if not self._lock.replaced:
                self._remove_others()
            sync_to_disk(folder)
            sync_to_disk(folder.parent)
        self._least = LEAST_BYTES
        """The size above which it is rewritten."""
        self._size: int | None = None
        """Bytes of complete lines. None until they were read."""
        self._in_doubt = False
        """Whether a part of a line may follow them."""

    def read(self) -> Iterator[JobEvent]:
        """Iterate over all events, in order. Must be exhausted before the first `append`."""
        with self._our_errors("read"):
            data = self._path.read_bytes()
        *lines, rest = data.split(b"\n")
        # A power cut may leave zero bytes in a line that was being written. JSON has none.
        torn = lines.pop() + b"\n" + rest if lines and b"\0" in lines[-1] else rest
        for number, line in enumerate(lines, start=1):
            yield self._event(line, number)
        self._size = len(data) - len(torn)
        with self._our_errors("write"):
            if self._lock.replaced:
                # Under a name of its own: the process that held the old file may still write to it or replace it.
                self._path = self._path.with_name(f"{NAME}.{secrets.token_hex(8)}")
                self._replace(data[: self._size])
                self._lock.leave_note(self._path.name)
            elif torn:
                self._file.truncate(self._size)

    def append(self, event: JobEvent) -> None:
        """Append `event`. It is durable when this returns, and has not happened if this raises."""
        if self._size is None:
            deque(self.read(), maxlen=0)
        assert self._size is not None
        line = _line(event)
        with self._our_errors("write"):
            if self._in_doubt:
                # A line that failed did not happen, and this one must not follow a part of it.
                self._file.truncate(self._size)
            self._in_doubt = True
            if self._file.write(line) != len(line):
                raise OSError(None, "the disk is full")
            os.fsync(self._file.fileno())
        self._in_doubt = False
        self._size += len(line)
        # Checked last: a successor that started after the line was durable has read it.
        self.require_own()

    @property
    def is_long(self) -> bool:
        """Whether it should be rewritten."""
        return self._size is not None and self._size > self._least

    def rewrite(self, events: Iterable[JobEvent]) -> None:
        """Replace all events by `events`, which must have the same result. If this raises, nothing has changed."""
        data = b"".join(map(_line, events))
        with self._our_errors("write"):
            self._replace(data)
        self._in_doubt, self._size = False, len(data)
        self._least = max(LEAST_BYTES, GROWTH * len(data))
        self.require_own()

    def put_off(self) -> None:
        """Postpone rewriting until it has grown again."""
        self._least = GROWTH * max(self._least, self._size or 0)

    def require_own(self) -> None:
        """Raise `FencedError` if a successor has taken the journal."""
        self._lock.require_own()

    def close(self) -> None:
        """Release the journal for another process."""
        self._file.close()
        self._lock.release()

    def _valid(self, folder: Path) -> Path:
        """Return the current journal: the one named in the lock, or the first one."""
        note = self._lock.note()
        if not note and not any(folder.glob(f"{NAME}.*")):
            return folder / NAME
        if not _NOTED.fullmatch(note) or not (folder / note).exists():
            raise CorruptFileError(
                f"{folder}: writer.lock should name the current journal, one of {NAME}.*, and names {note!r}; restore both "
                "from one copy"
            )
        return folder / note

    def _replace(self, data: bytes) -> None:
        write_durably(self._path, data)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def _remove_others(self) -> None:
        """Remove the journals of replaced processes, and temporary files of rewrites that died."""
        for path in (*self._path.parent.glob(f"{NAME}*"), *self._path.parent.glob(f".{NAME}*.tmp")):
            if path.name != self._path.name:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _our_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self._path}: cannot {verb}: {error.strerror}") from error

    def _event(self, line: bytes, number: int) -> JobEvent:
        digest, _, text = line.partition(b" ")
        if digest != b"%08x" % _core.crc32c(text):
            raise CorruptFileError(f"{self._path}: line {number} is damaged")
        try:
            return EVENTS.validate_json(text, strict=True)
        except ValidationError as error:
            raise CorruptFileError(
                f"{self._path}: line {number} is not an event: {error.error_count()} errors"
            ) from None


def _line(event: JobEvent) -> bytes:
    text = event.model_dump_json().encode()
    return b"%08x %s\n" % (_core.crc32c(text), text)
