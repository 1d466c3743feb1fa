"""A stream of impressions and clicks with known probabilities, with clicks at once or delayed."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config, NonNegative, Positive
from monolith.data.sources.source import Source, SourcePosition
from monolith.data.transforms.rows import concat_rows, select_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged

__all__ = ["ClickStream", "ClickStreamConfig", "GeneratedSource", "LateClicks", "mix48"]

_MASK48 = np.uint64((1 << 48) - 1)


class GeneratedSource(Source):
    """Iterates over `batch(0)`, `batch(1)` and so on. A shard takes every count-th of them.

    The state is the number of the next batch, so saving and resuming cost nothing. A state is refused by a source of
    another config.
    """

    def __init__(self, config: Config, batches: int | None) -> None:
        self._described = config.model_dump_json()
        self._batches = batches
        super().__init__()

    @abstractmethod
    def batch(self, number: int) -> Batch:
        """Return batch `number`, the same on every call and every machine."""

    def _start(self) -> SourcePosition:
        return {"next": 0, "config": self._described}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        for turn in itertools.count(int(position["next"])):
            number = self._number(turn)
            if self._batches is not None and number >= self._batches:
                return
            yield self.batch(number), {**position, "next": turn + 1}

    def _number(self, index: int) -> int:
        """Return the number, among all batches, of this shard's batch `index`."""
        return index * self._shard_count + self._shard_index

    def _check(self, position: SourcePosition) -> None:
        super()._check(position)
        if position["config"] != self._described:
            raise InvalidArgumentError(
                f"state['config']: expected {self._described}, got {position['config']}; "
                "a position only has a meaning in data of the same config"
            )


def mix48(values: np.ndarray, *, slot: int | np.ndarray) -> np.ndarray:
    """Map distinct numbers below 2**48 to distinct fids v2 of `slot` that look random: int64, shape of `values`.

    Example:
        >>> [hex(id) for id in mix48(np.arange(3), slot=2).tolist()]
        ['0x2000000000000', '0x2a14737c2db63', '0x2b35b217d5c60']
    """
    # Shifting right and xoring, and multiplying by an odd number modulo 2**48, both have an inverse, so ids stay distinct.
    mixed = values.astype(np.uint64)
    for factor in (0x9E3779B97F4B, 0xD6E8FEB86659):
        mixed ^= mixed >> np.uint64(23)
        mixed *= np.uint64(factor)
        mixed &= _MASK48
    mixed ^= mixed >> np.uint64(25)
    mixed |= np.asarray(slot, dtype=np.uint64) << np.uint64(48)
    return mixed.view(np.int64)


USER_SLOT, ITEM_SLOT, CATEGORY_SLOT, TAG_SLOT = 1, 2, 3, 4
"""Slots of the v2 feature ids in the columns `user_id`, `item_id`, `category_id` and `tag_ids`."""

_TAGS = 1000
_MAX_TAGS = 4

_Count = Annotated[int, Field(ge=1)]


class ClickStreamConfig(Config):
    """Sizes and signal of the stream. The defaults give about 10 clicks in 100 impressions and a best AUC of 0.86."""

    seed: int = Field(default=0, ge=0)
    """Two streams of equal config are equal, batch by batch."""
    batch_size: _Count = 2048
    """Impressions per batch."""
    batches: Annotated[int, Field(ge=0)] | None = None
    """Batches before the stream ends. None: it does not end."""
    start_time: int = Field(default=1_700_000_000, ge=0)
    """Event time of the first impression, Unix seconds."""
    impressions_per_second: Positive = 200.0
    """How fast event time passes."""
    users: _Count = 100_000
    """Number of users. The user of activity rank r comes with probability ~ r ** -activity_exponent."""
    activity_exponent: NonNegative = 0.5
    """0: all users equally active."""
    items: _Count = 20_000
    """Items at the start. The item of popularity rank r comes with probability ~ r ** -popularity_exponent."""
    popularity_exponent: NonNegative = 1.0
    """The Zipf exponent of item popularity."""
    new_items_per_hour: NonNegative = 5_000.0
    """Items that appear while time passes. Each has the popularity of one of the first items."""
    fresh_share: float = Field(default=0.1, ge=0, le=1)
    """Share of impressions given to items of the last hour, as recommenders do to learn about them."""
    categories: _Count = 50
    """Clusters of items. An item's taste vector is half its cluster's, half its own."""
    dim: _Count = 8
    """Length of the taste vectors."""
    taste: NonNegative = 1.5
    """Standard deviation, in logits, of the match between user and item: what only an interaction model can learn."""
    quality: NonNegative = 0.6
    """Standard deviation, in logits, of the items' own appeal and of the users' own inclination to click."""
    bias: float = -3.2
    """Logit of an average impression."""
    drift_hours: Positive = 48.0
    """Tastes rotate once in this time: they are uncorrelated after a quarter of it, opposite after a half."""
    click_delay: Positive = 60.0
    """Mean seconds from impression to click, exponentially distributed."""
    click_window: Positive = 600.0
    """Seconds an impression waits for its click: a later click is lost, its label is 0."""


