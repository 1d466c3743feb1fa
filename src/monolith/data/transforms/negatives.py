"""Negatives drawn from a pool of items that other rows showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config, NonNegative
from monolith.data.transforms.compose import Seeded
from monolith.data.transforms.rows import column_state, concat_rows, labels_up_to, load_column, numbers_of, select_rows
from monolith.data.transforms.sampling import leading_action
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = ["ItemPool", "NegativeGen", "NegativeGenConfig"]


@dataclass
class _Channel:
    items: Batch
    """Columns of the items, oldest first. Replaced, never changed, so that a saved state may refer to it."""
    places: dict[int, int] = field(default_factory=dict)
    """Item id to its number. Numbers count all items that ever entered."""
    first: int = 0
    """Number of the oldest item kept."""
    seen: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int64 [items]: how often each item was added."""
    drawn: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """int64 [items]: how often each item was drawn."""


class ItemPool:
    """Items by channel, at most `max_item_num` distinct ones each. The oldest is removed first.

    An item that is already there keeps its position and its features. Adding costs a copy of the channel's items.

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
        """Add items with ids int64 [n] and their columns of n rows. The first of equal ids counts."""
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
        """Draw the items at `uniform` (float [k] in [0, 1)) of the length of the channel, which must be `ready`.

        Returns their columns and, float64 [k], the time factor (index + 1) / size, 1 for the newest, and the frequency factor 1
        / (times drawn, this time included).
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
        """Return the number of items in `channel`."""
        return len(self._channels[channel].seen) if channel in self._channels else 0

    def ready(self, channel: int) -> bool:
        """Return whether `channel` has more than `start_num` items."""
        return self.size(channel) > self.start_num

    def channels(self) -> dict[int, int]:
        """Return the size of each channel, in the order they first came."""
        return {channel: self.size(channel) for channel in self._channels}

    def state_dict(self) -> dict[str, Any]:
        """Return everything in the pool, as tensors and plain values."""
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
        """Replace the contents of the pool by those of `state`."""
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


Probability = Annotated[float, Field(ge=0, le=1)]
_DEFAULT_CHANNEL = 3


class NegativeGenConfig(Config):
    """How negatives are made."""

    neg_num: Annotated[int, Field(ge=1)]
    """Negatives per positive row."""
    item_features: Annotated[tuple[str, ...], Field(min_length=1)]
    """Columns that describe the item. All others describe the user and the moment."""
    item_id: str = "item_id"
    """The column of item ids, int64 [rows]. It need not be one of `item_features`."""
    channel: str | None = None
    """A column of channel ids, int64 [rows]: each channel has its own pool. Channel 0 has none. None: one pool for all."""
    start_num: Annotated[int, Field(ge=0)] = 500
    """A pool is drawn from when it has more items."""
    max_item_num: Annotated[int, Field(ge=1)] = 100_000
    """Items in a pool."""
    positive_label: float = 1.0
    """The label of a positive row."""
    negative_label: float = -1.0
    """The label of a negative that was made."""
    label_index: Annotated[int, Field(ge=0)] = 0
    """Which label, when rows have several."""
    positive_actions: tuple[int, ...] = ()
    """If given, a row is positive by its action of highest priority instead of its label."""
    action_priority: tuple[int, ...] = ()
    """Actions by descending priority. Without one of these a row's first action counts."""
    negative_action: int | None = None
    """If given, the only action of a negative that was made."""
    throw_origin: bool = False
    """Whether to return only the negatives that were made."""
    throw_origin_neg: bool = False
    """Whether to drop the negatives that came in."""
    cache_only_pos: bool = True
    """Whether only items of positive rows enter the pool."""
    cache_negative_actions: tuple[int, ...] = ()
    """If given, it decides instead of `cache_only_pos`: of the negative rows those with one of these actions enter the pool."""
    origin_neg_in_pool_proba: Probability = 1.0
    """Probability of an item of a negative row to enter the pool."""
    real_neg_instance_weight: NonNegative = 1.0
    """Weight of a negative that came in. Up to 1e-5 it counts as 1."""
    sampled_neg_instance_weight: float = -1.0
    """Weight of a negative that was made. Up to 1e-5, `unbias_sampled_neg` decides."""
    unbias_sampled_neg: bool = True
    """Whether that weight is 1 + neg_num * time ** decay * frequency, otherwise 1."""
    neg_sample_decay_factor: NonNegative = 1.0
    """The decay: how much less old items weigh."""
    easy_hard_ratio: Probability = 0.0
    """Probability to draw from another channel, chosen by size, instead of the row's own."""


