"""The journal of a dispatcher: one line for each event, on disk before it happens.

A line is the CRC-32C of its JSON as 8 hexadecimal digits, a space, the JSON, a line feed. When there are many, `rewrite` puts a
shorter file in the place, which says the same.

Whoever takes a journal over goes on in a file of another name, and notes that in the lock: the one before, should it go on, can
write and rewrite only its own.
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
from monolith.log.lock import WriterLock

__all__ = [
    "EVENTS",
    "EpochState",
    "Event",
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
    """A job was made."""

    event: Literal["registered"] = "registered"
    job: str
    dataset: DatasetConfig


class TrainerJoined(Config):
    """A trainer began, and gave back what it was granted behind the first `granted` splits of `epoch`."""

    event: Literal["joined"] = "joined"
    job: str
    trainer: int
    trainers: int
    session: int
    nonce: int
    epoch: int
    granted: int


class SplitMade(Config):
    """The next split of an epoch was cut; the queue of files is at `files` then, None if there is none."""

    event: Literal["made"] = "made"
    job: str
    epoch: int
    split: Split
    files: dict[str, int | str] | None = None


class SplitGranted(Config):
    """A trainer was given a split."""

    event: Literal["granted"] = "granted"
    job: str
    epoch: int
    trainer: int
    split: int


class TrainerEnded(Config):
    """A trainer was told that the epoch has no more splits for it: in this session it gets none any more."""

    event: Literal["ended"] = "ended"
    job: str
    epoch: int
    trainer: int


class TrainerLeft(Config):
    """A trainer is gone for good: what it had not read of `epoch` is for others, from its places in `opened` on."""

    event: Literal["left"] = "left"
    job: str
    trainer: int
    session: int
    nonce: int
    epoch: int
    granted: int
    opened: tuple[tuple[int, str], ...]


class EpochState(Config):
    """What became of one epoch."""

    splits: int
    """How many were cut."""
    files: tuple[str, ...] | None
    """The file of each group of splits; None: as in the epoch before, or none at all."""
    queue: dict[str, int | str] | None
    """Where the queue of files is."""
    given: tuple[tuple[int, tuple[int, ...]], ...]
    """Trainers, and the splits of each in the order it got them."""
    ended: tuple[int, ...]
    waiting: tuple[int, ...]
    places: tuple[tuple[int, str], ...] = ()
    """Splits that do not begin at their beginning, and where they do."""


class JobState(Config):
    """What all events of a job so far have led to."""

    event: Literal["state"] = "state"
    job: str
    dataset: DatasetConfig
    trainers: int
    sessions: tuple[tuple[int, int, int], ...]
    """Trainers, the newest session of each, and its nonce."""
    epochs: tuple[tuple[int, EpochState], ...]


Event = Registered | TrainerJoined | SplitMade | SplitGranted | TrainerEnded | TrainerLeft | JobState
EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
"""Reads an event back from its JSON."""


NAME = "journal"
_NOTED = re.compile(rf"{NAME}\.[0-9a-f]{{16}}")
LEAST_BYTES = 2**20
"""A journal smaller than this is not rewritten."""
GROWTH = 2
"""How many times as large as when it was last rewritten it becomes before it is rewritten again."""


class Journal:
    """Events in a folder that one process has at a time.

    A last line that was cut short by a crash is dropped: nobody was told of its event. Any other damage is
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
        """`take_over` takes it from a process that still has it: that one is fenced, and its events do not happen any more."""
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
        """The size from which on it is rewritten."""
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
            if self._lock.replaced:
                # Under a name of its own: whoever had the old one may still write to that, and put another in its place.
                self._path = self._path.with_name(f"{NAME}.{secrets.token_hex(8)}")
                self._replace(data[: self._size])
                self._lock.leave_note(self._path.name)
            elif torn:
                self._file.truncate(self._size)

    def append(self, event: Event) -> None:
        """Write `event` down; when this returns it survives a power cut, when it raises it has not happened."""
        if self._size is None:
            deque(self.read(), maxlen=0)
        assert self._size is not None
        line = _line(event)
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

    @property
    def is_long(self) -> bool:
        """Whether it has grown so much that it should be rewritten."""
        return self._size is not None and self._size > self._least

    def rewrite(self, events: Iterable[Event]) -> None:
        """Have `events`, which must lead to what all so far led to, instead of them; when this raises, nothing has changed."""
        data = b"".join(map(_line, events))
        with self._our_errors("write"):
            self._replace(data)
        self._in_doubt, self._size = False, len(data)
        self._least = max(LEAST_BYTES, GROWTH * len(data))
        self.require_own()

    def put_off(self) -> None:
        """Do not rewrite it before it has grown again."""
        self._least = GROWTH * max(self._least, self._size or 0)

    def require_own(self) -> None:
        """Raise `FencedError` if a successor has taken the journal."""
        self._lock.require_own()

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()
        self._lock.release()

    def _valid(self, folder: Path) -> Path:
        """The journal that counts: the one that was noted, or the first, if none was."""
        note = self._lock.note()
        if not note and not any(folder.glob(f"{NAME}.*")):
            return folder / NAME
        if not _NOTED.fullmatch(note) or not (folder / note).exists():
            raise CorruptFileError(
                f"{folder}: writer.lock should name the journal that counts, one of {NAME}.*, and has {note!r}; restore both "
                "from one copy"
            )
        return folder / note

    def _replace(self, data: bytes) -> None:
        write_durably(self._path, data)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def _remove_others(self) -> None:
        """Journals of those that were replaced, and what a rewrite that died has left: nobody reads them any more."""
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

    def _event(self, line: bytes, number: int) -> Event:
        digest, _, text = line.partition(b" ")
        if digest != b"%08x" % _core.crc32c(text):
            raise CorruptFileError(f"{self._path}: line {number} is damaged")
        try:
            return EVENTS.validate_json(text, strict=True)
        except ValidationError as error:
            raise CorruptFileError(f"{self._path}: line {number} is no event: {error.error_count()} errors") from None


def _line(event: Event) -> bytes:
    text = event.model_dump_json().encode()
    return b"%08x %s\n" % (_core.crc32c(text), text)
