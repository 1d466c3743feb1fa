"""`Repartition`: copies a stream into one that is partitioned by another key, so that two streams can be joined by it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from monolith.console import RareWarnings
from monolith.data.join.config import ImpressionInput
from monolith.data.join.records import ImpressionParser, RefusedRecord
from monolith.durable import write_durably
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, StorageError, UnavailableError
from monolith.streams.stream import Headers, NewRecord, Records, Stream, StreamReader, StreamWriter, partition_of_key
from monolith.writer_lock import WriterLock

__all__ = ["COPIED_HEADER", "Repartition"]

COPIED_HEADER = "copied-from"
"""Header with partition and offset of the record that a record is a copy of, such as `actions/3:1207`."""

_FILE = "repartition.json"
_POLL_RECORDS = 5000
_POLL_SECS = 0.1
_SCAN_SECS = 60.0
_REFRESH_SECS = 30.0
_END = 1 << 62
_log = logging.getLogger(__name__)


class Repartition:
    """Copies every record of `source` once into the partition of `target` that its key belongs to, also through kills.

    The key is made of fields as that of a joiner, and is the key of the copy. Value, timestamp and headers stay as they are,
    and the header `copied-from` is added. Records of one key keep their order if one partition of `source` has them. A record
    whose key cannot be read is copied with the key it has: the joiner refuses it, and says why.

    Example:
        >>> import tempfile
        >>> from monolith.streams import open_stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     source, target = (open_stream(f"{folder}/{name}", partitions=2) for name in ("by_item", "by_request"))
        ...     with source.writer() as writer:
        ...         writer.append(b'{"item":5,"request":"r"}', key=b"5")
        ...     copying = Repartition(source, target, key=["request"], state=Path(folder) / "state")
        ...     copying.run(until_end=True)
        ...     copying.close()
        ...     copying.counts["copied"], [last.keys for name in target.partitions() if (last := target.last(name))]
        (1, [[b'r']])
    """

    def __init__(
        self,
        source: Stream,
        target: Stream,
        *,
        key: Sequence[str],
        state: Path,
        checkpoint_secs: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the state, and learn what the target has already.

        Args:
            source: the stream that is copied.
            target: another stream, which nothing else writes to.
            key: fields of the JSON records that make the key.
            state: local folder for the positions in `source`.
            checkpoint_secs: seconds between two checkpoints.
            clock: seconds.

        Raises:
            StorageError: another process has the state.
            ConfigError: the state is of other streams, of another key, or of a target with fewer partitions.
            InvalidArgumentError: the target has records, and there is no state.
        """
        if set(source.partitions()) & set(target.partitions()):
            raise InvalidArgumentError(f"target: expected another stream than the source, got {target.url}")
        self.counts: Counter[str] = Counter()
        """Since this process began: records `copied`, those `without_key`, and those `repeated`, which the target had already."""
        self._source, self._target, self._key = source, target, tuple(key)
        # What has no time, no upper bound and no forbidden fields refuses a record for its key, or because it is not JSON.
        self._parser = ImpressionParser(
            ImpressionInput(stream=source.url, key=self._key), (), max_bytes=_END, max_future_ms=0
        )
        self._checkpoint_secs, self._clock = checkpoint_secs, clock
        self._stopping = threading.Event()
        self._warnings = RareWarnings(_log, seconds=30.0)
        self._path = Path(state) / _FILE
        try:
            Path(state).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{state}: cannot be made: {error.strerror}") from error
        self._written: dict[tuple[str, str], int] = {}
        # By partition of the target and of the source: the offset in the source from which on the target has nothing.
        self._numbers = range(len(target.partitions()))
        with ExitStack() as stack:
            self._lock = WriterLock(Path(state))
            stack.callback(self._lock.release)
            found = self._load()
            self._positions: dict[str, int] = {} if found is None else dict(found["positions"])
            self._writer: StreamWriter = stack.enter_context(target.writer())
            if found is not None:
                self._ends: dict[str, int] = dict(found["ends"])
                self._learn_written()
            self._reader: StreamReader = stack.enter_context(source.reader())
            self._reader.assign(self._positions)
            self._read_new_partitions()
            self.checkpoint()
            self._stack = stack.pop_all()

    def request_stop(self) -> None:
        """Let `run` return soon, after a checkpoint. May be called in any thread, or by a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """Release the streams and the state. What was not in a checkpoint is read again, and not written again."""
        self._stack.close()

    def run(self, *, until_end: bool = False) -> None:
        """Copy until `request_stop` is called. With `until_end` return when all records that there are have been copied."""
        committed = refreshed = self._clock()
        while not self._stopping.is_set():
            found = self._reader.poll(_POLL_RECORDS, _POLL_SECS)
            for records in found:
                self._copy(records)
            now = self._clock()
            if now - committed >= self._checkpoint_secs:
                self.checkpoint()
                committed = self._clock()
            if now - refreshed >= _REFRESH_SECS:
                self._read_new_partitions()
                refreshed = now
            if until_end and not found and self._is_at_end():
                break
        self.checkpoint()

    def checkpoint(self) -> None:
        """Store how far the source has been copied. Raises `FencedError` if another process has taken the state over."""
        self._writer.flush()
        self._lock.require_own()
        self._written = {pair: at for pair, at in self._written.items() if at > self._positions.get(pair[1], 0)}
        if not self._written:
            # With some left, whoever starts next has to read them again.
            self._ends = {name: self._end_of(name) for name in self._target.partitions()}
        content = {**self._identity(), "positions": self._positions, "ends": self._ends}
        write_durably(self._path, json.dumps(content, indent=2).encode() + b"\n")

    def _identity(self) -> dict[str, Any]:
        topics = sorted({name.rpartition("/")[0] for name in self._source.partitions()})
        return {"version": 1, "source": topics, "target": self._target.partitions(), "key": list(self._key)}

    def _load(self) -> Mapping[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
            positions, ends = found["positions"], found["ends"]
            if not all(type(at) is int for at in (*positions.values(), *ends.values())):
                raise TypeError
        except FileNotFoundError:
            for name in self._target.partitions():
                if self._target.last(name) is not None:
                    raise InvalidArgumentError(
                        f"target: {name} has records, but {self._path.parent} has no state, so which of the source it has is "
                        "not known; restore the state, or copy into an empty stream"
                    ) from None
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CorruptFileError(
                f"{self._path}: is damaged; restore it from a copy, or remove it and copy into an empty stream"
            ) from None
        for name, value in self._identity().items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{name}: the state in {self._path.parent} was made with {found.get(name)}, got {value}; keep it, or copy "
                    "into an empty stream with another state. Keys move when a target gets other partitions"
                )
        return found

    def _end_of(self, name: str) -> int:
        last = self._target.last(name)
        return 0 if last is None else last.next_offset

    def _learn_written(self) -> None:
        """Read what was written to the target since the checkpoint that says where it ended."""
        for name in self._target.partitions():
            at, end = self._ends[name], self._end_of(name)
            if at >= end:
                continue
            with self._target.reader() as reader:
                reader.assign({name: at})
                deadline = time.monotonic() + _SCAN_SECS
                while at < end:
                    for records in reader.poll(_POLL_RECORDS, _POLL_SECS):
                        at, deadline = records.next_offset, time.monotonic() + _SCAN_SECS
                        for headers in records.headers or ():
                            self._note_written(name, headers)
                    if time.monotonic() > deadline:
                        raise UnavailableError(
                            f"{self._target.url}: {name} has records up to {end}, but none came after {at}"
                        )

    def _note_written(self, name: str, headers: Headers) -> None:
        for header, value in headers:
            if header == COPIED_HEADER:
                partition, _, offset = value.decode(errors="replace").rpartition(":")
                if offset.isdecimal():
                    self._written[name, partition] = int(offset) + 1

    def _read_new_partitions(self) -> None:
        new = set(self._source.partitions()) - set(self._positions)
        if new:
            starts = self._source.bounds()
            self._positions |= {name: starts[name][0] for name in new}
            self._reader.assign(self._positions)

    def _copy(self, records: Records) -> None:
        # The time is not looked at.
        timeless = replace(records, timestamps=[1] * len(records))
        refused: list[RefusedRecord] = []
        keys = {offset: key for key, _, offset, _ in self._parser.parse(timeless, 1, refused)}
        if refused:
            self.counts["without_key"] += len(refused)
            self._warnings.warn(
                "%s:%d: %s cannot be read from it; it is copied with the key it has",
                records.partition,
                refused[-1].offset,
                ", ".join(self._key),
            )
        targets = self._target.partitions()
        parts: defaultdict[int, list[NewRecord]] = defaultdict(list)
        for number, offset in enumerate(records.offsets):
            key = keys.get(offset, records.keys[number])
            at = self._numbers[0] if key is None else partition_of_key(key, self._numbers)
            if offset < self._written.get((targets[at], records.partition), 0):
                self.counts["repeated"] += 1
                continue
            headers = records.headers[number] if records.headers is not None else ()
            kept = tuple(header for header in headers if header[0] != COPIED_HEADER)
            copied = (COPIED_HEADER, f"{records.partition}:{offset}".encode())
            timestamp = records.timestamps[number]
            when = timestamp if timestamp >= 0 else time.time_ns() // 1_000_000
            parts[at].append((records.values[number], key, when, (*kept, copied)))
        for at, part in parts.items():
            self._writer.extend(part, partition=at)
            self.counts["copied"] += len(part)
        self._positions[records.partition] = records.next_offset

    def _is_at_end(self) -> bool:
        ends = self._source.first_offset_at(_END)
        return all(self._positions.get(name, 0) >= end for name, end in ends.items())