@dataclass(frozen=True)
class _Users:
    tastes: np.ndarray
    """float32 [users, 2, dim]: the taste at drift angle 0 and at a right angle to it."""
    inclination: np.ndarray
    cumulative: np.ndarray


class _Catalogue:
    """Items, each a function of the seed and its number alone. Nothing is kept per item, so it costs nothing to have many.

    The items come in generations of as many as there are at the start. In each, every popularity rank belongs to one item:
    in the first in order, in later ones to item `(rank - shift) / step` modulo the size, with a step and shift of their own.
    """

    def __init__(self, config: ClickStreamConfig, category_tastes: np.ndarray) -> None:
        self._config, self._category_tastes = config, category_tastes
        popularity = np.arange(1, config.items + 1) ** -config.popularity_exponent
        self._cumulative = np.cumsum(popularity / popularity.sum())[:-1]
        steps = np.random.default_rng((config.seed, 4)).integers(1, max(config.items, 2), 4096)
        steps = steps[np.gcd(steps, config.items) == 1] if config.items > 1 else steps[:1] * 0 + 1
        self._inverse_steps = np.array([pow(step, -1, config.items) for step in steps.tolist()[:256]] or [1])

    def draw(self, rng: np.random.Generator, size: int, known: int) -> np.ndarray:
        """Draw `size` of the first `known` items by popularity: int64 [size]. The cost does not depend on `known`."""
        items = self._draw(rng, size, known)
        # At least half of the items of all generations are known, so few rounds draw again what is not there yet.
        while len(missing := np.flatnonzero(items >= known)):
            items[missing] = self._draw(rng, len(missing), known)
        return items

    def _draw(self, rng: np.random.Generator, size: int, known: int) -> np.ndarray:
        count = self._config.items
        ranks = np.searchsorted(self._cumulative, rng.random(size), side="right")
        generations = rng.integers(-(-known // count), size=size)
        if known <= count:
            return ranks
        hashes = self._hash(generations, 0)
        steps = self._inverse_steps[hashes % np.uint64(len(self._inverse_steps))]
        shifts = ((hashes >> np.uint64(32)) % np.uint64(count)).view(np.int64)
        return generations * count + np.where(generations == 0, ranks, (ranks - shifts) % count * steps % count)

    def category(self, items: np.ndarray) -> np.ndarray:
        return (self._hash(items, 1) % np.uint64(self._config.categories)).view(np.int64)

    def quality(self, items: np.ndarray) -> np.ndarray:
        return _normal(self._hash(items, 2)) * np.float32(self._config.quality)

    def tastes(self, items: np.ndarray) -> np.ndarray:
        own = _normal(self._hash(items[:, None], np.arange(16, 16 + self._config.dim)))
        return np.asarray((self._category_tastes[self.category(items)] + own) * np.float32(0.5**0.5))

    def tags(self, items: np.ndarray) -> Ragged:
        """Return the tags of each item. They come from the 20 of its category, so that tags say something about taste."""
        hashes = self._hash(items, 3)
        counts = (hashes >> np.uint64(60)).view(np.int64) % _MAX_TAGS + 1
        choices = (hashes[:, None] >> (np.arange(_MAX_TAGS, dtype=np.uint64) * np.uint64(15))) % np.uint64(1 << 15)
        tags = (self.category(items)[:, None] * 20 + choices.view(np.int64) % 20) % _TAGS
        splits = np.zeros(len(items) + 1, dtype=np.int64)
        np.cumsum(counts, out=splits[1:])
        values = tags[np.arange(_MAX_TAGS) < counts[:, None]]
        return Ragged(torch.from_numpy(mix48(values, slot=TAG_SLOT)), splits)

    def _hash(self, numbers: np.ndarray, purpose: int | np.ndarray) -> np.ndarray:
        """Return random bits, uint64, that depend on the seed, the number and the purpose."""
        # Arrays, because products of scalars that overflow are reported, those of arrays are not.
        key = np.atleast_1d(np.asarray(purpose, dtype=np.uint64)) + np.uint64(self._config.seed % 2**32 << 32)
        bits = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key * np.uint64(0xD1342543DE82EF95)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)
        return bits


def _normal(bits: np.ndarray) -> np.ndarray:
    """Map random bits, uint64, to numbers of mean 0 and variance 1: the sum of four uniform ones, float32."""
    low = (bits & np.uint64(0x0000FFFF0000FFFF)) + ((bits >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    total = (low >> np.uint64(32)) + (low & np.uint64(0xFFFFFFFF))
    return np.asarray((total.astype(np.float32) - np.float32(4 * 32767.5)) * np.float32(3**0.5 / 65536))


class ClickStream(GeneratedSource):
    """Impressions of items to users in the order of time, as batches of `batch_size` rows.

    Columns:

    - `user_id`, `item_id`, `category_id`: int64 [n], v2 feature ids
    - `tag_ids`: `Ragged` int64, 1 to 4 per row
    - `event_time`: int64 [n], Unix seconds
    - `click_time`: int64 [n], -1 if there is no click in the window
    - `label`: float32 [n], 1 if there is a click in the window
    - `click_probability`: float32 [n], the true probability of label 1, for evaluation only. No model can rank better than
      this column, see `best_auc`.

    The click logit of user u and item i at time t is
    `bias + inclination[u] + quality[i] + taste * <cos(a) p[u] + sin(a) q[u], v[i]>` with a = 2 pi t / drift_hours and random
    vectors p, q, v. New items appear as time passes.

    Example:
        >>> stream = ClickStream(ClickStreamConfig(batch_size=4, users=10, items=10))
        >>> batch = next(iter(stream))
        >>> sorted(batch)
        ['category_id', 'click_probability', 'click_time', 'event_time', 'item_id', 'label', 'tag_ids', 'user_id']
        >>> batch["event_time"].tolist()
        [1700000000, 1700000000, 1700000000, 1700000000]
        >>> stream.state_dict()["next"]
        1
    """

    def __init__(self, config: ClickStreamConfig | None = None) -> None:
        self.config = config or ClickStreamConfig()
        super().__init__(self.config, self.config.batches)

    def batch(self, number: int) -> Batch:
        """Return batch `number`, the same on every call and every machine."""
        config, rng = self.config, self._rng(0, number)
        size = config.batch_size
        elapsed = (number * size + np.arange(size)) / config.impressions_per_second
        users = self.draw_users(rng, size)
        items = self.draw_items(rng, size, config.start_time + float(elapsed[0]))
        probability = self.click_probability(users, items, config.start_time + float(elapsed[0]))
        clicked_if_seen = rng.random(size) < probability
        delay = rng.exponential(config.click_delay, size)
        clicked = clicked_if_seen & (delay <= config.click_window)
        event_time = config.start_time + elapsed.astype(np.int64)
        seen_in_time = -math.expm1(-config.click_window / config.click_delay)
        return {
            **self.user_columns(users),
            **self.item_columns(items),
            "event_time": torch.from_numpy(event_time),
            "click_time": torch.from_numpy(np.where(clicked, event_time + delay.astype(np.int64), -1)),
            "label": torch.from_numpy(clicked.astype(np.float32)),
            "click_probability": torch.from_numpy((probability * seen_in_time).astype(np.float32)),
        }

    def items_at(self, event_time: float) -> int:
        """Return how many items have appeared by `event_time`, Unix seconds.

        Example:
            >>> stream = ClickStream(ClickStreamConfig(items=10, new_items_per_hour=60))
            >>> stream.items_at(stream.config.start_time + 120)
            12
        """
        hours = max(event_time - self.config.start_time, 0) / 3600
        return self.config.items + int(hours * self.config.new_items_per_hour)

    def user_columns(self, users: np.ndarray) -> Batch:
        """Return the column `user_id` of the users with these numbers, in order of activity."""
        return {"user_id": torch.from_numpy(mix48(users, slot=USER_SLOT))}

    def item_columns(self, items: np.ndarray) -> Batch:
        """Return the columns `item_id`, `category_id` and `tag_ids` of the items with these numbers, in order of appearance.

        Example:
            >>> columns = ClickStream().item_columns(np.array([0, 7]))
            >>> columns["item_id"].shape, len(columns["tag_ids"])
            (torch.Size([2]), 2)
        """
        return {
            "item_id": torch.from_numpy(mix48(items, slot=ITEM_SLOT)),
            "category_id": torch.from_numpy(mix48(self._catalogue.category(items), slot=CATEGORY_SLOT)),
            "tag_ids": self._catalogue.tags(items),
        }

    def draw_users(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draw the numbers of `size` users by their activity: int64 [size]."""
        return np.searchsorted(self._users.cumulative, rng.random(size), side="right")

    def draw_items(self, rng: np.random.Generator, size: int, event_time: float) -> np.ndarray:
        """Draw the numbers of `size` items that there are at `event_time`, by popularity, some from the last hour."""
        known, fresh_from = self.items_at(event_time), self.items_at(event_time - 3600)
        drawn = self._catalogue.draw(rng, size, known)
        fresh = rng.random(size) < self.config.fresh_share
        if known > fresh_from:
            drawn[fresh] = rng.integers(fresh_from, known, int(fresh.sum()))
        return drawn

    def click_probability(self, users: np.ndarray, items: np.ndarray, event_time: float) -> np.ndarray:
        """Return how likely each user clicks the item beside it at `event_time`, however late: float [n].

        Example:
            >>> stream = ClickStream()
            >>> stream.click_probability(np.array([0]), np.array([1]), stream.config.start_time).shape
            (1,)
        """
        config, catalogue = self.config, self._catalogue
        angle = 2 * math.pi * (event_time - config.start_time) / (3600 * config.drift_hours)
        both = self._users.tastes[users]
        taste = np.float32(math.cos(angle)) * both[:, 0] + np.float32(math.sin(angle)) * both[:, 1]
        match = np.einsum("nd,nd->n", taste, catalogue.tastes(items))
        logit = config.bias + self._users.inclination[users] + catalogue.quality(items) + config.taste * match
        return np.asarray(1 / (1 + np.exp(-logit)))

    def _rng(self, purpose: int, number: int) -> np.random.Generator:
        return np.random.default_rng((self.config.seed, purpose, number))

    @cached_property
    def _users(self) -> _Users:
        config, rng = self.config, self._rng(1, 0)
        popularity = np.arange(1, config.users + 1) ** -config.activity_exponent
        return _Users(
            tastes=rng.standard_normal((config.users, 2, config.dim), dtype=np.float32) / np.float32(config.dim) ** 0.5,
            inclination=rng.standard_normal(config.users, dtype=np.float32) * np.float32(config.quality),
            cumulative=np.cumsum(popularity / popularity.sum())[:-1],
        )

    @cached_property
    def _catalogue(self) -> _Catalogue:
        shape = (self.config.categories, self.config.dim)
        return _Catalogue(self.config, self._rng(3, 0).standard_normal(shape, dtype=np.float32))


class LateClicks(GeneratedSource):
    """A `ClickStream` that does not wait: every impression comes with label 0, its click later as a row with label 1.

    A batch has the stream's impressions followed by the clicks that arrived since the previous batch, oldest first, so its
    number of rows varies. Rows of clicks have the click's time in `event_time`. This is the original's "fast emit": each
    positive has been seen as a negative before, which the logit correction of the loss takes into account. Clicks that
    arrive after a stream's last batch are never seen. A click goes to the shard that had the impression.

    Example:
        >>> from monolith.data.synthetic import ClickStreamConfig
        >>> config = ClickStreamConfig(batch_size=1000, impressions_per_second=10, batches=3)
        >>> [(len(batch["label"]), int(batch["label"].sum())) for batch in LateClicks(ClickStream(config))]
        [(1048, 48), (1083, 83), (1104, 104)]
    """

    def __init__(self, stream: ClickStream) -> None:
        self._stream = stream
        super().__init__(stream.config, stream.config.batches)

    def batch(self, number: int) -> Batch:
        """Return the impressions of batch `number` with the clicks they will have."""
        return self._stream.batch(number)

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        waiting: Batch | None = None
        turn = int(position["next"])
        # Clicks in flight are not part of the position: one click window is generated again.
        for past in range(max(turn - self._window(), 0), turn):
            _, waiting = self._deliver(self.batch(self._number(past)), waiting)
        for batch, behind in super()._read(position):
            clicks, waiting = self._deliver(batch, waiting)
            impressions = {**batch, "label": torch.zeros_like(_tensor(batch, "label"))}
            yield concat_rows([impressions, {**clicks, "event_time": clicks["click_time"]}]), behind

    def _window(self) -> int:
        """Return by how many of this shard's batches a click may be delayed."""
        config = self._stream.config
        impressions = config.click_window * config.impressions_per_second
        return math.ceil(impressions / (config.batch_size * self._shard_count)) + 1

    def _deliver(self, batch: Batch, waiting: Batch | None) -> tuple[Batch, Batch]:
        """Return the clicks that arrive before the stream's next impression, and those that do not."""
        clicked = select_rows(batch, _tensor(batch, "label") > 0)
        clicks = clicked if waiting is None else concat_rows([waiting, clicked])
        time = _tensor(clicks, "click_time")
        clicks = select_rows(clicks, torch.argsort(time, stable=True))
        arrived = _tensor(clicks, "click_time") <= _tensor(batch, "event_time")[-1]
        return select_rows(clicks, arrived), select_rows(clicks, ~arrived)


def _tensor(batch: Batch, name: str) -> torch.Tensor:
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column
