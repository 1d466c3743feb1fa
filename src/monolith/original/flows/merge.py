"""Several flows as one: a batch of each in turn."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from monolith.errors import InvalidArgumentError
from monolith.features import Batch
from monolith.process_bound import ProcessBound

__all__ = ["MergedFlows", "merge_flow"]


class MergedFlows:
    """Batches of several sources in turn; see `merge_flow`."""

    def __init__(self, sources: Sequence[Iterable[Batch]], *, queue_size: int) -> None:
        if not sources or queue_size < 0:
            raise InvalidArgumentError(f"expected sources and queue_size >= 0, got {len(sources)} and {queue_size}")
        self._sources, self._queue_size = list(sources), queue_size
        self._left = list(range(len(self._sources)))
        """Sources that have not ended; whose turn it is comes first."""

    def __iter__(self) -> Iterator[Batch]:
        """Go on after the last batch given out; a new loop starts sources that have ended again."""
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
        """The states of the sources and whose turn it is; only where they wait for each other (`queue_size=0`)."""
        if self._queue_size:
            raise InvalidArgumentError(
                "queue_size: who comes first depends on threads; take 0 for a state to go on from"
            )
        return {"left": list(self._left), "sources": [_stateful(source).state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        if len(state["sources"]) != len(self._sources):
            raise InvalidArgumentError(
                f"state: expected {len(self._sources)} sources, got {len(state['sources'])}; merge the same ones"
            )
        for source, own in zip(self._sources, state["sources"], strict=True):
            _stateful(source).load_state_dict(own)
        self._left = list(state["left"])


def merge_flow(sources: Sequence[Iterable[Batch]], *, queue_size: int = 1024) -> MergedFlows:
    """The batches of all sources, one of each in turn, until all have ended.

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
    """A thread and a queue for each source, and one place where all who wait are woken."""

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
        """Let the threads end as soon as their reads return."""
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
