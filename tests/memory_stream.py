"""`MemoryStream`: a fake of the protocol of monolith.streams, in memory, with a clock that waits by advancing.

It is fast and shows what a reader does to it. test_stream_source_kinds.py reads the real streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from monolith.errors import InvalidArgumentError, StreamGapError
from monolith.streams import END, START, Headers, Records
from monolith.streams.stream import Offset

Stored = tuple[int, int, bytes | None, bytes, Headers]


class Clock:
    """Seconds that pass only when somebody waits for them."""

    def __init__(self, start: float = 0.0) -> None:
        self.seconds = start

    def __call__(self) -> float:
        return self.seconds


class MemoryStream:
    """Partitions as lists. `remove` makes gaps, as retention does. With a `clock`, waiting for records advances it."""

    def __init__(self, partitions: int = 1, *, topic: str = "clicks", clock: Clock | None = None) -> None:
        self.url = f"memory:{topic}"
        self.topic, self.clock = topic, clock
        self.records: list[list[Stored]] = [[] for _ in range(partitions)]
        self.next_offsets = [0] * partitions
        self.committed: dict[str, int] = {}
        self.flushes = 0
        self.polls: list[int] = []
        self.changed = threading.Condition()

    def partitions(self) -> list[str]:
        return [f"{self.topic}/{number}" for number in range(len(self.records))]

    def add_partition(self) -> None:
        self.records.append([])
        self.next_offsets.append(0)

    def put(
        self,
        *values: bytes,
        partition: int = 0,
        timestamp: int = -1,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> None:
        with self.changed:
            for value in values:
                self.records[partition].append((self.next_offsets[partition], timestamp, key, value, headers))
                self.next_offsets[partition] += 1
            self.changed.notify_all()

    def remove(self, partition: int, before: int) -> None:
        self.records[partition] = [record for record in self.records[partition] if record[0] >= before]

    def bounds(self) -> dict[str, tuple[int, int]]:
        return {
            name: (records[0][0] if records else self.next_offsets[number], self.next_offsets[number])
            for number, (name, records) in enumerate(zip(self.partitions(), self.records, strict=True))
        }

    def first_offset_at(self, timestamp: int) -> dict[str, int]:
        return {
            name: next((record[0] for record in records if record[1] >= timestamp), self.next_offsets[number])
            for number, (name, records) in enumerate(zip(self.partitions(), self.records, strict=True))
        }

    def reader(self) -> MemoryReader:
        return MemoryReader(self)

    def writer(self, partitions: Sequence[int] | None = None) -> MemoryWriter:
        return MemoryWriter(self, list(range(len(self.records)) if partitions is None else partitions))

    def last(self, partition: str) -> Records | None:
        number = self.number(partition)
        return self.cut(number, self.records[number][-1:]) if self.records[number] else None

    def number(self, partition: str) -> int:
        if partition not in self.partitions():
            raise InvalidArgumentError(f"partition: {self.url} has none {partition!r}")
        return self.partitions().index(partition)

    def cut(self, partition: int, records: Sequence[Stored]) -> Records:
        return Records(
            partition=f"{self.topic}/{partition}",
            offsets=[record[0] for record in records],
            next_offset=records[-1][0] + 1,
            timestamps=[record[1] for record in records],
            keys=[record[2] for record in records],
            values=[record[3] for record in records],
            headers=[record[4] for record in records] if any(record[4] for record in records) else None,
        )


class MemoryReader:
    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self.at: dict[int, int] = {}
        self.woken = False
        self.closed = False

    def assign(self, positions: Mapping[str, Offset]) -> None:
        at = {}
        for name, offset in positions.items():
            number = self.stream.number(name)
            records, end = self.stream.records[number], self.stream.next_offsets[number]
            first = records[0][0] if records else end
            at[number] = first if offset == START else end if offset == END else int(offset)
            self._require(number, at[number])
        self.at = at

    def _require(self, number: int, offset: int) -> None:
        records, end = self.stream.records[number], self.stream.next_offsets[number]
        if not (records[0][0] if records else end) <= offset <= end:
            raise StreamGapError(f"{self.stream.topic}/{number}: does not have record {offset}")

    def poll(self, max_records: int, timeout: float) -> list[Records]:
        self.stream.polls.append(max_records)
        with self.stream.changed:
            deadline = time.monotonic() + timeout
            while not (found := self._collect(max_records)):
                if self.woken:
                    self.woken = False
                    return []
                if self.stream.clock is not None:
                    self.stream.clock.seconds += timeout
                    return []
                if (left := deadline - time.monotonic()) <= 0:
                    return []
                self.stream.changed.wait(left)
        return found

    def _collect(self, max_records: int) -> list[Records]:
        found = []
        for number in list(self.at):
            self._require(number, self.at[number])
            new = [record for record in self.stream.records[number] if record[0] >= self.at[number]][:max_records]
            if new:
                found.append(self.stream.cut(number, new))
                self.at[number] = found[-1].next_offset
                max_records -= len(new)
            if max_records < 1:
                break
        # The next poll begins with another partition.
        self.at = {**dict(list(self.at.items())[1:]), **dict(list(self.at.items())[:1])}
        return found

    def ends(self) -> dict[str, int]:
        return {f"{self.stream.topic}/{number}": self.stream.next_offsets[number] for number in self.at}

    def commit(self, positions: Mapping[str, int]) -> None:
        self.stream.committed.update(positions)

    def wake(self) -> None:
        with self.stream.changed:
            self.woken = True
            self.stream.changed.notify_all()

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class MemoryWriter:
    def __init__(self, stream: MemoryStream, partitions: list[int]) -> None:
        self.stream, self.partitions, self.turn = stream, partitions, 0

    def append(
        self,
        value: bytes,
        *,
        partition: int | None = None,
        key: bytes | None = None,
        timestamp: int | None = None,
        headers: Headers = (),
    ) -> None:
        if partition is None:
            self.turn += 1
            partition = self.partitions[self.turn % len(self.partitions)]
        when = int(time.time() * 1000) if timestamp is None else timestamp
        self.stream.put(value, partition=partition, key=key, timestamp=when, headers=headers)

    def flush(self, timeout: float | None = None) -> None:
        self.stream.flushes += 1

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["Clock", "MemoryStream"]