class NegativeGen(Seeded):
    """Puts up to `neg_num` rows of the same user with items from the pool before each positive row.

    The items of a batch enter the pool before negatives are drawn for it, so a small pool may draw the row's own item. With the
    item's index in its pool, oldest first, time is (index + 1) / size, and frequency is 1 / (times it was drawn). The column
    `instance_weight` is set on every row: 1 for positives. Labels are in `label`, actions in `actions`.

    Example:
        >>> config = NegativeGenConfig(neg_num=1, item_features=("item_id",), start_num=0, unbias_sampled_neg=False)
        >>> batch = {"user": torch.tensor([1, 2]), "item_id": torch.tensor([7, 8]), "label": torch.ones(2)}
        >>> made = NegativeGen(config, seed=2)(batch)
        >>> made["user"].tolist(), made["label"].tolist(), made["item_id"].tolist()
        ([1, 1, 2, 2], [-1.0, 1.0, -1.0, 1.0], [8, 7, 7, 8])
    """

    def __init__(self, config: NegativeGenConfig, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.config = config
        self.pool = ItemPool(start_num=config.start_num, max_item_num=config.max_item_num)

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        config, rows = self.config, num_rows(batch)
        positive, channels = self._positive(batch), self._channels(batch)
        # Drawn for every row and negative, needed or not: what a row gets does not depend on the rows before it.
        enters = torch.from_numpy(self._rng.random(rows)) < config.origin_neg_in_pool_proba
        where, which, easy = self._rng.random((3, rows, config.neg_num))
        cached = self._may_enter_pool(batch, positive) & (positive | enters) & (channels != 0)
        self._cache(select_rows(batch, cached), channels[cached])
        made, keys = self._make(batch, positive.numpy(), channels.numpy(), where, which, easy)
        emitted = torch.full((rows,), not config.throw_origin)
        if config.throw_origin_neg:
            emitted &= positive
        weight = config.real_neg_instance_weight if config.real_neg_instance_weight > 1e-5 else 1.0
        weights = torch.where(positive, 1.0, weight)
        origin = select_rows({**batch, "instance_weight": weights}, emitted)
        own = torch.nonzero(emitted).squeeze(1) * (config.neg_num + 1) + config.neg_num
        order = torch.argsort(torch.cat([torch.from_numpy(keys), own]), stable=True)
        return select_rows(concat_rows([made, origin]), order)

    def _positive(self, batch: Batch) -> torch.Tensor:
        config = self.config
        if config.positive_actions:
            return self._acts(batch, config.positive_actions)
        return self._label(batch)[:, config.label_index] == config.positive_label

    def _acts(self, batch: Batch, listed: tuple[int, ...]) -> torch.Tensor:
        action, known = leading_action(column_of(batch, "actions"), self.config.action_priority)
        return known & torch.isin(action, torch.tensor(listed))

    def _may_enter_pool(self, batch: Batch, positive: torch.Tensor) -> torch.Tensor:
        if self.config.cache_negative_actions:
            return positive | self._acts(batch, self.config.cache_negative_actions)
        return positive if self.config.cache_only_pos else torch.ones_like(positive)

    def _label(self, batch: Batch) -> torch.Tensor:
        return labels_up_to(batch, "label", self.config.label_index)

    def _channels(self, batch: Batch) -> torch.Tensor:
        if self.config.channel is None:
            return torch.full((num_rows(batch),), _DEFAULT_CHANNEL)
        return numbers_of(batch, self.config.channel)

    def _cache(self, batch: Batch, channels: torch.Tensor) -> None:
        names = dict.fromkeys((*self.config.item_features, self.config.item_id))
        items = {name: column_of(batch, name) for name in names}
        for channel in dict.fromkeys(channels.tolist()):
            here = select_rows(items, channels == channel)
            self.pool.add(channel, numbers_of(here, self.config.item_id), here)

    def _make(
        self,
        batch: Batch,
        positive: np.ndarray,
        channels: np.ndarray,
        where: np.ndarray,
        which: np.ndarray,
        easy: np.ndarray,
    ) -> tuple[Batch, np.ndarray]:
        """Return the rows made, and the position of each among all: row * (neg_num + 1) + number of the negative."""
        config = self.config
        source = np.broadcast_to(channels[:, None], where.shape).copy()
        sizes = self.pool.channels()
        if config.channel is not None and len(sizes) > 1:
            bounds = np.cumsum(list(sizes.values()))
            other = np.array(list(sizes))[np.searchsorted(bounds, which * bounds[-1], side="right")]
            source = np.where(easy < config.easy_hard_ratio, other, source)
        parts, keys = [self._negatives(batch, np.empty(0, dtype=np.int64), None)], [np.empty(0, dtype=np.int64)]
        for channel in sizes:
            if self.pool.ready(channel):
                row, number = np.nonzero(positive[:, None] & (source == channel))
                parts.append(self._negatives(batch, row, self.pool.draw(channel, where[row, number])))
                keys.append(row * (config.neg_num + 1) + number)
        return concat_rows(parts), np.concatenate(keys)

    def _negatives(self, batch: Batch, rows: np.ndarray, drawn: tuple[Batch, np.ndarray, np.ndarray] | None) -> Batch:
        config = self.config
        made = select_rows(batch, torch.from_numpy(rows))
        label = self._label(made).clone()
        label[:, config.label_index] = config.negative_label
        before = column_of(batch, "label")
        assert isinstance(before, torch.Tensor)
        made["label"] = label.reshape(len(rows), *before.shape[1:])
        if config.negative_action is not None:
            action = torch.full((len(rows),), config.negative_action, dtype=torch.int64)
            made["actions"] = Ragged(action, torch.arange(len(rows) + 1))
        weights = np.ones(len(rows))
        if drawn is not None:
            items, time, frequency = drawn
            made.update(items)
            if config.sampled_neg_instance_weight > 1e-5:
                weights[:] = config.sampled_neg_instance_weight
            elif config.unbias_sampled_neg:
                weights = 1 + config.neg_num * time**config.neg_sample_decay_factor * frequency
        return {**made, "instance_weight": torch.from_numpy(weights.astype(np.float32))}

    def for_shard(self, index: int) -> Self:
        """Return the same transform with an empty pool and the random numbers of worker `index`."""
        other = super().for_shard(index)
        other.pool = ItemPool(start_num=self.config.start_num, max_item_num=self.config.max_item_num)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and everything in the pool."""
        return {**super().state_dict(), "pool": self.pool.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state` was taken."""
        self.pool.load_state_dict(state["pool"])
        super().load_state_dict(state)
