"""Danger: two ids sharing a row, or an id that the index uses for itself. Either mixes two users' embeddings
silently.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comparison import INT64_MAX, INT64_MIN, assert_equal, float32, int64
from monolith import EmbeddingTable
from monolith.testing import sgd_table_config

ORDINARY = [0, -1, 1, -2, INT64_MIN, INT64_MAX, INT64_MIN + 1, INT64_MAX - 1, 2**32, -(2**32), 2**48, 2**62]


@pytest.mark.parametrize("id_", ORDINARY)
def test_any_int64_is_an_ordinary_id(id_: int) -> None:
    table = EmbeddingTable(sgd_table_config(2))
    ids = int64([id_])
    assert id_ not in table
    assert table.contains(ids).tolist() == [False]
    table.assign(ids, float32([[1.0, 2.0]]))
    assert id_ in table
    assert len(table) == 1
    table.apply_gradients(ids, float32([[0.5, 0.5]]))
    assert table.lookup(ids).tolist() == [[0.5, 1.5]]
    assert table.lookup(int64([id_ ^ 1])).tolist() == [[0.0, 0.0]]
    assert table.erase(ids).tolist() == [True]
    assert id_ not in table
    assert len(table) == 0


def many_ids() -> np.ndarray:
    """Random ids and the structured ones that weak hashes fold together."""
    rng = np.random.default_rng(7)
    sequence = np.arange(25_000, dtype=np.int64)
    ids = np.concatenate(
        [
            rng.integers(INT64_MIN, INT64_MAX, 100_000, endpoint=True),
            sequence - 12_500,
            sequence << 16,  # low bits constant
            sequence << 39,  # only high bits differ
            (sequence % 1024) << 48 | sequence,  # slot-prefixed
            sequence * -(2**32),
            np.array(ORDINARY, np.int64),
        ]
    )
    return np.unique(ids)


def test_no_two_ids_share_a_row() -> None:
    ids = many_ids()
    assert len(ids) > 200_000
    # Each id's own value, in two halves that float32 holds exactly.
    own = np.stack([np.arange(len(ids)) // 4096, np.arange(len(ids)) % 4096], axis=1).astype(np.float32)
    order = np.random.default_rng(8).permutation(len(ids))
    table = EmbeddingTable(sgd_table_config(2))
    for chunk in np.array_split(order, 37):
        table.assign(torch.from_numpy(ids[chunk]), torch.from_numpy(own[chunk]))
    assert len(table) == len(ids)
    assert_equal(table.lookup(torch.from_numpy(ids)), own)


def test_ids_that_were_never_written_have_no_row() -> None:
    ids = many_ids()
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(torch.from_numpy(ids[::2].copy()), torch.ones(len(ids[::2]), 1))
    assert_equal(table.contains(torch.from_numpy(ids)), np.arange(len(ids)) % 2 == 0)


def test_half_the_ids_erased_leave_the_others_untouched() -> None:
    ids = many_ids()
    own = np.arange(len(ids), dtype=np.float32)[:, None]
    table = EmbeddingTable(sgd_table_config(1))
    table.assign(torch.from_numpy(ids), torch.from_numpy(own))
    gone = np.random.default_rng(9).random(len(ids)) < 0.5
    assert table.erase(torch.from_numpy(ids[gone])).all()
    assert_equal(table.contains(torch.from_numpy(ids)), ~gone)
    assert_equal(table.lookup(torch.from_numpy(ids)), np.where(gone[:, None], 0, own))
    assert len(table) == np.count_nonzero(~gone)
