"""Open windows of a unit: entries by key, an index of when each is due, and checkpoints of both (`Windows`, `SnapshotStore`)."""

from __future__ import annotations

import math
import os
import re
import secrets
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Protocol

from monolith import _core
from monolith.durable import sync_to_disk
from monolith.errors import CorruptFileError, StorageError

__all__ = ["ENTRY_BYTES", "SnapshotStore", "WindowStore", "Windows", "due_of"]

ENTRY_BYTES = 280
"""What an entry takes in memory in addition to its bytes and those of its key: slots of dicts and lists, headers of objects."""

_PAGE_BYTES = 4096
# Keys that are far from each other are on pages of their own, which a commit has in memory until they are written.
_DUE = struct.Struct("<q")
_MAGIC = b"MONOJOIN"
_VERSION = 1
_HEAD = struct.Struct("<8sIII")  # magic, version, bytes of the meta data, checksum of both and the meta data
_BLOCK = struct.Struct("<II")  # bytes, checksum. The last block has no bytes
_LENGTHS = struct.Struct("<HI")  # of key and entry
_BLOCK_BYTES = 1 << 20
_MAX_META_BYTES = 64 << 20
_NAME = re.compile(r"(\d{10})-(\d{10})\.windows")


def due_of(entry: bytes) -> int:
    """Return when something is to be done about an entry: milliseconds since 1970 of event time."""
    due: int = _DUE.unpack_from(entry, 1)[0]
    return due


