"""Danger: rows that go to the wrong flow, twice, or nowhere; readers that wait for each other forever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from monolith.data import IteratorSource, data_source_key
from monolith.data.transforms import FilterByLabel, Transformed
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged
from monolith.original import CacheOneDataset, merge_flow, split_flow


def batch(keys: list[int], first: int) -> Batch:
    rows = range(first, first + len(keys))
    return {
        "data_source_key": torch.tensor(keys),
        "x": torch.tensor(list(rows)),
        "tags": Ragged.from_lists([[row] * (row % 3) for row in rows]),
    }


def numbers(batches: Iterator[Batch]) -> list[int]:
    return [x for one in batches for x in one["x"].tolist()]


def test_rows_go_to_the_flow_of_their_key_with_all_their_columns() -> None:
    keys = [data_source_key(name) for name in ("ads", "feed", "other")]
    source = [batch([keys[0], keys[1], keys[2], keys[0]], 0), batch([keys[1]], 4), batch([keys[0]], 5)]
    split = split_flow(source, ["ads", "feed"])
    ads = list(split["ads"])
    assert [one["x"].tolist() for one in ads] == [[0, 3], [5]]
    assert ads[0]["tags"].to_lists() == [[], []]
    assert ads[1]["tags"].to_lists() == [[5, 5]]
    assert numbers(iter(split["feed"])) == [1, 4]
    assert split.dropped == 1


def test_one_thread_that_would_wait_for_itself_is_told() -> None:
    split = split_flow([batch([1], number) for number in range(5)] + [batch([2], 9)], {"a": 1, "b": 2}, queue_size=2)
    a = iter(split["a"])
    next(a)
    with pytest.raises(InvalidArgumentError, match=r"flow 'a' has 2 batches queued, and this thread reads 'b'"):
        next(iter(split["b"]))
    assert numbers(a) == [1, 2, 3, 4]
    assert numbers(iter(split["b"])) == [9]


@pytest.mark.parametrize("queue_size", [1, 3, 1024])
def test_skewed_flows_split_transformed_and_merged_again_have_every_row_once(queue_size: int) -> None:
    source = [batch([2 if number % 40 == 39 else 1], number) for number in range(200)]
    split = split_flow(source, {"often": 1, "seldom": 2}, queue_size=queue_size)

    def keep(rows: Batch) -> Batch:
        return {**rows, "label": torch.ones(len(rows["x"]))}

    flows = [Transformed(split[name], keep, FilterByLabel(thresholds=(0.5,))) for name in ("often", "seldom")]
    assert sorted(numbers(iter(merge_flow(flows, queue_size=queue_size)))) == list(range(200))


def test_flows_read_by_threads_of_their_own_wait_for_each_other() -> None:
    split = split_flow([batch([1], number) for number in range(50)] + [batch([2], 99)], {"a": 1, "b": 2}, queue_size=1)
    found: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda n=name: found.update({n: numbers(iter(split[n]))})) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert found == {"a": list(range(50)), "b": [99]}


def test_merging_takes_turns_and_goes_on_from_its_state() -> None:
    def merged() -> object:
        parts = [
            IteratorSource([batch([0], 100 * part + turn) for turn in range(size)])
            for part, size in enumerate((4, 1, 2))
        ]
        return merge_flow(parts, queue_size=0)

    expected = [0, 100, 200, 1, 201, 2, 3]
    assert numbers(iter(merged())) == expected
    for stop in range(len(expected)):
        first, second = merged(), merged()
        begun = iter(first)
        taken = [next(begun)["x"].item() for _ in range(stop)]
        second.load_state_dict(first.state_dict())
        assert taken + numbers(iter(second)) == expected
    again = merged()
    assert numbers(iter(again)) + numbers(iter(again)) == expected * 2


def test_an_error_of_a_merged_source_is_raised_and_threads_end() -> None:
    def broken() -> Iterator[Batch]:
        yield batch([0], 1)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        list(merge_flow([broken(), [batch([0], 2)] * 3], queue_size=2))
    endless = merge_flow([iter(lambda: batch([0], 1), None)], queue_size=2)
    next(iter(endless))
    assert _gone("monolith-merge")


def _gone(name: str) -> bool:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(timeout=60)
    return all(thread.name != name for thread in threading.enumerate())


def test_threads_leave_no_state_to_go_on_from() -> None:
    with pytest.raises(InvalidArgumentError, match="queue_size: expected 0 for a state"):
        merge_flow([IteratorSource([])]).state_dict()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: split_flow([], {}), "some flows"),
        (lambda: split_flow([], {"a": 1, "b": 1}), "different keys"),
        (lambda: split_flow([], ["a"], queue_size=0), "queue_size >= 1"),
        (lambda: split_flow([], ["a"])["b"], "'b' is not one of a"),
        (lambda: next(iter(split_flow([{"x": torch.ones(1)}], ["a"])["a"])), "data_source_key"),
        (lambda: next(iter(split_flow([{"data_source_key": torch.ones(2, 2)}], ["a"])["a"])), "one key per row"),
        (lambda: merge_flow([]), "expected sources"),
        (lambda: merge_flow([[]], queue_size=0).state_dict(), "list has no state_dict"),
    ],
)
def test_what_cannot_work_is_said(make: object, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_only_the_last_element_is_called_last_in_every_epoch(count: int) -> None:
    cached = CacheOneDataset(IteratorSource([batch([0], number) for number in range(count)]))
    for _ in range(2):
        assert [(one["x"].item(), last) for one, last in cached] == [(n, n == count - 1) for n in range(count)]


def test_the_element_looked_ahead_at_is_read_again_after_a_restart() -> None:
    def cached() -> CacheOneDataset[Batch]:
        return CacheOneDataset(IteratorSource([batch([0], number) for number in range(4)]))

    for taken in range(5):
        first, second = cached(), cached()
        begun = iter(first)
        seen = [next(begun)[0]["x"].item() for _ in range(taken)]
        second.load_state_dict(first.state_dict())
        assert seen + [one["x"].item() for one, _ in second] == [0, 1, 2, 3]


def test_a_new_loop_goes_on_behind_the_element_handed_out() -> None:
    cached = CacheOneDataset(IteratorSource([batch([0], number) for number in range(4)]))
    assert next(iter(cached))[0]["x"].item() == 0
    assert [one["x"].item() for one, _ in cached] == [1, 2, 3]
    with pytest.raises(InvalidArgumentError, match="list has no state_dict"):
        CacheOneDataset([1]).state_dict()
