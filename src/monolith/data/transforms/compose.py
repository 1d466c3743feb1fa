"""Transforms in order, as alternatives, and applied to a source, random numbers that can be saved, and shuffling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from monolith.data.sources.source import HasLag, StreamLag
from monolith.data.transforms.rows import column_state, concat_rows, load_column, numbers_of, select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, num_rows

__all__ = ["Compose", "LogicalOr", "Seeded", "Shuffle", "Transformed"]


class Seeded:
    """Base of transforms that draw random numbers: the same seed and batches give the same result.

    Example:
        >>> first = Seeded(seed=1)
        >>> state = first.state_dict()
        >>> drawn = first._rng.random()
        >>> first.load_state_dict(state)
        >>> first._rng.random() == drawn
        True
    """

    def __init__(self, *, seed: int) -> None:
        if seed < 0:
            raise InvalidArgumentError(f"seed: expected 0 or more, got {seed}")
        self._seed = seed
        self._rng = np.random.default_rng((seed, 0))

    def for_shard(self, index: int) -> Self:
        """Return the same transform at its beginning, with the random numbers of worker `index`."""
        other = copy.copy(self)
        other._rng = np.random.default_rng((self._seed, index))
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator: plain values."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the random numbers from where `state` was taken."""
        try:
            self._rng.bit_generator.state = state["rng"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"state: expected what state_dict returned: {error}") from None


Transform = Callable[[Batch], Batch]


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Compose:
    """Transforms in order. A row stays if it passes all of them.

    Example:
        >>> from monolith.data.transforms import FilterByLabel
        >>> both = Compose([FilterByLabel(thresholds=(1.0,)), FilterByLabel(thresholds=(3.0,))])
        >>> both({"label": torch.tensor([0.0, 2.0, 4.0])})["label"].tolist()
        [4.0]
    """

    def __init__(self, transforms: Iterable[Transform]) -> None:
        self.transforms = tuple(transforms)

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        for transform in self.transforms:
            batch = transform(batch)
        return batch

    def for_shard(self, index: int) -> Self:
        """Return the same transforms at their beginning, with the random numbers of worker `index`."""
        return type(self)(_for_shard(transform, index) for transform in self.transforms)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those transforms that have one, by position."""
        return {key: part.state_dict() for key, part in self._stateful_parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every transform from `state`."""
        parts = self._stateful_parts()
        if parts.keys() != state.keys():
            raise InvalidArgumentError(f"state: expected transforms {sorted(parts)}, got {sorted(state)}")
        for key, part in parts.items():
            part.load_state_dict(state[key])

    def _stateful_parts(self) -> dict[str, _Stateful]:
        parts: dict[str, object] = {str(place): transform for place, transform in enumerate(self.transforms)}
        return {place: part for place, part in parts.items() if isinstance(part, _Stateful)}


class LogicalOr(Compose):
    """Keeps rows that one of two transforms keeps, as the first leaves them, or else as the second does.

    Neither may repeat rows, and both must leave the same columns.

    Example:
        >>> from monolith.data.transforms import FilterByValue
        >>> low, high = (FilterByValue(column="x", op=op, operand=5) for op in ("lt", "gt"))
        >>> LogicalOr(low, high)({"x": torch.tensor([9, 5, 1])})["x"].tolist()
        [9, 1]
    """

    def __init__(self, first: Transform, second: Transform) -> None:
        super().__init__((first, second))

    def for_shard(self, index: int) -> Self:
        """Return the same transforms at their beginning, with the random numbers of worker `index`."""
        return type(self)(*(_for_shard(transform, index) for transform in self.transforms))

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        first, second = self.transforms
        # The longest name yet: one LogicalOr may be inside another.
        number = max(map(len, batch), default=0) * "_" + "row"
        numbered: Batch = {**batch, number: torch.arange(num_rows(batch))}
        chosen = first(numbered)
        rejected = torch.ones(num_rows(batch), dtype=torch.bool)
        rejected[numbers_of(chosen, number)] = False
        joined = concat_rows([chosen, second(select_rows(numbered, rejected))])
        rows = numbers_of(joined, number)
        if bool((torch.bincount(rows) > 1).any()):
            raise InvalidArgumentError(
                "LogicalOr: expected transforms that keep or drop rows, got one that repeats them"
            )
        del joined[number]
        return select_rows(joined, rows.argsort())


def _for_shard(transform: Transform, index: int) -> Transform:
    if isinstance(transform, Compose | Seeded):
        return transform.for_shard(index)
    return copy.deepcopy(transform)


