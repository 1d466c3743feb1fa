"""Danger: a replayed stream that drops other ids than the original would, or a set that loses ids without saying so."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import InvalidArgumentError
from monolith.original.touched_keys import (
    TOUCHED_KEY_SET_CAPACITY,
    TOUCHED_KEY_SET_CONCURRENCY_LEVEL,
    TouchedKeySet,
    create_touched_key_set,
)

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


def sorted_ids(ids: torch.Tensor) -> list[int]:
    assert ids.dtype == torch.int64
    assert ids.ndim == 1
    return sorted(ids.tolist())


def test_spec_constants() -> None:
    assert TOUCHED_KEY_SET_CAPACITY == 2_097_152
    assert TOUCHED_KEY_SET_CONCURRENCY_LEVEL == 1024
    touched = TouchedKeySet()
    assert (touched.capacity, touched.concurrency_level) == (2_097_152, 1024)


def test_spec_basic() -> None:
    touched = TouchedKeySet(1000, 1)
    assert touched.insert(torch.arange(1000)) == 0
    assert sorted_ids(touched.steal()) == list(range(1000))
    assert sorted_ids(touched.steal()) == []


def test_spec_overflow() -> None:
    touched = TouchedKeySet(1000, 1)
    assert touched.insert(torch.arange(1005)) == 1001
    assert sorted_ids(touched.steal()) == [1001, 1002, 1003, 1004]


@given(
    capacity=st.integers(min_value=1, max_value=12),
    concurrency_level=st.sampled_from([1, 3, 64]),
    batches=st.lists(st.lists(st.integers(min_value=-8, max_value=8) | INT64, max_size=30), max_size=8),
)
def test_every_batch_follows_the_rule(capacity: int, concurrency_level: int, batches: list[list[int]]) -> None:
    touched, model = TouchedKeySet(capacity, concurrency_level), set[int]()
    for batch in batches:
        expected = 0
        for id_ in batch:
            if len(model) > capacity:
                expected += len(model)
                model.clear()
            model.add(id_)
        assert touched.insert(torch.tensor(batch, dtype=torch.int64)) == expected
        assert len(touched) == len(model)
    assert sorted_ids(touched.steal()) == sorted(model)
    assert len(touched) == 0


def test_any_shape_and_container_in_row_major_order() -> None:
    # Only with row-major order are 4 and 5 the ids left: the set is cleared before each of the last two.
    for ids in (torch.tensor([[0, 1], [2, 3], [4, 5]]), np.arange(6).reshape(3, 2), [0, 1, 2, 3, 4, 5]):
        touched = TouchedKeySet(3, 1)
        assert touched.insert(ids) == 4
        assert sorted_ids(touched.steal()) == [4, 5]
    transposed = torch.arange(6).reshape(3, 2).T  # not contiguous: rows 0 2 4 and 1 3 5
    touched = TouchedKeySet(3, 1)
    assert touched.insert(transposed) == 4
    assert sorted_ids(touched.steal()) == [3, 5]
    assert touched.insert(torch.tensor(7)) == 0
    assert touched.insert([]) == 0
    assert sorted_ids(touched.steal()) == [7]


def test_stolen_ids_are_the_callers_to_change() -> None:
    touched = TouchedKeySet(10, 1)
    touched.insert([1, 2])
    stolen = touched.steal()
    stolen += 100
    touched.insert([1, 2])
    assert sorted_ids(touched.steal()) == [1, 2]


def test_the_name_suffix_is_used_and_sets_are_not_shared() -> None:
    first, second = create_touched_key_set(10, 1, "_a"), create_touched_key_set(10, 1, "_a")
    assert first.name == TouchedKeySet(10, 1, name_suffix="_a").name == "MonolithTouchedKeySet_a"
    first.insert([1])
    assert len(second) == 0


@pytest.mark.parametrize("wrong", [0, -1, 2**62])
def test_impossible_sizes_are_refused(wrong: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"capacity is {wrong}, expected 1\.\."):
        TouchedKeySet(wrong, 1)
    with pytest.raises(InvalidArgumentError, match=rf"concurrency_level is {wrong}, expected 1\.\."):
        TouchedKeySet(10, wrong)


def test_other_types_are_refused_not_rounded() -> None:
    touched = TouchedKeySet(10, 1)
    for wrong in (
        torch.tensor([1.5]),
        torch.tensor([1], dtype=torch.int32),
        np.array([2**63], dtype=np.uint64),
        [2**63],
    ):
        with pytest.raises(InvalidArgumentError, match="ids: expected"):
            touched.insert(wrong)
    assert len(touched) == 0


def test_threads_lose_nothing() -> None:
    touched, per_thread = TouchedKeySet(1 << 20, 16), 20_000
    stolen: list[torch.Tensor] = []

    def write(first: int) -> None:
        for ids in torch.arange(first, first + per_thread).split(777):
            assert touched.insert(ids) == 0

    threads = [threading.Thread(target=write, args=(t * per_thread,)) for t in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stolen.append(touched.steal())
    stolen.append(touched.steal())
    assert sorted_ids(torch.cat(stolen)) == list(range(4 * per_thread))
