"""Danger: text of one row leaks into the next, or a list loses its rows. Ids against hashing the strings one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from monolith.data import Column, ParquetSource
from monolith.data.transforms import HashText
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Ragged, hash_strings


def one(text: str) -> int:
    return int(hash_strings([text])[0])


def texts(rows: list[str]) -> Ragged:
    return Ragged.from_lists([list(row.encode()) for row in rows], dtype=torch.uint8)


@pytest.mark.parametrize("rows", [[], [""], ["a", "", "größer", "a"], ["x" * 1000, "y"]])
def test_a_row_of_text_becomes_its_id(rows: list[str]) -> None:
    batch = {"city": texts(rows), "price": torch.arange(len(rows))}
    hashed = HashText(columns=("city",))(batch)
    assert hashed["city"].tolist() == [one(row) for row in rows]
    assert hashed["city"].dtype == torch.int64
    assert hashed["price"] is batch["price"]
    assert batch["city"].values.dtype == torch.uint8


def test_rows_that_start_inside_the_values_are_read_from_there() -> None:
    city = texts(["Bonn", "Rome", "Oslo"])
    part = Ragged(city.values[4:], np.array([0, 4, 8]))
    assert HashText(columns=("city",))({"city": part})["city"].tolist() == [one("Rome"), one("Oslo")]


def test_lists_of_text_keep_their_rows(tmp_path: Path) -> None:
    rows = [["red", "blue"], [], ["", "red"], ["green"]]
    pq.write_table(pa.table({"tags": pa.array(rows, pa.list_(pa.string()))}), tmp_path / "tags.parquet")
    source = ParquetSource(
        str(tmp_path / "tags.parquet"), [Column(name="tags", dtype="bytes", nested=True)], batch_size=10
    )
    (batch,) = source
    hashed = HashText(columns=("tags",))(batch)
    assert set(hashed) == {"tags"}
    assert hashed["tags"].to_lists() == [[one(tag) for tag in row] for row in rows]


@pytest.mark.parametrize("column", [torch.tensor([1, 2]), Ragged.from_lists([[1], [2]])])
def test_what_is_no_text_is_refused_by_name(column: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"batch\['city'\]: expected text.*dtype='bytes'"):
        HashText(columns=("city",))({"city": column})


def test_an_unknown_column_and_no_column_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="town"):
        HashText(columns=("town",))({"city": texts(["Bonn"])})
    with pytest.raises(ConfigError, match="columns"):
        HashText(columns=())
