"""Recently seen items to draw negatives from: bounded, first in first out, counting how often each was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from monolith.data.transforms.rows import column_state, concat_rows, load_column, select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, num_rows

__all__ = ["ItemPool"]


@dataclass
class _Channel:
    items: Batch
    """Columns of the items, oldest first. Replaced, never changed, so that a saved state may refer to it."""
    places: dict[int, int] = field(default_factory=dict)
    """Item id to its number; numbers count all items that ever entered."""
    first: int = 0
    """Number of the oldest item kept."""
    seen: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int64 [items]: how often each item was added."""
    drawn: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int64 [items]: how often each item was drawn."""


class ItemPool:
    """Items by channel, at most `max_item_num` distinct ones each; the oldest leaves first.

    An item that is there already keeps its place and its features. Adding costs a copy of the channel's items.

    Example:
        >>> pool = ItemPool(start_num=1, max_item_num=2)
        >>> pool.add(3, torch.tensor([10, 11, 12]), {"tag": torch.tensor([0, 1, 2])})
        >>> pool.size(3)
        2
        >>> items, time, frequency = pool.draw(3, np.array([0.0, 0.9, 0.9]))
        >>> items["tag"].tolist(), time.tolist(), frequency.tolist()
        ([1, 2, 2], [0.5, 1.0, 1.0], [1.0, 1.0, 0.5])
    """

    def __init__(self, *, start_num: int = 500, max_item_num: int = 100_000) -> None:
        if start_num < 0 or max_item_num < 1:
            raise InvalidArgumentError(
                f"expected start_num >= 0 and max_item_num >= 1, got {start_num} and {max_item_num}"
            )
        self.start_num, self.max_item_num = start_num, max_item_num
        self._channels: dict[int, _Channel] = {}

    def add(self, channel: int, ids: torch.Tensor, items: Batch) -> None:
        """Add items with ids int64 [n] and their columns of n rows; the first of equal ids counts."""
        here = self._channels.setdefault(channel, _Channel(select_rows(items, torch.empty(0, dtype=torch.int64))))
        new: list[int] = []
        numbers: list[int] = []
        for row, item in enumerate(ids.tolist()):
            number = here.places.get(item)
            if number is None:
                number = here.places[item] = here.first + len(here.seen) + len(new)
                new.append(row)
            numbers.append(number)
        here.items = concat_rows([here.items, select_rows(items, torch.tensor(new, dtype=torch.int64))])
        here.seen = np.concatenate([here.seen, np.zeros(len(new), dtype=np.int64)])
        here.drawn = np.concatenate([here.drawn, np.zeros(len(new), dtype=np.int64)])
        np.add.at(here.seen, np.array(numbers, dtype=np.int64) - here.first, 1)
        self._evict(here)

    def _evict(self, here: _Channel) -> None:
        surplus = len(here.seen) - self.max_item_num
        if surplus <= 0:
            return
        here.first += surplus
        here.items = select_rows(here.items, torch.arange(surplus, surplus + self.max_item_num))
        here.seen, here.drawn = here.seen[surplus:], here.drawn[surplus:]
        here.places = {item: number for item, number in here.places.items() if number >= here.first}

    def draw(self, channel: int, uniform: np.ndarray) -> tuple[Batch, np.ndarray, np.ndarray]:
        """The items at `uniform` (float [k] in [0, 1)) of the channel's length, which must be `ready`.

        Returns their columns and, float64 [k], the time factor (place + 1) / size, 1 for the newest, and the frequency
        factor 1 / (times drawn, this time included).
        """
        here = self._channels[channel]
        size = len(here.drawn)
        places = (uniform * size).astype(np.int64)
        order = np.argsort(places, kind="stable")
        ranked = places[order]
        # How many equal draws this call has made before each one.
        repeats = np.empty(len(places), dtype=np.int64)
        repeats[order] = np.arange(len(places)) - np.searchsorted(ranked, ranked)
        times = here.drawn[places] + repeats + 1
        np.add.at(here.drawn, places, 1)
        return select_rows(here.items, torch.from_numpy(places)), (places + 1) / size, 1 / times

    def size(self, channel: int) -> int:
        """Items in `channel`."""
        return len(self._channels[channel].seen) if channel in self._channels else 0

    def ready(self, channel: int) -> bool:
        """Whether `channel` has more than `start_num` items."""
        return self.size(channel) > self.start_num

    def channels(self) -> dict[int, int]:
        """The size of each channel, in the order they first came."""
        return {channel: self.size(channel) for channel in self._channels}

    def state_dict(self) -> dict[str, Any]:
        """Everything in the pool, as tensors and plain values."""
        return {
            str(channel): {
                "items": {name: column_state(column) for name, column in here.items.items()},
                "ids": torch.tensor(list(here.places), dtype=torch.int64),
                "seen": torch.tensor(here.seen),
                "drawn": torch.tensor(here.drawn),
            }
            for channel, here in self._channels.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what was there when `state` was taken."""
        channels = {}
        for channel, saved in state.items():
            items = {name: load_column(column) for name, column in saved["items"].items()}
            ids = saved["ids"].tolist()
            if num_rows(items) != len(ids) or not len(ids) == len(saved["seen"]) == len(saved["drawn"]):
                raise InvalidArgumentError(
                    f"state[{channel!r}]: expected one row of all columns for each of {len(ids)} ids"
                )
            channels[int(channel)] = _Channel(
                items,
                {item: number for number, item in enumerate(ids)},
                0,
                saved["seen"].numpy().copy(),
                saved["drawn"].numpy().copy(),
            )
        self._channels = channels
