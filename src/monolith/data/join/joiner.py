"""`Joiner`: a process that joins the units it has been given, from its inputs to its output."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import orjson

from monolith.console import Reminder
from monolith.data.join.config import JoinConfig
from monolith.data.join.unit import Unit
from monolith.durable import sync_to_disk, write_durably
from monolith.errors import InvalidArgumentError, StorageError, UnavailableError
from monolith.streams import START, open_stream
from monolith.streams.stream import Records, Stream, StreamReader, StreamWriter

if TYPE_CHECKING:
    from monolith.data.join.archive import ParquetArchive

__all__ = ["JoinStatus", "Joiner"]

_WAIT_SECS = 0.01
_LOOK_SECS = 1.0
_REFRESH_SECS = 30.0
_END = 1 << 62
_ENDS_FILE = "first-ends.json"
_log = logging.getLogger(__name__)


class OpenStream(Protocol):
    """`open_stream`, or what takes its place in a test."""

    def __call__(self, url: str, /, *, settings: dict[str, str] | None, partitions: int | None = None) -> Stream:
        """Open a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinStatus:
    """How a joiner is doing. All numbers are of the units that it has.

    Example:
        >>> JoinStatus(units=2, counts={"impressions": 7}, open_windows=3, memory_bytes=900, lag_records=0, watermark=5).units
        2
    """

    units: int
    counts: dict[str, int]
    """Counters since the units were first started, see docs/guide-joiner.md."""
    open_windows: int
    """Keys in memory, those that are only remembered included."""
    memory_bytes: int
    """Memory that they take, about."""
    lag_records: int
    """Records of the inputs that are not read yet, as far as known."""
    watermark: int
    """Event time up to which windows are closed in all units, milliseconds since 1970. 0 if there is none."""


