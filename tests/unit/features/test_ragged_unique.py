"""Danger: ids mixed up by deduplication send a gradient to another id's row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.features.kernels import unique_with_inverse

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@given(ids=st.lists(st.integers(min_value=-20, max_value=20) | INT64, max_size=200))
def test_agrees_with_a_dict(ids: list[int]) -> None:
    unique = unique_with_inverse(torch.tensor(ids, dtype=torch.int64), return_counts=True)
    first_seen = list(dict.fromkeys(ids))
    assert unique.ids.tolist() == first_seen
    assert unique.inverse.tolist() == [first_seen.index(id_) for id_ in ids]
    assert unique.counts is not None
    assert unique.counts.tolist() == [ids.count(id_) for id_ in first_seen]


def test_agrees_with_torch_on_large_batches() -> None:
    random = torch.Generator().manual_seed(0)
    for size, universe in ((100_000, 50), (100_000, 60_000), (200_000, 2**62)):
        ids = torch.randint(-universe, universe, (size,), generator=random)
        unique = unique_with_inverse(ids)
        expected, counts = torch.unique(ids, return_counts=True)
        assert unique.counts is None
        assert torch.equal(unique.ids[unique.inverse], ids)
        assert torch.equal(unique.ids.sort().values, expected)
        counted = unique_with_inverse(ids, return_counts=True).counts
        assert counted is not None
        assert torch.equal(counted[unique.ids.argsort()], counts)


def test_the_inverse_has_the_shape_of_the_batch() -> None:
    unique = unique_with_inverse(torch.tensor([[4, 4], [2, 4]]))
    assert unique.inverse.tolist() == [[0, 0], [1, 0]]
    assert unique_with_inverse([]).ids.tolist() == []
