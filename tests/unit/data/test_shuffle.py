"""Danger: shuffling loses or repeats rows, does not mix, or is another order after a restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from batch_rows import to_rows
from monolith.data.prefetch import Prefetch
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.data.transforms.compose import Shuffle
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged
from monolith.state_bytes import pack_state, unpack_state

CONFIG = ClickStreamConfig(batch_size=16, batches=20, users=50, items=50)


def counted(rows: int, size: int) -> Iterator[Batch]:
    for start in range(0, rows, size):
        numbers = list(range(start, min(start + size, rows)))
        yield {"x": torch.tensor(numbers), "r": Ragged.from_lists([[number] * (number % 3) for number in numbers])}


@pytest.mark.parametrize("rows", [0, 1, 7, 100, 103])
@pytest.mark.parametrize("buffer_rows", [2, 10, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 8, 200])
def test_every_row_comes_out_once_and_whole(rows: int, buffer_rows: int, batch_size: int) -> None:
    shuffled = list(Shuffle(counted(rows, 9), buffer_rows=buffer_rows, batch_size=batch_size, seed=3))
    numbers = [row["x"] for batch in shuffled for row in to_rows(batch)]
    assert sorted(numbers) == list(range(rows))
    assert all(row["r"] == [row["x"]] * (row["x"] % 3) for batch in shuffled for row in to_rows(batch))
    sizes = [len(batch["x"]) for batch in shuffled]
    assert all(size == batch_size for size in sizes[:-1])
    assert all(0 < size <= batch_size for size in sizes)


def test_a_buffer_of_everything_is_a_uniform_permutation() -> None:
    first = torch.zeros(6)
    for seed in range(600):
        (batch,) = Shuffle(counted(6, 2), buffer_rows=100, batch_size=6, seed=seed)
        first[batch["x"][0]] += 1
    assert float(((first - 100) ** 2 / 100).sum()) < 20.5  # chi square, 5 degrees of freedom, 0.1 %


def test_rows_wander_farther_than_one_buffer() -> None:
    numbers = torch.cat([batch["x"] for batch in Shuffle(counted(1000, 10), buffer_rows=100, batch_size=50, seed=1)])
    delay = torch.arange(1000) - numbers
    assert int(delay.max()) > 100
    assert int(delay.min()) >= -100


def order(source: Shuffle) -> list[list[dict]]:
    return [to_rows(batch) for batch in source]


def shuffle(seed: int = 4) -> Shuffle:
    return Shuffle(ClickStream(CONFIG), buffer_rows=100, batch_size=24, seed=seed)


def test_a_finished_loop_starts_again_and_a_left_one_goes_on() -> None:
    source = shuffle()
    rows = [row["event_time"] for batch in order(source) for row in batch]
    again = [row["event_time"] for batch in order(source) for row in batch]
    assert sorted(again) == sorted(rows)
    for _ in zip(range(14), source, strict=False):
        pass
    assert sum(map(len, order(source))) == 320


def test_the_seed_decides_the_order() -> None:
    assert order(shuffle()) == order(shuffle())
    assert order(shuffle()) != order(shuffle(seed=5))


@pytest.mark.parametrize("seen", [0, 1, 2, 5, 9, 13])
def test_a_restart_goes_on_with_the_same_rows(seen: int) -> None:
    whole = order(shuffle())
    assert len(whole) == 14
    first = shuffle()
    for _ in zip(range(seen), first, strict=False):
        pass
    saved = pack_state(first.state_dict())
    second = shuffle(seed=77)
    second.load_state_dict(unpack_state(saved.structure, saved.tensor_bytes()))
    assert order(second) == whole[seen:]


def test_it_can_be_read_ahead_and_resumed() -> None:
    whole = order(shuffle())
    with Prefetch(shuffle(), capacity=4) as ahead:
        for _ in zip(range(5), ahead, strict=False):
            pass
        state = ahead.state_dict()
    again = Prefetch(shuffle(), capacity=4)
    again.load_state_dict(state)
    assert [to_rows(batch) for batch in again] == whole[5:]


def test_shards_share_no_row_and_no_order() -> None:
    parts = [shuffle().shard(index, 2) for index in (0, 1)]
    sizes = [sum(map(len, order(part))) for part in parts]
    assert sizes == [160, 160]
    orders = [Shuffle(counted(50, 50), buffer_rows=50, batch_size=50) for _ in range(2)]
    orders[1]._rng = parts[1]._rng
    assert next(iter(orders[0]))["x"].tolist() != next(iter(orders[1]))["x"].tolist()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="buffer_rows"):
        Shuffle([], buffer_rows=1, batch_size=1)
    plain = Shuffle([], buffer_rows=2, batch_size=1)
    for call in (plain.state_dict, lambda: plain.load_state_dict({}), lambda: plain.shard(0, 1)):
        with pytest.raises(InvalidArgumentError, match="source"):
            call()
