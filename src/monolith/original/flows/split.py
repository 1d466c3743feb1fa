"""One source as several flows: rows by the data source key they carry."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from monolith.data.sources.records import data_source_key
from monolith.data.transforms.rows import select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch
from monolith.features.batch import column_of, num_rows

__all__ = ["Flow", "FlowSplit", "split_flow"]

_log = logging.getLogger(__name__)


class Flow:
    """The batches of one flow: those of the source, with its rows only; ones without any are left out."""

    def __init__(self, split: FlowSplit, name: str) -> None:
        self._split, self._name = split, name

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._split._next(self._name)) is not None:
            yield batch


class FlowSplit:
    """A source that is read once for several flows, each with a queue for what another one's reader came upon.

    A reader that needs a row of its own while another flow's queue is full waits for that flow's reader. If that is the same
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
        """The thread that each flow was last read by."""
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
                        f"flow {full[0]!r} has {self._queue_size} batches waiting, and this thread reads {name!r}; read them by "
                        "merge_flow or threads of their own, or give a larger queue_size"
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
    """The rows of `source` by the flow their data source key names; up to `queue_size` batches of each wait for their reader.

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
