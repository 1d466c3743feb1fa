"""The interface of all sources: batches in order, a position that can be saved, and shares for workers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Self

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch

__all__ = ["Position", "Source"]

Position = dict[str, int | str]
"""Where reading goes on; what is in it is the source's business. Plain values, so that it goes into JSON."""


class Source(ABC):
    """An ordered stream of batches that knows where it is.

    Iterating goes on where the last iteration stopped; at the end the source starts anew, so that one `for` loop is one
    epoch. `state_dict` is the position behind the last batch handed out: a source that loads it, in this process or
    another, continues with exactly the next batch. A source is read by one thread at a time.

    Subclasses implement `_start` and `_read`.
    """

    def __init__(self) -> None:
        self._shard_index, self._shard_count = 0, 1
        self._position = self._start()

    @abstractmethod
    def _start(self) -> Position:
        """The position before the first batch. Every position has the same keys, with values of the same types."""

    @abstractmethod
    def _read(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        """The batches from `position` on, each with the position behind it."""

    def __iter__(self) -> Iterator[Batch]:
        for batch, behind in self._read(self._position):
            self._position = behind
            yield batch
        self._position = self._start()

    def state_dict(self) -> dict[str, int | str]:
        """The position behind the last batch handed out, fit for JSON."""
        return {**self._position, "shard_index": self._shard_index, "shard_count": self._shard_count}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue behind the batch after which `state` was taken; the source must be made and sharded as it was then."""
        expected = self.state_dict()
        wrong = [key for key in {**expected, **state} if type(state.get(key)) is not type(expected.get(key))]
        if wrong:
            raise InvalidArgumentError(
                f"state[{wrong[0]!r}]: expected the keys {', '.join(sorted(expected))} with integers and texts as "
                f"{type(self).__name__}.state_dict() gives them, got {state.get(wrong[0])!r}"
            )
        for key in ("shard_index", "shard_count"):
            if state[key] != expected[key]:
                raise InvalidArgumentError(
                    f"state[{key!r}] is {state[key]}, but this source is shard {self._shard_index} of "
                    f"{self._shard_count}; a position only has a meaning in the shard it was taken in"
                )
        position = {key: state[key] for key in self._position}
        self._check(position)
        self._position = position

    def _check(self, position: Position) -> None:
        """Raise InvalidArgumentError if `position` cannot be one of this source."""
        for key, value in position.items():
            if isinstance(value, int) and value < 0:
                raise InvalidArgumentError(f"state[{key!r}]: expected 0 or more, got {value}")

    def shard(self, index: int, count: int) -> Self:
        """A new source, at its beginning, with every `count`-th part of this one; together the shards have every row once."""
        if not 0 <= index < count:
            raise InvalidArgumentError(f"shard: expected 0 <= index < count, got index {index} and count {count}")
        part = copy.copy(self)
        part._shard_index = self._shard_index + index * self._shard_count
        part._shard_count = self._shard_count * count
        part._position = part._start()
        return part