class Transformed:
    """A source with a transform applied to its batches. Batches that lose all their rows are skipped.

    Example:
        >>> from monolith.data.transforms import FilterByLabel
        >>> source = [{"label": torch.tensor([0.0])}, {"label": torch.tensor([1.0, 0.0])}]
        >>> [batch["label"].tolist() for batch in Transformed(source, FilterByLabel(thresholds=(1.0,)))]
        [[1.0]]
    """

    def __init__(self, source: Iterable[Batch], *transforms: Transform) -> None:
        self._source = source
        self._transform = Compose(transforms)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._source:
            batch = self._transform(batch)
            if num_rows(batch):
                yield batch

    @property
    def waits(self) -> bool:
        """Whether the source may wait for records that do not exist yet."""
        return getattr(self._source, "waits", False)

    def interrupt(self) -> None:
        """Let a read of the source that waits for records end at once. Called by another thread."""
        if self.waits:
            self._source.interrupt()  # type: ignore[attr-defined]

    def fix_start(self) -> bool:
        """Decide now where the source begins, see `Source.fix_start`. Returns whether the position has changed by that."""
        return self.waits and bool(self._source.fix_start())  # type: ignore[attr-defined]

    def lag(self) -> StreamLag | None:
        """Return how far the source is behind its stream. None if it does not know."""
        return self._source.lag() if isinstance(self._source, HasLag) else None

    def join_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one position from those of all shards of a source that waits. Random numbers go on as those of the first."""
        joined = self._source.join_state_dicts([state["source"] for state in states])  # type: ignore[attr-defined]
        return {"source": joined, "transforms": states[0]["transforms"]}

    def replay(self, until: Mapping[str, Any]) -> Iterator[Batch]:
        """Yield the transformed records of a source that waits between its position and `until`, and move there.

        A transform that draws random numbers may draw others than for the batches that these records were in.
        """
        for batch in self._source.replay(until["source"]):  # type: ignore[attr-defined]
            batch = self._transform(batch)
            if num_rows(batch):
                yield batch
        self._transform.load_state_dict(until["transforms"])

    def shard(self, index: int, count: int) -> Transformed:
        """Return the part of worker `index` of `count`, with its own random numbers."""
        if not hasattr(self._source, "shard"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} cannot be sharded")
        return Transformed(self._source.shard(index, count), *self._transform.for_shard(index).transforms)

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state and the transforms'."""
        return {"source": self._stateful().state_dict(), "transforms": self._transform.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state` was taken."""
        source = self._stateful()
        self._transform.load_state_dict(state["transforms"])
        source.load_state_dict(state["source"])

    def _stateful(self) -> _Stateful:
        if not isinstance(self._source, _Stateful):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        return self._source


class Shuffle:
    """Mixes rows across batches: fills a buffer with `buffer_rows` rows, shuffles it, hands out the older half, and repeats.

    Every row comes out once. Batches have `batch_size` rows, the last one fewer. The state holds the rows in the buffer, so a
    resumed run is the same run. It is as large as the buffer. Rows of a stream wait in it until so many others have come.

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
        """Rows in their final order. Replaced, never changed."""
        self._given = 0
        """How many of the ready rows have been handed out."""
        self._ended = False
        """Whether the source is used up while rows are left: a new loop over it would start it again."""

    def __iter__(self) -> Iterator[Batch]:
        """Continue after the last batch handed out."""
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
            # Set before the last batch is handed out, because the caller may not ask for another.
            self._ended = left > self._batch_size
            yield self._take(min(left, self._batch_size))
        self._ended = False

    def _shuffle(self, keep: int) -> None:
        """Make the held rows ready in random order, except for `keep` of them. Rows that were ready stay in front."""
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

    @property
    def waits(self) -> bool:
        """Whether the source may wait for records that do not exist yet."""
        return getattr(self._source, "waits", False)

    def interrupt(self) -> None:
        """Let a read of the source that waits for records end at once. Called by another thread."""
        if self.waits:
            self._source.interrupt()  # type: ignore[attr-defined]

    def fix_start(self) -> bool:
        """Decide now where the source begins, see `Source.fix_start`. Returns whether the position has changed by that."""
        return self.waits and bool(self._source.fix_start())  # type: ignore[attr-defined]

    def lag(self) -> StreamLag | None:
        """Return how far the source is behind its stream. None if it does not know."""
        return self._source.lag() if isinstance(self._source, HasLag) else None

    def shard(self, index: int, count: int) -> Shuffle:
        """Return the part of worker `index` of `count`, with its own random numbers."""
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
        """Return the source's state, the generator's, and the rows of the buffer."""
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
        """Continue from where `state` was taken."""
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