class WindowStore(Protocol):
    """A store on disk, to which entries are moved that do not fit into memory."""

    def meta(self) -> bytes | None:
        """Return the meta data of the last commit, None if there was none."""

    def get(self, key: bytes) -> bytes | None:
        """Return the entry of a key as of the last commit."""

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the entries that there are of some keys as of the last commit."""

    def first_due(self, at_least: int) -> int | None:
        """Return the first bucket from `at_least` on that has keys."""

    def keys_due(self, bucket: int) -> list[bytes]:
        """Return the keys of a bucket."""

    def commit(
        self,
        meta: bytes,
        entries: Mapping[bytes, bytes | None],
        scheduled: Mapping[int, list[bytes]],
        done: list[int],
    ) -> None:
        """Store changed and removed entries, further keys of buckets, and that buckets are done, all or nothing."""

    def close(self) -> None:
        """Release what it holds."""


class Windows:
    """Entries by key, and the keys that are due by bucket, a range of event time.

    An entry is a `bytes` whose bytes 1 to 8 are the time at which it is due. A key may be in several buckets, and counts in the
    one that its entry names.

    Example:
        >>> windows = Windows(bucket_ms=1000, limit=1 << 20)
        >>> windows.put(b"a", b"x" + (2500).to_bytes(8, "little"), due=2500)
        >>> windows.take_due(2), windows.take_due(3)
        (None, [b'a'])
    """

    def __init__(self, *, bucket_ms: int, limit: int, store: WindowStore | None = None) -> None:
        """Begin empty, or with what is in `store`."""
        self.bucket_ms, self.limit = bucket_ms, limit
        self.size = 0
        """Bytes of the entries in memory."""
        self.first_open = 0
        """The first bucket that is not done."""
        self._entries: dict[bytes, bytes] = {}
        self._due: defaultdict[int, list[bytes]] = defaultdict(list)
        self._store = store
        # With a store: what is not in it yet, and buckets whose index it still has.
        self._changed: set[bytes] = set()
        self._done: list[int] = []

    def __len__(self) -> int:
        """Return the number of entries in memory."""
        return len(self._entries)

    def get(self, key: bytes) -> bytes | None:
        """Return the entry of a key."""
        entry = self._entries.get(key)
        if entry is None and self._store is not None and key not in self._changed:
            return self._store.get(key)
        return entry

    def put(self, key: bytes, entry: bytes, due: int) -> None:
        """Set the entry of a key, and schedule the key for `due`, which the entry names as well."""
        entries = self._entries
        before = entries.get(key)
        entries[key] = entry
        self.size += len(entry) + (len(key) + ENTRY_BYTES if before is None else -len(before))
        bucket = due // self.bucket_ms
        # Never in a bucket that is done: nothing would look there again.
        self._due[bucket if bucket >= self.first_open else self.first_open].append(key)
        if self._store is not None:
            self._changed.add(key)

    def update(self, key: bytes, entry: bytes) -> None:
        """Set the entry of a key that is already scheduled for when the entry is due."""
        before = self._entries.get(key)
        self.size += len(entry) + (len(key) + ENTRY_BYTES if before is None else -len(before))
        self._entries[key] = entry
        if self._store is not None:
            self._changed.add(key)

    def remove(self, key: bytes) -> None:
        """Remove a key."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= len(entry) + len(key) + ENTRY_BYTES
        if self._store is not None:
            self._changed.add(key)

    def fetch(self, keys: Iterable[bytes]) -> set[bytes] | None:
        """Bring the entries of keys that are only in the store into memory.

        Returns the keys that have no entry. None without a store: those that are not in memory have none.
        """
        if self._store is None:
            return None
        missing = {key for key in keys if key not in self._entries}
        found = self._store.get_many(missing - self._changed)
        for key, entry in found.items():
            self._entries[key] = entry
            self.size += len(entry) + len(key) + ENTRY_BYTES
        return missing - found.keys()

    def table(self) -> _core.WindowTable:
        """Return what the functions of the core work on. What they add and remove is reported to `note_growth`."""
        changed = None if self._store is None else self._changed
        return _core.WindowTable(self._entries, self._due, changed, self.bucket_ms, self.first_open)

    def note_growth(self, entries: int, size: int) -> None:
        """Count entries that were added, and the bytes of theirs and of their keys."""
        self.size += size + entries * ENTRY_BYTES

    def take_due(self, before: int) -> list[bytes] | None:
        """Return the keys of the first bucket below `before` that has any, which is done then.

        None if there is no such bucket. All below `before` are done then.
        """
        bucket = min(self._due, default=before)
        if self._store is not None:
            stored = self._store.first_due(self.first_open)
            bucket = bucket if stored is None else min(bucket, stored)
        if bucket >= before:
            self.first_open = max(self.first_open, before)
            return None
        keys = self._due.pop(bucket, [])
        if self._store is not None:
            keys += self._store.keys_due(bucket)
            self._done.append(bucket)
        self.first_open = max(self.first_open, bucket + 1)
        return keys

    @property
    def is_full(self) -> bool:
        """Whether the entries in memory exceed the limit. With a store a part of it is left for the next commit."""
        if self._store is None:
            return self.size > self.limit
        return self.size > self.limit // 2 or len(self._changed) * _PAGE_BYTES > self.limit // 2

    def commit(self, meta: bytes) -> None:
        """Write what has changed to the store with `meta`, and leave in memory what fits into three eighths of the limit."""
        assert self._store is not None
        entries = {key: self._entries.get(key) for key in self._changed}
        self._store.commit(meta, entries, self._due, self._done)
        self._changed, self._due, self._done = set(), defaultdict(list), []
        if self.size > self.limit * 3 // 8:
            self._evict(self.limit // 4)

    def _evict(self, size: int) -> None:
        """Drop the oldest entries, all of which the store has, until `size` bytes are left."""
        share = 1 - size / self.size
        for key in list(islice(self._entries, math.ceil(len(self._entries) * share))):
            self.size -= len(self._entries.pop(key)) + len(key) + ENTRY_BYTES
        # A dict keeps the slots of what was removed until it grows.
        self._entries = dict(self._entries)

    def load(self, entries: Mapping[bytes, bytes]) -> None:
        """Add entries that were stored."""
        for key, entry in entries.items():
            self.put(key, entry, due_of(entry))

    def snapshot(self) -> Mapping[bytes, bytes]:
        """Return all entries. Only without a store."""
        return self._entries


class SnapshotStore:
    """Checkpoints of windows that are in memory: one file with all entries, the newest of which counts.

    Files are numbered by epoch and number. The epoch rises whenever a joiner takes the folder over, so what a fenced one writes
    late is never the newest.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     SnapshotStore(Path(folder)).save(b"{}", {b"a": b"entry"}, epoch=1)
        ...     SnapshotStore(Path(folder)).load()
        (b'{}', {b'a': b'entry'})
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def load(self) -> tuple[bytes, dict[bytes, bytes]] | None:
        """Return meta data and entries of the newest file, None if there is none.

        Raises:
            CorruptFileError: it is damaged.
        """
        names = self._names()
        if not names:
            return None
        self._number = int(names[-1].partition("-")[2].partition(".")[0])
        return _read(self._folder / names[-1])

    def save(self, meta: bytes, entries: Mapping[bytes, bytes], *, epoch: int) -> None:
        """Write a file, and remove older ones. It is durable when this returns."""
        self._number += 1
        name = f"{epoch:010d}-{self._number:010d}.windows"
        temporary = self._folder / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb") as file:
                for part in _packed(meta, entries):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._folder / name)
            sync_to_disk(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"{self._folder / name}: cannot be written: {error.strerror}") from error
        for older in self._names():
            if older < name:
                (self._folder / older).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files."""
        for name in self._names():
            (self._folder / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def _packed(meta: bytes, entries: Mapping[bytes, bytes]) -> Iterator[bytes]:
    head = _HEAD.pack(_MAGIC, _VERSION, len(meta), 0)[:-4]
    yield head + struct.pack("<I", _core.crc32c(head + meta)) + meta
    parts: list[bytes] = []
    size, pack = 0, _LENGTHS.pack
    for key, entry in entries.items():
        parts += (pack(len(key), len(entry)), key, entry)
        size += len(key) + len(entry) + _LENGTHS.size
        if size >= _BLOCK_BYTES:
            yield _block(b"".join(parts))
            parts, size = [], 0
    if parts:
        yield _block(b"".join(parts))
    yield _block(b"")


def _block(data: bytes) -> bytes:
    return _BLOCK.pack(len(data), _core.crc32c(data)) + data


def _read(path: Path) -> tuple[bytes, dict[bytes, bytes]]:
    def damaged(what: str) -> CorruptFileError:
        return CorruptFileError(
            f"{path}: {what}; restore the folder from a copy, or remove it and join again from the start into an empty output"
        )

    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or head[:8] != _MAGIC:
            raise damaged("is not a file of a joiner")
        _, version, length, checksum = _HEAD.unpack(head)
        if version != _VERSION:
            raise CorruptFileError(f"{path}: has version {version}, this joiner reads {_VERSION}; upgrade it")
        meta = file.read(min(length, size, _MAX_META_BYTES))
        if len(meta) < length or _core.crc32c(head[:-4] + meta) != checksum:
            raise damaged("its header is damaged")
        entries: dict[bytes, bytes] = {}
        while True:
            frame = file.read(_BLOCK.size)
            if len(frame) < _BLOCK.size:
                raise damaged("is cut short")
            length, checksum = _BLOCK.unpack(frame)
            data = file.read(min(length, size))
            if len(data) < length or _core.crc32c(data) != checksum:
                raise damaged("a block is damaged")
            if not length:
                break
            entries.update(_unpacked(data))
        if file.read(1):
            raise damaged("has something after its end")
    return meta, entries


def _unpacked(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at, end, unpack, head = 0, len(data), _LENGTHS.unpack_from, _LENGTHS.size
    while at < end:
        key, entry = unpack(data, at)
        start = at + head
        at = start + key + entry
        yield data[start : start + key], data[start + key : at]
