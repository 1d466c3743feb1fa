"""Danger: text is compared by its first bytes only, or with bytes of the next row. Each filter against `bytes` of Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from batch_rows import to_rows
from monolith.data.transforms import FilterByText, FilterByValue, read_filter_values
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, StorageError
from monolith.features import Batch, Ragged
from monolith.proto import item_pool_pb2


@pytest.fixture(params=[0, 1, 300])
def batch(request: pytest.FixtureRequest) -> Batch:
    rng = np.random.default_rng(3)
    texts = [rng.choice([97, 98, 255], size=rng.integers(4)).tolist() for _ in range(request.param)]
    return {"text": Ragged.from_lists(texts, dtype=torch.uint8), "row": torch.arange(request.param)}


CASES: dict[str, tuple[object, Callable]] = {
    "gt": ("b", operator.gt),
    "ge": ("ab", operator.ge),
    "eq": ("ab", operator.eq),
    "lt": ("ab", operator.lt),
    "le": (b"\xff", operator.le),
    "neq": ("", operator.ne),
    "between": (("a", "b"), lambda text, bounds: bounds[0] <= text < bounds[1]),
    "in": (("ab", b"\xffa", ""), operator.contains),
    "not-in": (("ab", b"\xffa", ""), lambda text, listed: text not in listed),
    "startswith": ("ab", bytes.startswith),
    "endswith": (("b", b"a\xff"), bytes.endswith),
}


def as_bytes(operand: object) -> object:
    if isinstance(operand, tuple):
        return tuple(as_bytes(part) for part in operand)
    return operand.encode() if isinstance(operand, str) else operand


@pytest.mark.parametrize("op", CASES)
def test_against_one_row_at_a_time(batch: Batch, op: str) -> None:
    operand, oracle = CASES[op]
    wanted = as_bytes(operand)
    keeps = (lambda text: text in wanted) if op == "in" else (lambda text: oracle(text, wanted))
    kept = FilterByText(column="text", op=op, operand=operand)(batch)
    expected = [row for row in to_rows(batch) if keeps(bytes(row["text"]))]
    assert to_rows(kept) == expected
    assert len(batch["row"]) < 300 or 0 < len(expected) < 300


def test_str_means_its_utf_8_bytes() -> None:
    batch = {"text": Ragged.from_lists([list("é".encode()), list(b"e")], dtype=torch.uint8)}
    assert FilterByText(column="text", op="eq", operand="é").mask(batch).tolist() == [True, False]


def message_file(path: Path, kind: str, values: list) -> Path:
    message = item_pool_pb2.FilterValues()
    getattr(message, kind).value.extend(values)
    path.write_bytes(message.SerializeToString())
    return path


def test_lists_of_values_come_from_files(tmp_path: Path, batch: Batch) -> None:
    ids = read_filter_values(message_file(tmp_path / "ids", "int64_list", [2, 2**60 + 1]))
    assert ids == (2, 2**60 + 1)
    column = {"x": torch.tensor([2, 2**60, 2**60 + 1])}
    assert FilterByValue(column="x", op="in", operand=ids)(column)["x"].tolist() == [2, 2**60 + 1]
    assert FilterByValue(column="x", op="not-in", operand=ids)(column)["x"].tolist() == [2**60]
    rates = read_filter_values(message_file(tmp_path / "rates", "float_list", [0.1]))
    assert FilterByValue(column="x", op="in", operand=rates)({"x": torch.tensor([0.1, 0.2])})["x"].tolist() == [
        pytest.approx(0.1)
    ]
    texts = read_filter_values(message_file(tmp_path / "texts", "bytes_list", [b"ab", b"\xff"]))
    kept = FilterByText(column="text", op="in", operand=texts)(batch)
    assert to_rows(kept) == [row for row in to_rows(batch) if bytes(row["text"]) in (b"ab", b"\xff")]


def test_files_that_hold_no_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        read_filter_values(tmp_path / "missing")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(CorruptFileError, match="without"):
        read_filter_values(tmp_path / "empty")
    (tmp_path / "damaged").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(CorruptFileError, match="FilterValues"):
        read_filter_values(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("op", "operand"), [("eq", ("a",)), ("in", "a"), ("between", ("a",)), ("like", "a"), ("eq", 1)]
)
def test_wrong_configs_are_refused(op: str, operand: object) -> None:
    with pytest.raises(ConfigError):
        FilterByText(column="text", op=op, operand=operand)


@pytest.mark.parametrize("column", [torch.ones(2), Ragged.from_lists([[1], [2]])])
def test_columns_of_numbers_are_refused(column: torch.Tensor | Ragged) -> None:
    with pytest.raises(InvalidArgumentError, match="FilterByValue"):
        FilterByText(column="x", op="eq", operand="a")({"x": column})
