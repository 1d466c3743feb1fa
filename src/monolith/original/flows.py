"""Flows: the rows of one source by where they come from, several sources as one, and which element is the last."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from monolith.data.sources.records import data_source_key
from monolith.data.transforms.rows import select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch
from monolith.features.batch import column_of, num_rows
from monolith.process_bound import ProcessBound

__all__ = ["CacheOneDataset", "Flow", "FlowSplit", "MergedFlows", "merge_flow", "split_flow"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Flow:
    """The batches of one flow: those of the source, with only the rows of the flow. Batches without any are skipped."""

    def __init__(self, split: FlowSplit, name: str) -> None:
        self._split, self._name = split, name

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._split._next(self._name)) is not None:
            yield batch


class FlowSplit:
    """A source that is read once for several flows, each with a queue for rows that the reader of another flow has read.

    A reader that needs a row while the queue of another flow is full waits for the reader of that flow. If both are the same
    thread it would wait for ever, so it gets an error.
    """

    def __init__(self, source: Iterable[Batch], keys: Mapping[str, int], *, column: str, queue_size: int) -> None:
        if queue_size < 1 or not keys:
            raise InvalidArgumentError(f"expected queue_size >= 1 and some flows, got {queue_size} and {list(keys)}")
        if len(set(keys.values())) < len(keys):
            raise InvalidArgumentError(f"flows: expected different keys, got {dict(keys)}")
        self._batches = iter(source)
        self._keys, self._column, self._queue_size = dict(keys), column, queue_size
        self._queues: dict[str, deque[Batch]] = {name: deque() for name in keys}
        self._readers: dict[str, int] = {}
        """The thread that last read each flow."""
        self._changed = threading.Condition()
        self._ended = False
        self.dropped = 0
        """Rows that belong to no flow."""

    def __getitem__(self, name: str) -> Flow:
        """The flow `name`."""
        if name not in self._queues:
            raise InvalidArgumentError(f"flow: {name!r} is not one of {', '.join(self._queues)}")
        return Flow(self, name)

    def _next(self, name: str) -> Batch | None:
        with self._changed:
            self._readers[name] = threading.get_ident()
            while not self._queues[name] and not self._ended:
                full = [other for other, queue in self._queues.items() if len(queue) >= self._queue_size]
                if not full:
                    self._route()
                elif any(self._readers.get(other) == threading.get_ident() for other in full):
                    raise InvalidArgumentError(
                        f"flow {full[0]!r} has {self._queue_size} batches queued, and this thread reads {name!r}; read each flow "
                        "in its own thread or through merge_flow, or give a larger queue_size"
                    )
                else:
                    self._changed.wait()
            self._changed.notify_all()
            return self._queues[name].popleft() if self._queues[name] else None

    def _route(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._ended = True
            self._changed.notify_all()
            return
        keys = _keys(batch, self._column)
        left = len(keys)
        for name, key in self._keys.items():
            mine = keys == key
            if bool(mine.any()):
                self._queues[name].append(select_rows(batch, mine))
                left -= int(mine.sum())
        if left and not self.dropped:
            _log.warning("%d rows belong to none of the flows %s; they are dropped", left, ", ".join(self._keys))
        self.dropped += left
        self._changed.notify_all()


def split_flow(
    source: Iterable[Batch],
    flows: Sequence[str] | Mapping[str, int],
    *,
    column: str = "data_source_key",
    queue_size: int = 1024,
) -> FlowSplit:
    """Split the rows of `source` into flows by their data source key. Up to `queue_size` batches of each are queued.

    `flows` are names, whose keys are those of `data_source_key`, or keys by name.

    Example:
        >>> batch = {"data_source_key": torch.tensor([7, 9, 7, 8]), "x": torch.tensor([1, 2, 3, 4])}
        >>> split = split_flow([batch, batch], {"ads": 7, "feed": 9})
        >>> [rows["x"].tolist() for rows in split["ads"]], [rows["x"].tolist() for rows in split["feed"]], split.dropped
        ([[1, 3], [1, 3]], [[2], [2]], 2)
    """
    keys = flows if isinstance(flows, Mapping) else {name: data_source_key(name) for name in flows}
    return FlowSplit(source, keys, column=column, queue_size=queue_size)


def _keys(batch: Batch, column: str) -> torch.Tensor:
    keys = column_of(batch, column)
    if not isinstance(keys, torch.Tensor) or keys.numel() != num_rows(batch):
        raise InvalidArgumentError(f"batch[{column!r}]: expected one key per row")
    return keys.reshape(-1)


class MergedFlows:
    """Batches of several sources in turn. See `merge_flow`."""

    def __init__(self, sources: Sequence[Iterable[Batch]], *, queue_size: int) -> None:
        if not sources or queue_size < 0:
            raise InvalidArgumentError(f"expected sources and queue_size >= 0, got {len(sources)} and {queue_size}")
        self._sources, self._queue_size = list(sources), queue_size
        self._left = list(range(len(self._sources)))
        """Sources that have not ended, in the order of their turns."""

    def __iter__(self) -> Iterator[Batch]:
        """Continue after the last batch returned. A new loop restarts sources that have ended."""
        if self._queue_size == 0:
            yield from self._in_turn()
        else:
            with contextlib.closing(_ReadAhead(self._sources, self._queue_size)) as ahead:
                yield from ahead
        self._left = list(range(len(self._sources)))

    def _in_turn(self) -> Iterator[Batch]:
        iterators = {place: iter(self._sources[place]) for place in self._left}
        while self._left:
            place = self._left.pop(0)
            batch = next(iterators[place], None)
            if batch is not None:
                self._left.append(place)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sources and whose turn it is. Only with `queue_size=0`."""
        if self._queue_size:
            raise InvalidArgumentError(
                "queue_size: expected 0 for a state to resume from, as otherwise the order depends on threads"
            )
        return {"left": list(self._left), "sources": [_stateful(source).state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken."""
        if len(state["sources"]) != len(self._sources):
            raise InvalidArgumentError(
                f"state: expected {len(self._sources)} sources, got {len(state['sources'])}; merge the same ones"
            )
        for source, own in zip(self._sources, state["sources"], strict=True):
            _stateful(source).load_state_dict(own)
        self._left = list(state["left"])


def merge_flow(sources: Sequence[Iterable[Batch]], *, queue_size: int = 1024) -> MergedFlows:
    """Return the batches of all sources, one of each in turn, until all have ended.

    A thread reads each source up to `queue_size` batches ahead, and a source that has none ready loses its turn. With
    `queue_size=0` there are no threads, every turn is waited for, and the state can be saved.

    Example:
        >>> import torch
        >>> a, b = ([{"x": torch.tensor([number])} for number in numbers] for numbers in ([1, 2, 3], [10]))
        >>> [batch["x"].item() for batch in merge_flow([a, b], queue_size=0)]
        [1, 10, 2, 3]
    """
    return MergedFlows(sources, queue_size=queue_size)


class _ReadAhead:
    """A thread and a queue for each source, with one condition for all waiters."""

    def __init__(self, sources: Sequence[Iterable[Batch]], size: int) -> None:
        self._size = size
        self._queues: list[deque[Batch]] = [deque() for _ in sources]
        self._reading = len(sources)
        self._failure: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._bound = ProcessBound("merged flows that are read ahead")
        for place, source in enumerate(sources):
            threading.Thread(target=self._read, args=(place, source), name="monolith-merge", daemon=True).start()

    def __iter__(self) -> Iterator[Batch]:
        turn = 0
        while True:
            self._bound.require()
            with self._changed:
                self._changed.wait_for(lambda: any(self._queues) or not self._reading or self._failure)
                if self._failure is not None:
                    raise self._failure
                if not any(self._queues):
                    return
                while not self._queues[turn]:
                    turn = (turn + 1) % len(self._queues)
                batch = self._queues[turn].popleft()
                turn = (turn + 1) % len(self._queues)
                self._changed.notify_all()
            yield batch

    def close(self) -> None:
        """Let the threads end when their reads return."""
        if not self._bound.is_here:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _read(self, place: int, source: Iterable[Batch]) -> None:
        try:
            for batch in source:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._queues[place]) < self._size)
                    if self._stopped:
                        return
                    self._queues[place].append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()


def _stateful(source: Iterable[Batch]) -> Any:  # noqa: ANN401 - anything with a state
    if not hasattr(source, "state_dict") or not hasattr(source, "load_state_dict"):
        raise InvalidArgumentError(f"source: a {type(source).__name__} has no state_dict and load_state_dict")
    return source


class CacheOneDataset(Generic[T]):
    """The elements of a source, each with whether it is the last one.

    The state is that of the source after the last element returned. The element that was read ahead is read again.

    Example:
        >>> list(CacheOneDataset([1, 2, 3]))
        [(1, False), (2, False), (3, True)]
        >>> list(CacheOneDataset([]))
        []
    """

    def __init__(self, source: Iterable[T]) -> None:
        self._source = source
        self._ahead: tuple[T, Any] | None = None
        """The element that was read ahead, and the state of the source after it."""
        self._state: Any = None
        """The state of the source after the last element returned, or None for its current state."""

    def __iter__(self) -> Iterator[tuple[T, bool]]:
        """Continue after the last element returned."""
        for element in self._source:
            held, self._ahead = self._ahead, (element, self._place())
            if held is not None:
                yield self._handed_out(held), False
        if self._ahead is not None:
            held, self._ahead = self._ahead, None
            yield self._handed_out(held), True
        self._state = None

    def _handed_out(self, held: tuple[T, Any]) -> T:
        element, self._state = held
        return element

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the source after the last element returned."""
        state = self._place() if self._state is None else self._state
        if state is None:
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        return dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken."""
        if not hasattr(self._source, "load_state_dict"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        self._source.load_state_dict(state)
        self._ahead = self._state = None

    def _place(self) -> Any:  # noqa: ANN401 - the source's own
        return self._source.state_dict() if hasattr(self._source, "state_dict") else None
