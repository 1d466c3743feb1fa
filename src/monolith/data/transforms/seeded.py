"""Randomness that can be saved, restored and kept apart between workers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from monolith.errors import InvalidArgumentError

__all__ = ["Seeded"]


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
