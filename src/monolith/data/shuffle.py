"""Rows of a source in random order, as far as a buffer reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from monolith.data.transforms.rows import column_state, concat_rows, load_column, select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, num_rows

__all__ = ["Shuffle"]


class Shuffle:
    """Mixes rows across batches: fills a buffer with `buffer_rows` rows, shuffles it, gives out the older half, and again.

    Every row comes out once. Batches have `batch_size` rows, the last one fewer. The state holds the rows in the buffer, so
    a resumed run is the same run; it is as large as the buffer.

    Example:
        >>> source = [{"x": torch.arange(i, i + 2)} for i in range(0, 8, 2)]
        >>> batches = [batch["x"].tolist() for batch in Shuffle(source, buffer_rows=8, batch_size=3, seed=1)]
        >>> sorted(sum(batches, [])), [len(batch) for batch in batches]
        ([0, 1, 2, 3, 4, 5, 6, 7], [3, 3, 2])
    """

    def __init__(self, source: Iterable[Batch], *, buffer_rows: int, batch_size: int, seed: int = 0) -> None:
        if buffer_rows < 2 or batch_size < 1 or seed < 0:
            raise InvalidArgumentError(
                f"expected buffer_rows >= 2, batch_size >= 1 and seed >= 0, got {buffer_rows}, {batch_size} and {seed}"
            )
        self._source = source
        self._buffer_rows, self._batch_size, self._seed = buffer_rows, batch_size, seed
        self._rng = np.random.default_rng((seed, 0))
        self._held: list[Batch] = []
        """Rows that wait for the next shuffle."""
        self._ready: Batch = {}
        """Rows in their final order; replaced, never changed."""
        self._given = 0
        """How many of the ready rows have been given out."""
        self._ended = False
        """Whether the source is used up while rows are left: a new loop over it would start it again."""

    def __iter__(self) -> Iterator[Batch]:
        """Go on after the last batch given out."""
        yield from self._full_batches()
        if not self._ended:
            for batch in self._source:
                self._held.append(batch)
                if sum(map(num_rows, self._held)) >= self._buffer_rows:
                    self._shuffle(keep=self._buffer_rows // 2)
                    yield from self._full_batches()
            self._ended = True
            if self._held:
                self._shuffle(keep=0)
        while left := num_rows(self._ready) - self._given:
            # Said before the last batch is given out, because nobody may ask for another.
            self._ended = left > self._batch_size
            yield self._take(min(left, self._batch_size))
        self._ended = False

    def _shuffle(self, keep: int) -> None:
        """Make the held rows ready in random order, but for `keep` of them; what was ready stays in front."""
        rows = concat_rows(self._held)
        order = torch.from_numpy(self._rng.permutation(num_rows(rows)))
        out, rest = order[: len(order) - keep], order[len(order) - keep :]
        left = select_rows(self._ready, torch.arange(self._given, num_rows(self._ready))) if self._ready else None
        shuffled = select_rows(rows, out)
        self._ready, self._given = concat_rows([left, shuffled]) if left else shuffled, 0
        self._held = [select_rows(rows, rest)] if keep else []

    def _full_batches(self) -> Iterator[Batch]:
        while num_rows(self._ready) - self._given >= self._batch_size:
            yield self._take(self._batch_size)

    def _take(self, rows: int) -> Batch:
        batch = select_rows(self._ready, torch.arange(self._given, self._given + rows))
        self._given += rows
        return batch

    def shard(self, index: int, count: int) -> Shuffle:
        """The part of worker `index` of `count`, with its own random numbers."""
        if not hasattr(self._source, "shard"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} cannot be sharded")
        part = Shuffle(
            self._source.shard(index, count),
            buffer_rows=self._buffer_rows,
            batch_size=self._batch_size,
            seed=self._seed,
        )
        part._rng = np.random.default_rng((self._seed, index))
        return part

    def state_dict(self) -> dict[str, Any]:
        """The source's state, the generator's, and the rows of the buffer."""
        if not hasattr(self._source, "state_dict"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        return {
            "source": self._source.state_dict(),
            "rng": self._rng.bit_generator.state,
            "held": [_saved(batch) for batch in self._held],
            "ready": _saved(self._ready),
            "given": self._given,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        if not hasattr(self._source, "load_state_dict"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        self._source.load_state_dict(state["source"])
        self._rng.bit_generator.state = state["rng"]
        self._held = [_loaded(batch) for batch in state["held"]]
        self._ready, self._given, self._ended = _loaded(state["ready"]), state["given"], state["ended"]


def _saved(batch: Batch) -> dict[str, Any]:
    return {name: column_state(column) for name, column in batch.items()}


def _loaded(state: Mapping[str, Any]) -> Batch:
    return {name: load_column(column) for name, column in state.items()}
