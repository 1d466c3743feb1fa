"""`LmdbStore`: open windows on disk, in LMDB. Changes, input positions and the epoch of the writer are one transaction."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monolith.errors import FencedError, StorageError
from monolith.optional_packages import import_extra

__all__ = ["LmdbStore"]

_BUCKET = struct.Struct(">QQ")  # bucket, and number of the commit. Big endian, so that they are sorted by bucket
_KEY_BYTES = struct.Struct("<H")
_META, _EPOCH = b"meta", b"epoch"
_Transaction = Any  # lmdb has no types


class LmdbStore:
    """Entries by key, keys by bucket, and meta data. One process writes, which `epoch` fences.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = LmdbStore(Path(folder), epoch=1, max_bytes=1 << 24)
        ...     store.commit(b"{}", {b"a": b"entry", b"b": None}, {7: [b"a"]}, done=[])
        ...     store.meta(), store.get(b"a"), store.first_due(0), store.keys_due(7)
        ...     store.close()
        (b'{}', b'entry', 7, [b'a'])
    """

    def __init__(self, folder: Path, *, epoch: int, max_bytes: int) -> None:
        """Open or make a store for the writer of `epoch`, which fences writers of lower epochs."""
        self._lmdb: Any = import_extra("lmdb", extra="join", purpose="a joiner with `spill`")
        self._folder, self._epoch = folder, epoch
        with self._errors():
            self._env = self._lmdb.open(str(folder), map_size=max_bytes, max_dbs=3, max_readers=16, readahead=False)
            self._entries, self._due, self._meta = (self._env.open_db(name) for name in (b"entries", b"due", b"meta"))
            with self._env.begin(write=True) as transaction:
                transaction.put(_EPOCH, self._checked_epoch(transaction), db=self._meta)
            # Open until the next commit: beginning one for each read costs more than the read.
            self._read = self._env.begin()

    def meta(self) -> bytes | None:
        """Return the meta data of the last commit, None if there was none."""
        found: bytes | None = self._read.get(_META, db=self._meta)
        return found

    def get(self, key: bytes) -> bytes | None:
        """Return the entry of a key as of the last commit."""
        found: bytes | None = self._read.get(key, db=self._entries)
        return found

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the entries that there are of some keys as of the last commit."""
        # Sorted: neighbours are on one page.
        with self._read.cursor(db=self._entries) as cursor:
            return dict(cursor.getmulti(sorted(keys)))

    def first_due(self, at_least: int) -> int | None:
        """Return the first bucket from `at_least` on that has keys."""
        with self._read.cursor(db=self._due) as cursor:
            return _BUCKET.unpack(cursor.key())[0] if cursor.set_range(_BUCKET.pack(at_least, 0)) else None

    def keys_due(self, bucket: int) -> list[bytes]:
        """Return the keys of a bucket."""
        found: list[bytes] = []
        with self._read.cursor(db=self._due) as cursor:
            there = cursor.set_range(_BUCKET.pack(bucket, 0))
            while there and _BUCKET.unpack(cursor.key())[0] == bucket:
                found += _unpacked(cursor.value())
                there = cursor.next()
        return found

    def commit(
        self,
        meta: bytes,
        entries: Mapping[bytes, bytes | None],
        scheduled: Mapping[int, list[bytes]],
        done: list[int],
    ) -> None:
        """Store changed and removed entries, further keys of buckets, and that buckets are done, all or nothing.

        Raises:
            FencedError: a store of a higher epoch has been opened. Nothing was changed.
            StorageError: the disk or the map is full. Nothing was changed.
        """
        with self._errors():
            self._read.abort()
            try:
                with self._env.begin(write=True) as transaction:
                    self._checked_epoch(transaction)
                    self._write(transaction, entries, scheduled, done)
                    transaction.put(_META, meta, db=self._meta)
            finally:
                self._read = self._env.begin()

    def close(self) -> None:
        """Release the files."""
        self._read.abort()
        self._env.close()

    def _write(
        self,
        transaction: _Transaction,
        entries: Mapping[bytes, bytes | None],
        scheduled: Mapping[int, list[bytes]],
        done: list[int],
    ) -> None:
        # Sorted: neighbours are on one page.
        with transaction.cursor(db=self._entries) as cursor:
            cursor.putmulti(sorted((key, entry) for key, entry in entries.items() if entry is not None))
            for key in sorted(key for key, entry in entries.items() if entry is None):
                if cursor.set_key(key):
                    cursor.delete()
        with transaction.cursor(db=self._due) as cursor:
            for bucket in sorted(scheduled):
                # Behind what earlier commits have of the bucket.
                number = 0
                there = cursor.prev() if cursor.set_range(_BUCKET.pack(bucket + 1, 0)) else cursor.last()
                if there:
                    last, number = _BUCKET.unpack(cursor.key())
                    number = number + 1 if last == bucket else 0
                cursor.put(_BUCKET.pack(bucket, number), _packed(scheduled[bucket]))
            for bucket in done:
                there = cursor.set_range(_BUCKET.pack(bucket, 0))
                # Without a key after the last one was deleted.
                while there and cursor.key() and _BUCKET.unpack(cursor.key())[0] == bucket:
                    there = cursor.delete()

    def _checked_epoch(self, transaction: _Transaction) -> bytes:
        """Return the epoch as bytes. Raises `FencedError` if there is a higher one."""
        found = transaction.get(_EPOCH, db=self._meta)
        if found is not None and int(found) > self._epoch:
            raise FencedError(f"{self._folder}: a joiner of epoch {int(found)} has taken it over; this one should end")
        return b"%d" % self._epoch

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._lmdb.MapFullError as error:
            raise StorageError(f"{self._folder}: is full; raise state.disk_gb") from error
        except self._lmdb.Error as error:
            raise StorageError(f"{self._folder}: {error}") from error


def _packed(keys: list[bytes]) -> bytes:
    return b"".join(part for key in keys for part in (_KEY_BYTES.pack(len(key)), key))


def _unpacked(packed: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(packed):
        start = at + _KEY_BYTES.size
        at = start + _KEY_BYTES.unpack_from(packed, at)[0]
        yield packed[start:at]
