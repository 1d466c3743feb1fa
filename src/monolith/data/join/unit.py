"""`Unit`: the partitions of one number of both inputs, with their windows, their watermark, and their partition of the output."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from monolith.console import RareWarnings
from monolith.data.join.config import JoinConfig
from monolith.data.join.lmdb_store import LmdbStore
from monolith.data.join.records import BAD_RECORDS, ActionParser, ImpressionParser, RefusedRecord
from monolith.data.join.state import SnapshotStore, Windows
from monolith.data.join.window_join import ACTIONS_HEADER, ORIGIN_HEADER, Published, WindowJoin, bucket_ms
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    MemoryLimitError,
    StorageError,
    UnavailableError,
)
from monolith.streams.stream import Headers, Offset, Records, Stream, StreamWriter
from monolith.writer_lock import WriterLock

__all__ = ["Unit", "dead_letter_headers", "origin_of"]

_META_VERSION = 2
_FIXED = ("window_secs", "lead_secs", "keep_ms", "emit", "late")
_SCAN_SECS = 60.0
_SNAPSHOT_SHARE = 20
_TIME = itemgetter(1)
_log = logging.getLogger(__name__)


def origin_of(headers: Headers) -> tuple[str, int, int] | None:
    """Return input partition, offset and ordinal from the headers of a record. None if a joiner has not written it.

    Example:
        >>> origin_of((("origin", b"impressions/3:1207:0"),))
        ('impressions/3', 1207, 0)
    """
    for name, value in headers:
        if name == ORIGIN_HEADER:
            parts = value.decode(errors="replace").rsplit(":", 2)
            if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
                return parts[0], int(parts[1]), int(parts[2])
    return None


def dead_letter_headers(bad: RefusedRecord) -> Headers:
    """Return the headers of a dead letter. They are those of the dead letters of a `StreamSource`.

    Example:
        >>> dict(dead_letter_headers(RefusedRecord("not_json", "shown/0", 12, None, b"{")))["dead-letter.offset"]
        b'12'
    """
    topic = bad.partition.rpartition("/")[0]
    return (
        ("dead-letter.reason", f"{bad.reason}: {BAD_RECORDS.get(bad.reason, 'it was not joined')}".encode()),
        ("dead-letter.stream", topic.encode()),
        ("dead-letter.partition", bad.partition.encode()),
        ("dead-letter.offset", str(bad.offset).encode()),
    )


class Unit:
    """Joins the partitions of one number. One process at a time has a unit, with its folder of state and its output partition.

    `output` is where its partition of the output ends as far as it was read or written by this process.
    """

    def __init__(
        self,
        config: JoinConfig,
        number: int,
        partitions: Mapping[str, bool],
        *,
        limit: int,
        clock: Callable[[], float] = time.time,
        take_over: bool = False,
    ) -> None:
        """Lock the unit's folder and load its state.

        Args:
            config: what the joiner does.
            number: of the partitions.
            partitions: names of the input partitions, with whether they have impressions.
            limit: bytes of memory for its windows.
            clock: seconds since 1970.
            take_over: fence a process that has the unit and hangs.

        Raises:
            StorageError: another process has it.
            ConfigError: the state is of a joiner with another window.
            CorruptFileError: the state is damaged.
        """
        self.config, self.number, self._clock = config, number, clock
        self.folder = Path(config.state.folder) / f"unit-{number:05d}"
        self._sides = dict(partitions)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be made: {error.strerror}") from error
        self._lock = WriterLock(self.folder, take_over=take_over)
        try:
            self._load(limit)
        except BaseException:
            self._lock.release()
            raise
        future = round(1000 * config.max_future_secs)
        bounds = {"max_bytes": config.max_record_bytes, "max_future_ms": future}
        self._impressions = ImpressionParser(config.impressions, config.added_columns, **bounds)
        self._actions = ActionParser(config.actions, **bounds)
        self._warnings = RareWarnings(_log, seconds=30.0)
        self._arrived = dict.fromkeys(self._sides, clock())
        self.ends: dict[str, int] = {}
        """Ends of the input partitions, as far as known."""
        self._committed = clock()
        self._commit_secs = 0.0
        self.dirty = False
        """Whether something was read since the last commit."""

    def _load(self, limit: int) -> None:
        state = self.config.state
        self._snapshots = SnapshotStore(self.folder)
        found = self._snapshots.load()
        note = self._lock.note()
        self.epoch = (int(note) if note.isdecimal() else 0) + 1
        self._lock.leave_note(str(self.epoch))
        self._store: LmdbStore | None = None
        if (self.folder / "lmdb").exists() and not state.spill:
            raise ConfigError(
                f"state.spill: {self.folder} has windows on disk; set it to true, or choose another state.folder"
            )
        if state.spill:
            (self.folder / "lmdb").mkdir(exist_ok=True)
            self._store = LmdbStore(self.folder / "lmdb", epoch=self.epoch, max_bytes=state.disk_gb << 30)
        width = bucket_ms(round(self.config.window_secs * 1000))
        self.windows = Windows(bucket_ms=width, limit=limit, store=self._store)
        meta = self._store.meta() if self._store is not None else None
        if meta is None and found is not None:
            meta, entries = found
            self.windows.load(entries)
        self.is_new = meta is None
        self._restore(self._checked_meta(meta))
        if found is not None and self._store is not None:
            # Only now: the store has everything that the snapshot had.
            self.commit()
            self._snapshots.clear()

    def _checked_meta(self, meta: bytes | None) -> dict[str, Any]:
        if meta is None:
            return {}
        try:
            parsed: dict[str, Any] = orjson.loads(meta)
            version, settings = parsed["version"], parsed["settings"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise CorruptFileError(f"{self.folder}: does not hold the state of a joiner") from None
        if version != _META_VERSION:
            raise CorruptFileError(
                f"{self.folder}: has version {version}, this joiner reads {_META_VERSION}; use the release that wrote it"
            )
        for name, value in self._fixed().items():
            if settings.get(name) != value:
                raise ConfigError(
                    f"{name}: the state in {self.folder} was made with {settings.get(name)}, got {value}; keep it, or give "
                    "the changed joiner another state.folder and an empty output"
                )
        return parsed

    def _fixed(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in _FIXED}

    def _restore(self, meta: dict[str, Any]) -> None:
        names: list[str] = meta.get("partitions", [])
        self.partitions = [*names, *(name for name in sorted(self._sides) if name not in names)]
        self.join = WindowJoin(self.config, self.windows, partitions=self.partitions, types=meta.get("types", ()))
        self.join.counts.update(meta.get("counts", {}))
        self.windows.first_open = meta.get("first_open", 0)
        self.positions: dict[str, Offset] = dict.fromkeys(self._sides, self.config.start)
        self.positions.update({name: at for name, at in meta.get("positions", {}).items() if name in self._sides})
        self._newest: dict[str, int] = dict(meta.get("newest", {}))
        self.watermark: int = meta.get("watermark", 0)
        self.output: int | None = meta.get("output")
        self._output_partition: str | None = meta.get("output_partition")

    def close(self) -> None:
        """Release the unit for other processes. What was not committed is read again."""
        if self._store is not None:
            self._store.close()
        self._lock.release()

    @property
    def counts(self) -> Counter[str]:
        """Counters since the unit was first started, as of what was read. What is read again after a kill counts once."""
        return self.join.counts

    def begin_output(self, output: Stream) -> None:
        """Learn what the output has already. Called once before records are added."""
        partition = output.partitions()[self.number]
        if self._output_partition not in (None, partition):
            raise ConfigError(
                f"output.stream: the state in {self.folder} belongs to the output {self._output_partition}, got {partition}; "
                "give another output another state.folder"
            )
        self._output_partition = partition
        last = output.last(partition)
        end = 0 if last is None else last.next_offset
        if self.output is None:
            if end and self.config.start == "start":
                raise InvalidArgumentError(
                    f"output.stream: {partition} has records, but {self.folder} has no state, so which impressions they are of "
                    "is not known; restore the state, or write to an empty stream, or begin with start: end"
                )
            self.output = end
            return
        if self.output < end:
            self._scan(output, partition, self.output, end)

    def _scan(self, output: Stream, partition: str, start: int, end: int) -> None:
        """Read what was written since the last commit."""
        indexes, bits = {name: index for index, name in enumerate(self.partitions)}, self._bits()
        with output.reader() as reader:
            reader.assign({partition: start})
            at, deadline = start, time.monotonic() + _SCAN_SECS
            while at < end:
                for records in reader.poll(10_000, 0.1):
                    at, deadline = records.next_offset, time.monotonic() + _SCAN_SECS
                    for timestamp, headers in zip(
                        records.timestamps, records.headers or [()] * len(records), strict=True
                    ):
                        self._note_published(timestamp, headers, indexes, bits)
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{output.url}: {partition} has records up to {end}, but none came after {at}"
                    )
        if self.join.published:
            _log.info(
                "unit %d: %d impressions were written after the last checkpoint, and are not written again",
                self.number,
                len(self.join.published),
            )

    def _bits(self) -> dict[str, int]:
        return {name: 1 << index for index, name in enumerate(self.join.types)}

    def _note_published(
        self, timestamp: int, headers: Headers, indexes: Mapping[str, int], bits: Mapping[str, int]
    ) -> None:
        origin = origin_of(headers)
        if origin is None or origin[0] not in indexes:
            return
        known = self.join.published.setdefault((indexes[origin[0]], origin[1]), Published(timestamp))
        known.ordinal = max(known.ordinal, origin[2])
        for name, value in headers:
            if name == ACTIONS_HEADER:
                known.actions |= sum(bits.get(type_, 0) for type_ in value.decode(errors="replace").split(","))

    def add(self, records: Records) -> None:
        """Join records of an input partition."""
        name, refused = records.partition, list[RefusedRecord]()
        index, now_ms = self.partitions.index(name), round(self._clock() * 1000)
        if self._sides[name]:
            impressions = self._impressions.parse(records, now_ms, refused)
            self.counts["impressions"] += len(impressions)
            self.join.add_impressions(index, impressions)
            newest = max(map(_TIME, impressions), default=0)
        else:
            actions = self._actions.parse(records, now_ms, refused)
            self.counts["actions"] += len(actions)
            self.join.add_actions(index, actions)
            newest = max(map(_TIME, actions), default=0)
        for bad in refused:
            self.counts[f"bad_{bad.reason}"] += 1
        self.join.refuse(refused)
        self._newest[name] = max(self._newest.get(name, 0), newest)
        self._arrived[name] = self._clock()
        self.positions[name] = records.next_offset
        self.dirty = True

    def event_time(self, *, impressions: bool) -> int:
        """Return the newest event time of the partition of impressions, or actions, that is furthest behind."""
        return min(self._newest.get(name, 0) for name, side in self._sides.items() if side == impressions)

    def advance(self) -> None:
        """Move the watermark to where the partitions have come."""
        now, late = self._clock(), round(1000 * self.config.out_of_order_secs)
        waiting = {name for name in self._sides if not self._is_idle(name, now)}
        if waiting:
            newest = min(self._newest.get(name, 0) for name in waiting)
        else:
            # Nothing comes any more: event time goes on as the clock does, so that windows close.
            silence = now - max(self._arrived.values())
            newest = max(self._newest.values(), default=0) + round(1000 * silence)
        self.watermark = max(self.watermark, newest - late)

    def end(self) -> None:
        """Move the watermark so that all windows close, because no more records will come."""
        newest = max(self._newest.values(), default=0)
        self.watermark = max(self.watermark, newest + round(1000 * self.config.window_secs) + self.windows.bucket_ms)

    def _is_idle(self, name: str, now: float) -> bool:
        return self._has_ended(name) and now - self._arrived[name] >= self.config.idle_secs

    def _has_ended(self, name: str) -> bool:
        """Return whether all of a partition has been read, as far as known."""
        return self.ends.get(name, 0) <= _read_up_to(self.positions[name])

    @property
    def is_at_end(self) -> bool:
        """Whether all records of the inputs have been read, as far as known."""
        return all(map(self._has_ended, self._sides))

    def close_next(self) -> bool:
        """Close the windows of the next moment that the watermark has passed. Returns False if there are none."""
        return self.join.close_next(self.watermark)

    def write(self, output: StreamWriter, dead_letters: StreamWriter | None) -> int:
        """Append what is ready to the output. Returns how many records.

        Raises:
            FencedError: another process has taken the unit over.
        """
        examples, refused = self.join.take()
        if not examples and not refused:
            return 0
        self._lock.require_own()
        self.dirty = True
        output.extend(examples, partition=self.number)
        for bad in refused:
            if bad.reason in BAD_RECORDS:
                self._warnings.warn("refused %s:%d: %s", bad.partition, bad.offset, BAD_RECORDS[bad.reason])
            if dead_letters is not None:
                dead_letters.append(bad.value, partition=self.number, key=bad.key, headers=dead_letter_headers(bad))
        return len(examples)

    @property
    def wants_commit(self) -> bool:
        """Whether a commit is due, by time or because memory is full."""
        if self._store is not None and self.windows.is_full:
            return True
        pause = max(self.config.state.checkpoint_secs, _SNAPSHOT_SHARE * self._commit_secs)
        return self.dirty and self._clock() - self._committed >= pause

    def check_memory(self) -> None:
        """Raise `MemoryLimitError` if open windows do not fit into memory and must not be on disk."""
        if self._store is None and self.windows.is_full:
            raise MemoryLimitError(
                f"state.memory_mb: {len(self.windows):,} open windows of unit {self.number} take more than its share of "
                f"{self.windows.limit >> 20} MB; raise it, set state.spill to true, or lower window_secs or keep_secs. "
                f"Nothing is lost: a joiner with more memory continues from the last checkpoint"
            )

    def commit(self, output: Stream | None = None) -> None:
        """Store windows and positions together. What was appended to the output must have been flushed.

        Raises:
            FencedError: another process has taken the unit over.
        """
        began = self._clock()
        self._lock.require_own()
        if self.join.published:
            self.join.forget_published()
        if output is not None and not self.join.published and self._output_partition is not None:
            # With some left, a restarted joiner has to read them again.
            last = output.last(self._output_partition)
            self.output = self.output if last is None else max(self.output or 0, last.next_offset)
        if self._store is not None:
            self.windows.commit(self._meta())
        else:
            self._snapshots.save(self._meta(), self.windows.snapshot(), epoch=self.epoch)
        self._committed, self.dirty = self._clock(), False
        self._commit_secs = self._committed - began

    def _meta(self) -> bytes:
        positions = {name: at for name, at in self.positions.items() if isinstance(at, int)}
        return orjson.dumps(
            {
                "version": _META_VERSION,
                "epoch": self.epoch,
                "settings": self._fixed(),
                "partitions": self.partitions,
                "types": self.join.types,
                "positions": positions,
                "newest": self._newest,
                "watermark": self.watermark,
                "first_open": self.windows.first_open,
                "output_partition": self._output_partition,
                "output": self.output,
                "counts": dict(self.counts),
            }
        )

    def lag_records(self) -> int:
        """Return how many records of the inputs are not read yet, as far as known."""
        return sum(max(0, self.ends.get(name, 0) - _read_up_to(at)) for name, at in self.positions.items())


def _read_up_to(position: Offset) -> int:
    return position if isinstance(position, int) else 0
