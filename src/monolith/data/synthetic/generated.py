"""Sources whose batch number k is a pure function of (config, k): resumable by one number, shardable without overlap."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from monolith.config import Config
from monolith.data.sources.source import Position, Source
from monolith.errors import InvalidArgumentError
from monolith.features import Batch

__all__ = ["GeneratedSource", "mix48"]

_MASK48 = np.uint64((1 << 48) - 1)


class GeneratedSource(Source):
    """Iterates `batch(0)`, `batch(1)`, ...; a shard takes every count-th of them.

    The state is the number of the next batch, so saving and resuming cost nothing. A state is refused by a source of
    another config.
    """

    def __init__(self, config: Config, batches: int | None) -> None:
        self._described = config.model_dump_json()
        self._batches = batches
        super().__init__()

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """Batch `number`, the same whenever and wherever it is asked for."""

    def _start(self) -> Position:
        return {"next": 0, "config": self._described}

    def _read(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        for turn in itertools.count(int(position["next"])):
            number = self._number(turn)
            if self._batches is not None and number >= self._batches:
                return
            yield self.batch(number), {**position, "next": turn + 1}

    def _number(self, turn: int) -> int:
        """The number, among all batches, of this shard's batch `turn`."""
        return turn * self._shard_count + self._shard_index

    def _check(self, position: Position) -> None:
        super()._check(position)
        if position["config"] != self._described:
            raise InvalidArgumentError(
                f"state['config']: expected {self._described}, got {position['config']}; "
                "a position only has a meaning in data of the same config"
            )


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
