"""Transforms in order, as alternatives, applied to a source, and with random numbers that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from monolith.data.transforms.rows import concat_rows, numbers_of, select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, num_rows

__all__ = ["Compose", "LogicalOr", "Seeded", "Transformed"]


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
        """The same transform at its beginning, with the random numbers of worker `index`."""
        other = copy.copy(self)
        other._rng = np.random.default_rng((self._seed, index))
        return other

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator: plain values."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from where `state` was taken."""
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
    """Transforms in order; a row stays if it survives them all.

    Example:
        >>> from monolith.data.transforms import FilterByLabel
        >>> both = Compose([FilterByLabel(thresholds=(1.0,)), FilterByLabel(thresholds=(3.0,))])
        >>> both({"label": torch.tensor([0.0, 2.0, 4.0])})["label"].tolist()
        [4.0]
    """

    def __init__(self, transforms: Iterable[Transform]) -> None:
        self.transforms = tuple(transforms)

    def __call__(self, batch: Batch) -> Batch:
        """The batch transformed; the one given is not changed."""
        for transform in self.transforms:
            batch = transform(batch)
        return batch

    def for_shard(self, index: int) -> Self:
        """The same transforms at their beginning, with the random numbers of worker `index`."""
        return type(self)(_for_shard(transform, index) for transform in self.transforms)

    def state_dict(self) -> dict[str, Any]:
        """The states of those transforms that have one, by position."""
        return {key: part.state_dict() for key, part in self._stateful_parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring every transform to where `state` was taken."""
        parts = self._stateful_parts()
        if parts.keys() != state.keys():
            raise InvalidArgumentError(f"state: expected transforms {sorted(parts)}, got {sorted(state)}")
        for key, part in parts.items():
            part.load_state_dict(state[key])

    def _stateful_parts(self) -> dict[str, _Stateful]:
        parts: dict[str, object] = {str(place): transform for place, transform in enumerate(self.transforms)}
        return {place: part for place, part in parts.items() if isinstance(part, _Stateful)}


class LogicalOr(Compose):
    """A row stays if it survives one of two transforms: as the first leaves it, or else as the second does.

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
        """The same transforms at their beginning, with the random numbers of worker `index`."""
        return type(self)(*(_for_shard(transform, index) for transform in self.transforms))

    def __call__(self, batch: Batch) -> Batch:
        """The batch transformed; the one given is not changed."""
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
    """A source with a transform behind it; batches that lose all their rows are skipped.

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

    def shard(self, index: int, count: int) -> Transformed:
        """The part of worker `index` of `count`, with its own random numbers."""
        if not hasattr(self._source, "shard"):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} cannot be sharded")
        return Transformed(self._source.shard(index, count), *self._transform.for_shard(index).transforms)

    def state_dict(self) -> dict[str, Any]:
        """The source's state and the transforms'."""
        return {"source": self._stateful().state_dict(), "transforms": self._transform.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        source = self._stateful()
        self._transform.load_state_dict(state["transforms"])
        source.load_state_dict(state["source"])

    def _stateful(self) -> _Stateful:
        if not isinstance(self._source, _Stateful):
            raise InvalidArgumentError(f"source: a {type(self._source).__name__} has no state_dict and load_state_dict")
        return self._source
