"""`Examples`: events in the order of time, as NumPy arrays that every system can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class IdLists:
    """Any number of ids in each row: those of row i are `values[offsets[i]:offsets[i + 1]]`, int64."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> IdLists:
        """Return the lists of these rows."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return IdLists(self.values[np.repeat(self.offsets[rows], lengths) + within], offsets)


Ids = np.ndarray | IdLists
"""int64 [n], or lists."""


@dataclass(frozen=True)
class Examples:
    """Columns of ids by name, numbers (float32 [n, k]), labels and event times (float32 and int64 [n])."""

    ids: Mapping[str, Ids]
    numbers: np.ndarray
    labels: np.ndarray
    times: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def between(self, first: int, end: int) -> Examples:
        """Return the examples [first, end). Columns of one id are views."""
        rows = np.arange(first, end)
        ids = {
            name: one[first:end] if isinstance(one, np.ndarray) else one.take(rows) for name, one in self.ids.items()
        }
        return Examples(ids, self.numbers[first:end], self.labels[first:end], self.times[first:end])

    def take(self, rows: np.ndarray) -> Examples:
        """Return these examples, in this order."""
        ids = {name: one[rows] if isinstance(one, np.ndarray) else one.take(rows) for name, one in self.ids.items()}
        return Examples(ids, self.numbers[rows], self.labels[rows], self.times[rows])

    def batches(self, size: int) -> Iterator[Examples]:
        """Yield them `size` at a time. The last ones may be fewer."""
        for first in range(0, len(self), size):
            yield self.between(first, min(first + size, len(self)))

    def without_labels(self) -> Examples:
        """Return what a system may see when it predicts."""
        return replace(self, labels=np.empty(0, np.float32))


@dataclass(frozen=True)
class Schema:
    """What the columns are: names of single ids, of lists of ids, and how many numbers there are."""

    single: tuple[str, ...]
    lists: tuple[str, ...] = ()
    numbers: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of ids."""
        return (*self.single, *self.lists)


@dataclass(frozen=True)
class DataSet:
    """Events in the order of time, and how they are used.

    Args:
        batch_size: Of training.
        is_drawn: Whether another seed gives other events, so that differences between seeds show all of the uncertainty.
        drifts: False for a control, in which nothing depends on time.
        has_times: Whether `times` are seconds. Otherwise only their order counts.
        about: What is known of the data, for the report.
    """

    name: str
    schema: Schema
    examples: Examples
    batch_size: int
    is_drawn: bool = False
    drifts: bool = True
    has_times: bool = True
    about: Mapping[str, float | str] = field(default_factory=dict)

    def shuffled(self, seed: int) -> DataSet:
        """Return the same events in random order: nothing in them is newer than anything else."""
        order = np.random.default_rng((seed, 7)).permutation(len(self.examples))
        return replace(self, examples=self.examples.take(order))


def of_schema(examples: Examples) -> Schema:
    """Return the schema of `examples`."""
    lists = tuple(name for name, one in examples.ids.items() if isinstance(one, IdLists))
    single = tuple(name for name in examples.ids if name not in lists)
    return Schema(single, lists, examples.numbers.shape[1])
