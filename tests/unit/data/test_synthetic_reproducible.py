"""Danger: a resumed or sharded run trains on other data than an uninterrupted one, and nobody can tell.

Golden sums: they may change only together with a line in the changelog, because published numbers depend on the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from monolith.data.synthetic import ClickStream, ClickStreamConfig, CriteoLike, CriteoLikeConfig, LateClicks
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged

CLICKS = ClickStreamConfig(
    seed=3, batch_size=64, batches=9, users=50, items=40, impressions_per_second=1.0, new_items_per_hour=10_000.0
)
CRITEO = CriteoLikeConfig(seed=3, batch_size=64, batches=9, cardinalities=(40, 10, 3))
SOURCES: dict[str, Callable[[], ClickStream | CriteoLike | LateClicks]] = {
    "clicks": lambda: ClickStream(CLICKS),
    "criteo": lambda: CriteoLike(CRITEO),
    "late clicks": lambda: LateClicks(ClickStream(CLICKS)),
}
each_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def plain(batch: Batch) -> dict[str, list]:
    return {
        name: column.to_lists() if isinstance(column, Ragged) else column.tolist() for name, column in batch.items()
    }


@each_source
def test_equal_configs_give_equal_batches(make: Callable) -> None:
    first, second = list(map(plain, make())), list(map(plain, make()))
    assert len(first) == 9
    assert first == second
    assert first[0] != first[1]


@each_source
@pytest.mark.parametrize("seen", [0, 1, 5, 8])
def test_a_saved_position_continues_with_the_next_batch(make: Callable, seen: int) -> None:
    whole = list(map(plain, make()))
    source = make()
    for _ in zip(range(seen), source, strict=False):
        pass
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert list(map(plain, resumed)) == whole[seen:]


@each_source
def test_a_new_loop_goes_on_and_after_the_end_starts_again(make: Callable) -> None:
    whole = list(map(plain, make()))
    source = make()
    first = plain(next(iter(source)))
    assert [first, *map(plain, source)] == whole
    assert list(map(plain, source)) == whole


@pytest.mark.parametrize("make", [SOURCES["clicks"], SOURCES["criteo"]], ids=["clicks", "criteo"])
def test_shards_partition_the_batches(make: Callable) -> None:
    whole = list(map(plain, make()))
    parts = [list(map(plain, make().shard(index, 2))) for index in range(2)]
    assert parts == [whole[0::2], whole[1::2]]


def test_shards_of_late_clicks_lose_and_repeat_no_click() -> None:
    config = CLICKS.model_copy(update={"click_window": 60.0, "click_delay": 5.0})
    stream = list(ClickStream(config))
    clicked = sorted(
        zip(
            torch.cat([batch["click_time"][batch["label"] > 0] for batch in stream]).tolist(),
            torch.cat([batch["item_id"][batch["label"] > 0] for batch in stream]).tolist(),
            strict=True,
        )
    )
    seen = []
    for index in range(3):
        for batch in LateClicks(ClickStream(config)).shard(index, 3):
            positive = batch["label"] > 0
            seen += zip(batch["event_time"][positive].tolist(), batch["item_id"][positive].tolist(), strict=True)
    ends = [int(stream[last]["event_time"][-1]) for last in (6, 7, 8)]
    # Each shard stops at its own last batch; clicks after that are not seen.
    assert set(seen) <= set(clicked)
    assert len(seen) == len(set(seen))
    assert {click for click in clicked if click[0] <= min(ends)} <= set(seen)


def test_a_state_of_another_config_or_shard_is_refused() -> None:
    state = ClickStream(CLICKS).state_dict()
    with pytest.raises(InvalidArgumentError, match="same config"):
        ClickStream(ClickStreamConfig()).load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="shard"):
        ClickStream(CLICKS).shard(0, 2).load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="'next'"):
        ClickStream(CLICKS).load_state_dict({**state, "next": -1})


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_shard_outside_its_count_is_refused(index: int, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="index"):
        ClickStream(CLICKS).shard(index, count)


def test_a_shard_can_be_sharded_again() -> None:
    whole = list(map(plain, CriteoLike(CRITEO)))
    assert list(map(plain, CriteoLike(CRITEO).shard(1, 2).shard(1, 2))) == whole[3::4]


def test_data_do_not_change_between_releases() -> None:
    clicks, criteo = ClickStream(CLICKS).batch(8), CriteoLike(CRITEO).batch(8)
    assert clicks["item_id"][:3].tolist() == GOLDEN_ITEMS
    assert criteo["C1"][:3].tolist() == GOLDEN_C1


GOLDEN_ITEMS = [813743172442511, 759644418807759, 577843839769365]
GOLDEN_C1 = [552953230291227, 289214210259611, 397415806159636]
