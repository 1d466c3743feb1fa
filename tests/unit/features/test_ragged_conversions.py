"""Danger: rows that shift, or values that are copied, on the way from and to Arrow, nested tensors and TorchRec."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.torchrec import from_keyed_jagged, to_keyed_jagged

ROWS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), max_size=10)


@given(rows=ROWS)
def test_arrow_there_and_back(rows: list[list[int]]) -> None:
    for type_ in (pa.list_(pa.int64()), pa.large_list(pa.int64())):
        ragged = Ragged.from_arrow(pa.array(rows, type=type_))
        assert ragged.to_lists() == rows
        assert ragged.values.dtype == torch.int64
    assert ragged.to_arrow().to_pylist() == rows


def test_arrow_slices_chunks_and_null_rows() -> None:
    column = pa.array([[9], [1, 2], None, [], [3], [9]])
    assert Ragged.from_arrow(column.slice(1, 4)).to_lists() == [[1, 2], [], [], [3]]
    assert Ragged.from_arrow(pa.array([[9], [1, 2], [], [3], [9]]).slice(1, 3)).to_lists() == [[1, 2], [], [3]]
    assert Ragged.from_arrow(pa.chunked_array([[[1]], [[2, 3], []]])).to_lists() == [[1], [2, 3], []]
    assert Ragged.from_arrow(pa.array([[True], [False, True]])).to_lists() == [[True], [False, True]]
    assert Ragged.from_arrow(pa.array([], type=pa.list_(pa.float32()))).values.dtype == torch.float32


def test_arrow_shares_the_values() -> None:
    column = pa.array([[9], [1, 2], [3]]).slice(1)
    address = column.values.buffers()[1].address
    assert Ragged.from_arrow(column).values.data_ptr() == address + 8
    ragged = Ragged(torch.arange(3), [0, 1, 3])
    assert ragged.to_arrow().values.buffers()[1].address == ragged.values.data_ptr()


def test_vectors_become_lists_of_fixed_size() -> None:
    assert Ragged(torch.arange(6.0).reshape(3, 2), [0, 1, 3]).to_arrow().to_pylist() == [
        [[0.0, 1.0]],
        [[2.0, 3.0], [4.0, 5.0]],
    ]
    with pytest.raises(InvalidArgumentError, match=r"expected \[n\] or \[n, d\] for Arrow"):
        Ragged(torch.zeros(1, 1, 1), [0, 1]).to_arrow()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, 2]), "expected lists of numbers, got int64"),
        (pa.array([["a"]]), "expected lists of numbers, got string; strings become ids by hash_strings"),
        (pa.array([[1, None]]), "1 values are null"),
    ],
)
def test_arrow_columns_that_are_no_lists_of_numbers(column: pa.Array, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Ragged.from_arrow(column)


def test_nested_there_and_back_without_a_copy_and_with_gradients() -> None:
    values = torch.arange(6.0).reshape(3, 2).requires_grad_()
    nested = Ragged(values, [0, 1, 1, 3]).to_nested()
    assert [part.tolist() for part in nested.unbind()] == [[[0.0, 1.0]], [], [[2.0, 3.0], [4.0, 5.0]]]
    back = Ragged.from_nested(nested)
    assert back.values.data_ptr() == values.data_ptr()
    assert back.offsets.tolist() == [0, 1, 1, 3]
    back.values.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 1.0]] * 3


def test_nested_with_holes_is_closed_up() -> None:
    padded = torch.arange(6).reshape(2, 3)
    nested = torch.nested.narrow(padded, 1, torch.tensor([1, 0]), torch.tensor([2, 1]), layout=torch.jagged)
    assert Ragged.from_nested(nested).to_lists() == [[1, 2], [3]]


def test_only_nested_tensors() -> None:
    with pytest.raises(InvalidArgumentError, match="expected a nested tensor of layout"):
        Ragged.from_nested(torch.zeros(2, 2))


def test_nested_tensors_ragged_elsewhere() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(InvalidArgumentError, match="ragged in dimension 1"):
        Ragged.from_nested(nested)


class Keyed:
    """The four methods of a KeyedJaggedTensor that are read."""

    def __init__(self, weights: torch.Tensor | None = None, offsets: Any = (0, 2, 2, 3, 6)) -> None:  # noqa: ANN401
        self._weights, self._offsets = weights, offsets

    def keys(self) -> list[str]:
        return ["a", "b"]

    def values(self) -> torch.Tensor:
        return torch.arange(6)

    def offsets(self) -> torch.Tensor:
        return torch.tensor(self._offsets, dtype=torch.int32)

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights


def test_keyed_jagged_becomes_columns() -> None:
    batch = from_keyed_jagged(Keyed())
    assert {name: column.to_lists() for name, column in batch.items() if isinstance(column, Ragged)} == {
        "a": [[0, 1], []],
        "b": [[2], [3, 4, 5]],
    }
    with pytest.raises(InvalidArgumentError, match="has weights"):
        from_keyed_jagged(Keyed(weights=torch.ones(6)))
    with pytest.raises(InvalidArgumentError, match="3 rows for 2 keys"):
        from_keyed_jagged(Keyed(offsets=(0, 2, 3, 6)))


def test_keyed_jagged_of_torchrec_itself() -> None:
    pytest.importorskip("torchrec")
    batch = {"a": Ragged.from_lists([[1], [2, 3]]), "b": torch.tensor([4, 5]), "c": torch.tensor([[6, 7], [8, 9]])}
    back = from_keyed_jagged(to_keyed_jagged(batch, ["a", "c", "b"]))
    assert {name: column.to_lists() for name, column in back.items() if isinstance(column, Ragged)} == {
        "a": [[1], [2, 3]],
        "c": [[6, 7], [8, 9]],
        "b": [[4], [5]],
    }
