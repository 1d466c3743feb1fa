"""Danger: a frozen copy of a table that gives an id another id's vector, or training that moves the unknown one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comparison import INT64_MAX, INT64_MIN, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import InvalidArgumentError
from monolith.table import FixedR8
from monolith.table.exchange import IdEmbedding

EDGES = [INT64_MIN, -1, 0, 1, INT64_MAX]
IDS = st.one_of(st.integers(INT64_MIN, INT64_MAX), st.sampled_from(EDGES))


def table_of(ids: list[int], dim: int = 3) -> EmbeddingTable:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=dim, compressor=FixedR8()),)))
    table.reinitialize(int64(ids))
    return table


@given(st.lists(IDS, unique=True, max_size=30), st.lists(IDS, max_size=30))
def test_reads_what_the_table_reads_and_zeros_elsewhere(there: list[int], asked: list[int]) -> None:
    table = table_of(there)
    frozen = IdEmbedding.from_table(table)
    wanted = int64(asked + there)
    expected = table.lookup(wanted) * table.contains(wanted).unsqueeze(-1)
    assert torch.equal(frozen(wanted), expected)
    assert torch.equal(frozen.positions(wanted) == 0, ~table.contains(wanted))
    assert frozen.ids.tolist() == sorted(there)


def test_any_shape_of_ids() -> None:
    frozen = IdEmbedding.from_table(table_of([1, 2]))
    assert frozen(int64([1, 2, 3, 1, 1, 9]).reshape(2, 3, 1)).shape == (2, 3, 1, 3)


def test_only_the_ids_asked_for() -> None:
    table = table_of([1, 2, 3])
    frozen = IdEmbedding.from_table(table, [3, 1, 3])
    assert frozen.ids.tolist() == [1, 3]
    assert torch.equal(frozen(int64([3])), table.lookup([3]))


def test_the_unknown_vector_does_not_learn() -> None:
    frozen = IdEmbedding.from_table(table_of([1]))
    optimizer = torch.optim.SGD(frozen.parameters(), lr=1.0)
    before = frozen(int64([1])).detach().clone()
    frozen(int64([1, 99])).sum().backward()
    optimizer.step()
    assert torch.equal(frozen(int64([99])), torch.zeros(1, 3))
    assert torch.equal(frozen(int64([1])), before - 1)


def test_it_is_a_plain_module() -> None:
    frozen = IdEmbedding.from_table(table_of([4, 7]))
    assert set(frozen.state_dict()) == {"ids", "embedding.weight"}
    assert type(frozen.embedding) is torch.nn.Embedding
    other = IdEmbedding(int64([0, 1]), torch.zeros(2, 3))
    other.load_state_dict(frozen.state_dict())
    assert torch.equal(other(int64([4, 7, 0])), frozen(int64([4, 7, 0])))
    scripted = torch.export.export(frozen, (int64([4, 5]),)).module()
    assert torch.equal(scripted(int64([7, 4])), frozen(int64([7, 4])))


@pytest.mark.parametrize("ids", [int64([2, 1]), int64([1, 1]), int64([1, 2]).int(), int64([[1], [2]])])
def test_ids_must_ascend(ids: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match="ids: expected int64"):
        IdEmbedding(ids, torch.zeros(2, 3))


def test_one_row_per_id() -> None:
    with pytest.raises(InvalidArgumentError, match=r"values: expected \[1, dim\], one row per id, got \[2, 3\]"):
        IdEmbedding(int64([1]), torch.zeros(2, 3))