class Joiner:
    """Joins impressions and actions, see `JoinConfig`. Every unit, the partitions of one number, is joined by one process.

    Example:
        >>> import tempfile
        >>> from monolith.data.join import JoinConfig
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     shown, acted = (open_stream(f"{folder}/{name}", partitions=1) for name in ("shown", "acted"))
        ...     with shown.writer() as impressions, acted.writer() as actions:
        ...         impressions.append(b'{"user":7}', key=b"request 1", timestamp=5_000)
        ...         actions.append(b'{"action":"click"}', key=b"request 1", timestamp=9_000)
        ...     config = JoinConfig.from_json('''{
        ...         "impressions": {"stream": "DIR/shown"}, "actions": {"stream": "DIR/acted"}, "window_secs": 60,
        ...         "labels": [{"name": "clicked", "actions": {"click": 1}}],
        ...         "output": {"stream": "DIR/examples"}, "state": {"folder": "DIR/state"}}'''.replace("DIR", folder))
        ...     with Joiner(config) as joiner:
        ...         joiner.run(until_end=True)
        ...     open_stream(f"{folder}/examples").last("examples/0").values
        [b'{"user":7,"clicked":1.0,"sample_rate":1.0}']
    """

    def __init__(
        self,
        config: JoinConfig,
        *,
        index: int = 0,
        count: int = 1,
        open_stream: OpenStream = open_stream,
        clock: Callable[[], float] = time.time,
        take_over: bool = False,
    ) -> None:
        """Open the streams.

        Args:
            config: what is joined.
            index: number of this process.
            count: how many processes join together. Unit n belongs to process n % count.
            open_stream: opens a stream.
            clock: seconds since 1970.
            take_over: take units from processes that hang, instead of waiting until they have ended.
        """
        if count < 1 or not 0 <= index < count:
            raise InvalidArgumentError(f"index: expected 0 to {count - 1}, for count {count}, got {index}")
        if config.impressions.stream == config.actions.stream:
            raise InvalidArgumentError(
                f"actions.stream: expected another stream than that of the impressions, got {config.actions.stream}"
            )
        self.config, self._index, self._count = config, index, count
        self._clock, self._take_over, self._open = clock, take_over, open_stream
        self._inputs = [
            open_stream(source.stream, settings=source.settings) for source in (config.impressions, config.actions)
        ]
        self.units: list[Unit] = []
        self.archive: ParquetArchive | None = None
        self._stack = ExitStack()
        self._stopping = threading.Event()
        self._readers: list[StreamReader] = []
        self._turn = 0

    def request_stop(self) -> None:
        """Let `run` return soon, after a checkpoint. May be called in any thread, or by a signal handler."""
        self._stopping.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release all units. What was not committed will be read again."""
        self._stack.close()
        self.units, self._readers = [], []

    def run(self, *, until_end: bool = False, report: Callable[[JoinStatus], None] | None = None) -> None:
        """Join until `request_stop` is called.

        Args:
            until_end: return when all records that there are now have been read, after closing all windows.
            report: called about once a second.

        Raises:
            StreamGapError: the inputs do not have the records any more that come after the last checkpoint.
            MemoryLimitError: open windows do not fit into memory.
            FencedError: another process has taken a unit over.
        """
        if not self.units and not self._open_units():
            return
        looked = refreshed = self._clock()
        while not self._stopping.is_set():
            records = self._read()
            self._join(records)
            if until_end and not records and self._is_at_end():
                break
            now = self._clock()
            if now - looked >= _LOOK_SECS:
                looked = now
                self._look(report)
            if now - refreshed >= _REFRESH_SECS:
                refreshed = now
                self._refresh()
        if until_end and not self._stopping.is_set():
            self._close_windows(end=True)
        self.checkpoint()
        if self.archive is not None:
            self._flush()
            self.archive.advance(finish=until_end)
        if report is not None:
            report(self.status())

    def checkpoint(self) -> None:
        """Store the state of all units that have changed."""
        for unit in self.units:
            if unit.dirty:
                self._commit(unit)

    def _commit(self, unit: Unit) -> None:
        self._flush()
        unit.commit(self._output)
        # For the tools that monitor a broker: nothing here reads it back.
        for reader, stream in zip(self._readers, self._inputs, strict=True):
            names = set(stream.partitions())
            reader.commit({name: at for name, at in unit.positions.items() if name in names and isinstance(at, int)})

    def status(self) -> JoinStatus:
        """Return how the joiner is doing."""
        counts = sum((unit.counts for unit in self.units), Counter[str]())
        return JoinStatus(
            units=len(self.units),
            counts=dict(counts),
            open_windows=sum(len(unit.windows) for unit in self.units),
            memory_bytes=sum(unit.windows.size for unit in self.units),
            lag_records=sum(unit.lag_records() for unit in self.units),
            watermark=max(0, min((unit.watermark for unit in self.units), default=0)),
        )

    def _open_units(self) -> bool:
        """Take over the units of this process. Returns False if it was asked to stop meanwhile."""
        numbers = self._numbers()
        config, mine = self.config, [number for number in numbers if number % self._count == self._index]
        if not mine:
            raise InvalidArgumentError(
                f"count: expected at most {len(numbers)}, one process for each partition, got {self._count}"
            )
        wanted = max(numbers) + 1
        self._output = self._open(config.output.stream, settings=config.output.settings, partitions=wanted)
        rejects = config.dead_letters
        dead_letters = (
            None if rejects is None else self._open(rejects.stream, settings=rejects.settings, partitions=wanted)
        )
        limit = (config.state.memory_mb << 20) // len(mine)
        for number in mine:
            unit = self._locked_unit(number, limit)
            if unit is None:
                return False
            self._stack.callback(unit.close)
            self.units.append(unit)
        self._writer = self._stack.enter_context(self._output.writer(mine))
        self._dead_letters: StreamWriter | None = None
        if dead_letters is not None:
            self._dead_letters = self._stack.enter_context(dead_letters.writer(mine))
        for unit in self.units:
            unit.begin_output(self._output)
        self._begin_reading()
        for unit in self.units:
            # The first commit says where the output began. It also makes a fenced joiner fail before it writes anything.
            unit.commit()
        if config.parquet is not None:
            from monolith.data.join.archive import ParquetArchive

            partitions = [self._output.partitions()[number] for number in mine]
            self.archive = ParquetArchive(config, self._output, partitions, self._dead_letters, clock=self._clock)
            self._stack.callback(self.archive.close)
        return True

    def _numbers(self) -> list[int]:
        """Return the numbers of the partitions, which are the same for both inputs."""
        shown, acted = ({_number_of(name) for name in stream.partitions()} for stream in self._inputs)
        if shown != acted:
            raise InvalidArgumentError(
                f"actions.stream: expected the partitions of the impressions, {_text(shown)}, got {_text(acted)}. Records of "
                "one key must be in partitions of one number: write both streams with the same keys and as many partitions, "
                "or copy them into such streams first, with `monolith stream repartition`"
            )
        return sorted(shown)

    def _locked_unit(self, number: int, limit: int) -> Unit | None:
        """Return a unit once no other process has it. None if this process was asked to stop."""
        partitions = {
            name: stream is self._inputs[0]
            for stream in self._inputs
            for name in stream.partitions()
            if _number_of(name) == number
        }
        reminder = Reminder(_log)
        while not self._stopping.is_set():
            try:
                return Unit(self.config, number, partitions, limit=limit, clock=self._clock, take_over=self._take_over)
            except StorageError as error:
                if "another writer" not in str(error):
                    raise
            reminder.waiting("unit %d, which another process has", number)
            self._stopping.wait(0.1)
        return None

    def _begin_reading(self) -> None:
        if self.config.start == "end":
            self._begin_at(self._first_ends())
        for stream in self._inputs:
            names = set(stream.partitions())
            reader = self._stack.enter_context(stream.reader())
            positions = {name: at for unit in self.units for name, at in unit.positions.items() if name in names}
            reader.assign(positions)
            self._readers.append(reader)
        self._homes = {name: unit for unit in self.units for name in unit.positions}
        self._find_ends()

    def _first_ends(self) -> Mapping[str, int]:
        """Return the ends of all partitions when the first process began with this state.

        Partitions that were added since are not among them: all their records came later.
        """
        file = Path(self.config.state.folder) / _ENDS_FILE
        if not file.exists():
            ends = {name: at for stream in self._inputs for name, at in stream.first_offset_at(_END).items()}
            own = file.with_name(f"{file.name}.{os.getpid()}")
            write_durably(own, orjson.dumps(ends))
            with suppress(FileExistsError):  # another process was faster
                os.link(own, file)
            own.unlink()
            sync_to_disk(file.parent)
        known: dict[str, int] = orjson.loads(file.read_bytes())
        return known

    def _begin_at(self, ends: Mapping[str, int]) -> None:
        """Replace the position "end" by an offset. After a restart it would be another one."""
        for unit in self.units:
            for name, at in unit.positions.items():
                if at == "end":
                    unit.positions[name] = ends.get(name, START)

    def _find_ends(self) -> None:
        for reader in self._readers:
            for name, end in reader.ends().items():
                self._homes[name].ends[name] = end

    def _read(self) -> list[Records]:
        """Return records of the input that is behind in event time, or else of the other one.

        Reading the shorter stream ahead of the other would fill the memory with actions that wait for their impressions.
        """
        shown, acted = (min(unit.event_time(impressions=side) for unit in self.units) for side in (True, False))
        first, second = self._readers if shown <= acted else self._readers[::-1]
        size = self.config.poll_records
        records = first.poll(size, 0) or second.poll(size, 0)
        if records:
            return records
        self._turn = 1 - self._turn
        return self._readers[self._turn].poll(size, _WAIT_SECS)

    def _join(self, records: Iterable[Records]) -> None:
        for part in records:
            self._homes[part.partition].add(part)
        self._close_windows()

    def _close_windows(self, *, end: bool = False) -> None:
        for unit in self.units:
            if end:
                unit.end()
            else:
                unit.advance()
            more = True
            while more:
                more = unit.close_next()
                unit.write(self._writer, self._dead_letters)
                if unit.wants_commit:
                    self._commit(unit)
                unit.check_memory()

    def _flush(self) -> None:
        self._writer.flush()
        if self._dead_letters is not None:
            self._dead_letters.flush()

    def _is_at_end(self) -> bool:
        # Asked of the streams, because a reader may not know of the newest records.
        for stream in self._inputs:
            for name, end in stream.first_offset_at(_END).items():
                if name in self._homes:
                    self._homes[name].ends[name] = end
        return all(unit.is_at_end for unit in self.units)

    def _look(self, report: Callable[[JoinStatus], None] | None) -> None:
        self._find_ends()
        if self.archive is not None:
            # A power cut may take away what was not flushed, and a file would have it all the same.
            self._flush()
            self.archive.advance()
        if report is not None:
            report(self.status())

    def _refresh(self) -> None:
        """Begin again with all units if there are new partitions."""
        try:
            numbers = {number for number in self._numbers() if number % self._count == self._index}
        except InvalidArgumentError as error:
            # Partitions are added to one input after the other.
            _log.warning("the joiner stays with the partitions that it has: %s", error)
            return
        except UnavailableError as error:
            _log.warning("cannot look for more partitions now: %s", error)
            return
        if numbers != {unit.number for unit in self.units}:
            _log.info("there are new partitions: this process now has %s", _text(numbers))
            self.checkpoint()
            self.close()
            self._open_units()


def _number_of(partition: str) -> int:
    return int(partition.rpartition("/")[2])


def _text(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
