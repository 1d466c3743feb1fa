"""Danger: made negatives mix up users and items, weigh wrong, or come from a pool that grows without bound or is lost."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

from batch_rows import random_batch, to_rows
from monolith.data.transforms import ItemPool, NegativeGen, NegativeGenConfig
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch
from monolith.state_bytes import pack_state, unpack_state


def batches(count: int = 5, rows: int = 60) -> list[Batch]:
    rng = np.random.default_rng(29)
    return [random_batch(rng, rows) for _ in range(count)]


class SlowPools:
    """The pool as dictionaries, one item at a time."""

    def __init__(self, config: NegativeGenConfig) -> None:
        self.config = config
        self.items: dict[int, OrderedDict[int, dict]] = {}
        self.drawn: dict[int, dict[int, int]] = {}

    def add(self, channel: int, row: dict) -> None:
        names = {*self.config.item_features, self.config.item_id}
        self.items.setdefault(channel, OrderedDict())
        self.drawn.setdefault(channel, {})
        if row["item_id"] not in self.items[channel]:
            self.items[channel][row["item_id"]] = {name: row[name] for name in names}
            self.drawn[channel][row["item_id"]] = 0

    def trim(self) -> None:
        for channel, items in self.items.items():
            while len(items) > self.config.max_item_num:
                oldest, _ = items.popitem(last=False)
                del self.drawn[channel][oldest]

    def draw(self, channel: int, uniform: float) -> tuple[dict, float] | None:
        items = list(self.items.get(channel, {}).items())
        if len(items) <= self.config.start_num:
            return None
        place = int(uniform * len(items))
        item, columns = items[place]
        self.drawn[channel][item] += 1
        time, frequency = (place + 1) / len(items), 1 / self.drawn[channel][item]
        if self.config.sampled_neg_instance_weight > 1e-5:
            return columns, self.config.sampled_neg_instance_weight
        if not self.config.unbias_sampled_neg:
            return columns, 1.0
        return columns, 1 + self.config.neg_num * time**self.config.neg_sample_decay_factor * frequency


def acts(row: dict, config: NegativeGenConfig, actions: tuple[int, ...]) -> bool:
    if not row["actions"]:
        return False
    listed = [action for action in row["actions"] if action in config.action_priority]
    action = min(listed, key=config.action_priority.index) if listed else row["actions"][0]
    return action in actions


def is_positive(row: dict, config: NegativeGenConfig) -> bool:
    if not config.positive_actions:
        return row["label"] == config.positive_label
    return acts(row, config, config.positive_actions)


def enters_pool(row: dict, config: NegativeGenConfig) -> bool:
    if config.cache_negative_actions:
        return acts(row, config, config.cache_negative_actions)
    return not config.cache_only_pos


def oracle(stream: list[Batch], config: NegativeGenConfig, seed: int) -> list[list[dict]]:
    rng, pools, out = np.random.default_rng((seed, 0)), SlowPools(config), []
    for batch in stream:
        rows = to_rows(batch)
        enters = rng.random(len(rows))
        where, which, easy = rng.random((3, len(rows), config.neg_num))
        channels = [row[config.channel] if config.channel else 3 for row in rows]
        for row, channel, draw in zip(rows, channels, enters, strict=True):
            wanted = is_positive(row, config) or (enters_pool(row, config) and draw < config.origin_neg_in_pool_proba)
            if wanted and channel != 0:
                pools.add(channel, row)
        pools.trim()
        result = []
        for i, (row, channel) in enumerate(zip(rows, channels, strict=True)):
            positive = is_positive(row, config)
            for j in range(config.neg_num if positive else 0):
                source = channel
                if config.channel and len(pools.items) > 1 and easy[i, j] < config.easy_hard_ratio:
                    target, below = which[i, j] * sum(map(len, pools.items.values())), 0
                    for source, items in pools.items.items():  # noqa: B007
                        below += len(items)
                        if target < below:
                            break
                drawn = pools.draw(source, where[i, j])
                if drawn is not None:
                    columns, weight = drawn
                    made = {**row, **columns, "label": config.negative_label, "instance_weight": pytest.approx(weight)}
                    if config.negative_action is not None:
                        made["actions"] = [config.negative_action]
                    result.append(made)
            if not config.throw_origin and (positive or not config.throw_origin_neg):
                real = config.real_neg_instance_weight if config.real_neg_instance_weight > 1e-5 else 1.0
                result.append({**row, "instance_weight": pytest.approx(1.0 if positive else real)})
        out.append(result)
    return out


CASES: dict[str, dict] = {
    "defaults": {},
    "few items": {"max_item_num": 5},
    "channels": {"channel": "chnid"},
    "easy": {"channel": "chnid", "easy_hard_ratio": 0.5, "max_item_num": 6},
    "by action": {"positive_actions": (1, 3), "action_priority": (2, 1), "negative_action": 42},
    "all items": {"cache_only_pos": False, "origin_neg_in_pool_proba": 0.5, "real_neg_instance_weight": 0.25},
    "listed negatives": {"cache_negative_actions": (0, 4), "action_priority": (4,), "origin_neg_in_pool_proba": 0.5},
    "fixed weight": {"sampled_neg_instance_weight": 0.7, "throw_origin_neg": True},
    "only made": {"throw_origin": True, "unbias_sampled_neg": False},
    "decay": {"neg_sample_decay_factor": 2.0, "negative_label": 0.0},
    "late start": {"start_num": 12},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_against_one_row_at_a_time(options: dict) -> None:
    config = NegativeGenConfig(**{"neg_num": 3, "item_features": ("ids", "more_ids"), "start_num": 2, **options})
    transform = NegativeGen(config, seed=8)
    stream = batches()
    made = [to_rows(transform(batch)) for batch in stream]
    assert made == oracle(stream, config, seed=8)
    assert sum(row["label"] == config.negative_label for rows in made for row in rows) > 20


def test_several_labels_and_an_empty_batch() -> None:
    config = NegativeGenConfig(neg_num=1, item_features=("item_id",), start_num=0, label_index=1)
    batch = {"item_id": torch.tensor([5, 6]), "label": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}
    transform = NegativeGen(config)
    assert transform(batch)["label"].tolist() == [[0.0, -1.0], [0.0, 1.0], [1.0, 0.0]]
    assert to_rows(transform({name: column[:0] for name, column in batch.items()})) == []
    with pytest.raises(InvalidArgumentError, match="index 1"):
        transform({**batch, "label": torch.ones(2)})


def test_the_pool_is_bounded_and_first_in_first_out() -> None:
    pool = ItemPool(start_num=0, max_item_num=100)
    for start in range(0, 5000, 50):
        ids = torch.arange(start, start + 50)
        pool.add(1, ids, {"x": ids * 2})
        assert pool.size(1) <= 100
    items, time, _ = pool.draw(1, (np.arange(100) + 0.5) / 100)
    assert items["x"].tolist() == list(range(2 * 4900, 2 * 5000, 2))
    assert time.tolist() == pytest.approx((np.arange(100) + 1) / 100)
    assert len(pool._channels[1].places) == 100


def test_an_item_that_comes_again_keeps_its_place_and_features() -> None:
    pool = ItemPool(start_num=0, max_item_num=2)
    pool.add(1, torch.tensor([7, 8, 7]), {"x": torch.tensor([70, 80, 71])})
    pool.add(1, torch.tensor([7]), {"x": torch.tensor([72])})
    assert pool.draw(1, np.array([0.0, 0.5]))[0]["x"].tolist() == [70, 80]
    assert pool._channels[1].seen.tolist() == [3, 1]


def test_every_item_is_drawn_about_equally_often() -> None:
    pool = ItemPool(start_num=0)
    pool.add(1, torch.arange(10), {"x": torch.arange(10)})
    drawn = pool.draw(1, np.random.default_rng(0).random(20_000))[0]["x"]
    counts = torch.bincount(drawn, minlength=10).double()
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 27.9  # chi square, 9 degrees of freedom, 0.1 %


def test_a_saved_pool_goes_on_as_if_nothing_had_happened() -> None:
    config = NegativeGenConfig(neg_num=2, item_features=("ids",), start_num=2, channel="chnid", max_item_num=8)
    stream = batches(6)
    first = NegativeGen(config, seed=1)
    for batch in stream[:3]:
        first(batch)
    saved = pack_state(first.state_dict())
    second = NegativeGen(config, seed=99)
    second.load_state_dict(unpack_state(saved.structure, saved.tensor_bytes()))
    for batch in stream[3:]:
        assert to_rows(second(batch)) == to_rows(first(batch))


def test_a_state_taken_earlier_does_not_change_when_the_pool_goes_on() -> None:
    pool = ItemPool(start_num=0, max_item_num=3)
    pool.add(1, torch.tensor([1, 2]), {"x": torch.tensor([10, 20])})
    state = pool.state_dict()
    pool.draw(1, np.array([0.1, 0.1]))
    pool.add(1, torch.tensor([3, 4]), {"x": torch.tensor([30, 40])})
    restored = ItemPool(start_num=0, max_item_num=3)
    restored.load_state_dict(state)
    items, _, frequency = restored.draw(1, np.array([0.0, 0.9]))
    assert items["x"].tolist() == [10, 20]
    assert frequency.tolist() == [1.0, 1.0]


def test_workers_have_pools_of_their_own() -> None:
    config = NegativeGenConfig(neg_num=1, item_features=("ids",), start_num=0)
    whole = NegativeGen(config)
    part = whole.for_shard(1)
    part(batches(1)[0])
    assert part.pool.channels()
    assert not whole.pool.channels()


def test_what_does_not_fit_is_refused() -> None:
    for wrong in ({"neg_num": 0}, {"item_features": ()}, {"easy_hard_ratio": 1.5}, {"max_item_num": 0}):
        with pytest.raises(ConfigError):
            NegativeGenConfig(**{"neg_num": 1, "item_features": ("ids",), **wrong})
    with pytest.raises(InvalidArgumentError, match="max_item_num"):
        ItemPool(max_item_num=0)
    pool = ItemPool(start_num=0)
    pool.add(1, torch.tensor([1]), {"x": torch.tensor([1])})
    state = pool.state_dict()
    state["1"]["seen"] = torch.tensor([1, 2])
    with pytest.raises(InvalidArgumentError, match="one row"):
        pool.load_state_dict(state)
