"""Sources whose batch number k is a pure function of (config, k): resumable by one number, shardable without overlap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from monolith.config import Config
from monolith.errors import InvalidArgumentError
from monolith.features import Batch

__all__ = ["GeneratedSource", "mix48"]

_MASK48 = np.uint64((1 << 48) - 1)


class GeneratedSource(ABC):
    """Iterates `batch(0)`, `batch(1)`, ...; a shard takes every count-th of them.

    The state is the number of the next batch, so saving and resuming cost nothing. Iterating goes on where the last loop
    stopped; after the last batch the next loop starts again at the first.
    """

    def __init__(self, config: Config, batches: int | None) -> None:
        self._config = config
        self._batches = batches
        self._shard = (0, 1)
        self._next = 0

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """Batch `number`, the same whenever and wherever it is asked for."""

    @abstractmethod
    def _copy(self) -> Self:
        """The same source at its first batch, sharing what is expensive to build."""

    def __iter__(self) -> Iterator[Batch]:
        index, count = self._shard
        if self._finished(self._next * count + index):
            self._next = 0
        while not self._finished(number := self._next * count + index):
            batch = self.batch(number)
            self._next += 1
            yield batch

    def _finished(self, number: int) -> bool:
        return self._batches is not None and number >= self._batches

    def shard(self, index: int, count: int) -> Self:
        """The part of worker `index` of `count`: batches index, index + count, index + 2 count, ..."""
        if not 0 <= index < count:
            raise InvalidArgumentError(f"index: expected 0 <= index < count, got index {index} of {count}")
        if self._shard != (0, 1):
            raise InvalidArgumentError(f"shard: this is already shard {self._shard}; shard the whole source instead")
        part = self._copy()
        part._shard = (index, count)
        return part

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from: plain values, fit for JSON."""
        index, count = self._shard
        return {"next": self._next, "index": index, "count": count, "config": self._config.model_dump_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch that was last when `state` was taken from a source of the same config and shard."""
        own = self.state_dict()
        for key in ("config", "index", "count"):
            if state.get(key) != own[key]:
                raise InvalidArgumentError(
                    f"state[{key!r}]: expected {own[key]!r}, got {state.get(key)!r}; "
                    "load the state into a source of the same config and shard"
                )
        if not isinstance(state.get("next"), int) or state["next"] < 0:
            raise InvalidArgumentError(f"state['next']: expected a batch number >= 0, got {state.get('next')!r}")
        self._next = state["next"]


def mix48(values: np.ndarray, *, slot: int | np.ndarray) -> np.ndarray:
    """Distinct numbers below 2**48 to distinct fids v2 of `slot` that look random: int64, shape of `values`.

    Example:
        >>> [hex(id) for id in mix48(np.arange(3), slot=2).tolist()]
        ['0x2000000000000', '0x2a14737c2db63', '0x2b35b217d5c60']
    """
    # Shifting right and xoring, and multiplying by an odd number modulo 2**48, both have an inverse: no two ids meet.
    mixed = values.astype(np.uint64)
    for factor in (0x9E3779B97F4B, 0xD6E8FEB86659):
        mixed ^= mixed >> np.uint64(23)
        mixed *= np.uint64(factor)
        mixed &= _MASK48
    mixed ^= mixed >> np.uint64(25)
    mixed |= np.asarray(slot, dtype=np.uint64) << np.uint64(48)
    return mixed.view(np.int64)
