"""`MicroBatcher`: joins requests that wait at the same time into one prediction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from monolith.errors import DeadlineExceededError
from monolith.features import Ragged
from monolith.features.batch import Batch, BatchColumn
from monolith.serve.replica import Replica

__all__ = ["MicroBatcher", "Predict", "join_batches"]

Predict = Callable[[Mapping[str, BatchColumn], float], dict[str, Tensor]]
"""Predicts a batch before a deadline."""


@dataclass(eq=False, slots=True)
class _Group:
    """Requests that are predicted together."""

    batches: list[Mapping[str, BatchColumn]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    deadline: float = 0.0
    full: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    outputs: dict[str, Tensor] | None = None
    """None if predicting them together failed: every request is then predicted by itself, so that an error is its own."""


class MicroBatcher:
    """Joins requests of the same replica with the same kinds of columns.

    The first request of a group waits for others, predicts all of them in its thread and hands out the rows. Predictions are
    equal to those of single requests up to the rounding of matrix products, which may depend on the number of rows.
    """

    def __init__(self, *, max_rows: int, wait_secs: float) -> None:
        self._max_rows, self._wait_secs = max_rows, wait_secs
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Group] = {}

    def predict(
        self, replica: Replica, batch: Mapping[str, BatchColumn], rows: int, deadline: float, run: Predict
    ) -> dict[str, Tensor]:
        """Return the predictions of `batch`, which `run` has made for it and others.

        Raises:
            DeadlineExceededError: they were not there before `deadline`.
        """
        if rows >= self._max_rows:
            return run(batch, deadline)
        key = (id(replica), *((name, *_kind(column)) for name, column in batch.items()))
        with self._lock:
            group = self._open.get(key)
            leads = group is None or sum(group.rows) + rows > self._max_rows
            if group is None or leads:
                group = self._open[key] = _Group()
            position = len(group.rows)
            group.batches.append(batch)
            group.rows.append(rows)
            group.deadline = max(group.deadline, deadline)
            if sum(group.rows) >= self._max_rows:
                group.full.set()
        if leads:
            self._lead(key, group, deadline, run)
        elif not group.done.wait(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceededError("the deadline of the request was exceeded while it was predicted with others")
        if group.outputs is None:
            return run(batch, deadline)
        begin = sum(group.rows[:position])
        return {name: output[begin : begin + rows] for name, output in group.outputs.items()}

    def _lead(self, key: Hashable, group: _Group, deadline: float, run: Predict) -> None:
        group.full.wait(max(0.0, min(self._wait_secs, deadline - time.monotonic())))
        with self._lock:
            if self._open.get(key) is group:
                del self._open[key]
        try:
            if len(group.batches) > 1:
                group.outputs = run(join_batches(group.batches), group.deadline)
        except Exception:
            group.outputs = None
        finally:
            group.done.set()


def _kind(column: BatchColumn) -> tuple[Hashable, ...]:
    if isinstance(column, Ragged):
        return (Ragged, column.values.dtype, column.values.shape[1:])
    return (Tensor, column.dtype, column.shape[1:])


def join_batches(batches: Sequence[Mapping[str, BatchColumn]]) -> Batch:
    """Return the rows of all batches, which have the same columns, one after the other.

    Example:
        >>> join_batches([{"user": torch.tensor([1])}, {"user": torch.tensor([2, 3])}])
        {'user': tensor([1, 2, 3])}
    """
    joined: Batch = {}
    for name, first in batches[0].items():
        if not isinstance(first, Ragged):
            joined[name] = torch.cat([batch[name] for batch in batches])  # type: ignore[misc]
            continue
        parts = [part for batch in batches if isinstance(part := batch[name], Ragged)]
        lengths = torch.cat([part.offsets.diff() for part in parts])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        joined[name] = Ragged(torch.cat([part.values for part in parts]), offsets)
    return joined
