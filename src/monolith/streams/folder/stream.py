"""`FolderStream`: a stream in a folder of a local disk, without a broker. `create_folder_stream` makes one."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from monolith.durable import sync_to_disk, write_durably
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, StorageError
from monolith.streams.batching_writer import BatchingWriter
from monolith.streams.folder.partition import PartitionWriter
from monolith.streams.folder.reader import FolderReader, first_offset_at, last_records
from monolith.streams.folder.segments import SegmentList, partition_bounds
from monolith.streams.folder.settings import FolderSettings
from monolith.streams.stream import Records
from monolith.urls import local_path

__all__ = ["FolderStream", "create_folder_stream"]

_logger = logging.getLogger(__name__)

_FILE = "stream.json"
_MAX_PARTITIONS = 4096


class FolderStream:
    """A stream in a folder: one topic, named as the folder, with a folder for each partition. See docs/guide-streams.md.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = create_folder_stream(f"{folder}/clicks", partitions=2)
        ...     stream = FolderStream(f"{folder}/clicks")
        ...     stream.add_partitions(1)
        ...     stream.partitions()
        ['clicks/0', 'clicks/1', 'clicks/2']
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, str] | None = None) -> None:
        self.url = local_path(path, "url")
        self._folder = Path(self.url)
        self._topic = self._folder.absolute().name
        self._identity, kept = _read(self._folder)
        self.settings = _merged(kept, settings)
        """The settings kept with the stream, with those given to this object over them."""

    def partitions(self) -> list[str]:
        """As of every stream."""
        return [f"{self._topic}/{number}" for number in range(_count_partitions(self._folder))]

    def add_partitions(self, more: int) -> None:
        """Add `more` partitions. Keys are divided among all partitions, so the records of a key may be in another one from then
        on. Readers and writers made before do not have the new ones.
        """
        present = _count_partitions(self._folder)
        if more < 1 or present + more > _MAX_PARTITIONS:
            raise InvalidArgumentError(
                f"more: expected 1 or more, and at most {_MAX_PARTITIONS} partitions with the {present} there are, got {more}"
            )
        try:
            for number in range(present, present + more):
                (self._folder / str(number)).mkdir(exist_ok=True)
            sync_to_disk(self._folder)
        except OSError as error:
            raise StorageError(f"{self._folder}: partitions cannot be added: {error.strerror}") from error

    def bounds(self) -> dict[str, tuple[int, int]]:
        """As of every stream."""
        return {name: partition_bounds(SegmentList(folder)) for name, folder in self._folders().items()}

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each partition."""
        return {
            name: sum(path.stat().st_size for path in folder.glob("*.segment"))
            for name, folder in self._folders().items()
        }

    def first_offset_at(self, timestamp: int) -> dict[str, int]:
        """As of every stream."""
        return {name: first_offset_at(folder, timestamp) for name, folder in self._folders().items()}

    def reader(self) -> FolderReader:
        """As of every stream."""
        return FolderReader(self._folders)

    def writer(self, partitions: Sequence[int] | None = None) -> BatchingWriter:
        """Return a new writer of some partitions, by default of all.

        Raises:
            StorageError: another writer has one of them. The message names it.
        """
        present = _count_partitions(self._folder)
        wanted = list(dict.fromkeys(range(present) if partitions is None else partitions))
        wrong = [number for number in wanted if not 0 <= number < present]
        if wrong or not wanted:
            raise InvalidArgumentError(
                f"partitions: expected some of 0 to {present - 1} of {self.url}, got {wrong[0] if wrong else 'none'}"
            )
        if not self.settings.fsync:
            _logger.warning("%s: fsync is off: a power cut may lose records and leave the stream unreadable", self.url)
        opened: dict[int, PartitionWriter] = {}
        try:
            for number in wanted:
                opened[number] = PartitionWriter(self._folder / str(number), self._identity, self.settings)
        except BaseException:
            for partition in opened.values():
                partition.close(clean=True)
            raise
        return BatchingWriter(
            opened,
            linger_secs=self.settings.linger_ms / 1000,
            max_pending_bytes=self.settings.max_pending_bytes,
        )

    def last(self, partition: str) -> Records | None:
        """As of every stream."""
        folders = self._folders()
        if partition not in folders:
            raise InvalidArgumentError(f"partition: expected one of {', '.join(folders)}, got {partition!r}")
        return last_records(partition, folders[partition])

    def __repr__(self) -> str:
        return f"FolderStream({self.url!r})"

    def _folders(self) -> dict[str, Path]:
        return {name: self._folder / str(number) for number, name in enumerate(self.partitions())}


def create_folder_stream(
    path: str | os.PathLike[str], partitions: int, settings: Mapping[str, str] | None = None
) -> bool:
    """Make a stream in the folder `path`, which must not exist or be empty. `settings` are kept with it.

    Returns False if there is a stream already, perhaps made by another process at the same moment.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     create_folder_stream(f"{folder}/clicks", 4), create_folder_stream(f"{folder}/clicks", 4)
        (True, False)
    """
    if not 1 <= partitions <= _MAX_PARTITIONS:
        raise InvalidArgumentError(f"partitions: expected 1 to {_MAX_PARTITIONS}, got {partitions}")
    folder = Path(local_path(path, "url")).absolute()
    kept = _merged(FolderSettings(), settings).model_dump(mode="json", exclude_defaults=True)
    if (folder / _FILE).exists():
        return False
    content = {"format": "monolith-stream", "version": 1, "id": secrets.token_hex(16), "settings": kept}
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir(parents=True)
        for number in range(partitions):
            (temporary / str(number)).mkdir()
        write_durably(temporary / _FILE, json.dumps(content, indent=2).encode() + b"\n")
        # Fails if the folder is there and not empty, so a stream is never half of one and half of another.
        temporary.rename(folder)
        sync_to_disk(folder.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (folder / _FILE).exists():
            return False
        raise StorageError(f"{folder}: a stream cannot be made there: {error.strerror}") from error
    return True


def _read(folder: Path) -> tuple[bytes, FolderSettings]:
    """Return identity and settings of the stream in `folder`."""
    path = folder / _FILE
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != "monolith-stream":
            raise ValueError
        version, identity, settings = content["version"], bytes.fromhex(content["id"]), json.dumps(content["settings"])
    except FileNotFoundError:
        raise InvalidArgumentError(
            f"{folder}: there is no stream. Make one with `monolith stream create {folder} --partitions 4`, or with "
            f"open_stream({str(folder)!r}, partitions=4)"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise CorruptFileError(f"{path}: does not describe a stream; the file is damaged") from None
    if version != 1:
        raise CorruptFileError(f"{path}: has version {version}, this release reads version 1")
    try:
        return identity, FolderSettings.from_json(settings)
    except ConfigError as error:
        raise CorruptFileError(f"{path}: {error}") from None


def _merged(kept: FolderSettings, given: Mapping[str, str] | None) -> FolderSettings:
    if not given:
        return kept
    own = FolderSettings.from_texts(given).model_dump(include=set(given))
    return FolderSettings(**{**kept.model_dump(), **own})


def _count_partitions(folder: Path) -> int:
    return next(number for number in count() if not (folder / str(number)).is_dir())
