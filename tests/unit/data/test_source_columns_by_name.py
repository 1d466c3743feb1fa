"""Columns that a file does not have as asked: a name is enough where the file has types, and a wrong one says what there is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from monolith.data import Column, CsvSource, ParquetSource
from monolith.errors import InvalidArgumentError, SchemaError

TABLE = pa.table({"user": [1, 2], "tags": [[5], []], "label": [0.0, 1.0]})


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


def test_parquet_columns_by_name_have_the_types_of_the_file(parquet: str) -> None:
    (batch,) = ParquetSource(parquet, ["user", "tags"], batch_size=4)
    assert list(batch) == ["user", "tags"]
    assert (batch["user"].tolist(), batch["tags"].to_lists()) == ([1, 2], [[5], []])


def test_names_and_columns_may_be_mixed_and_keep_their_order(parquet: str) -> None:
    source = ParquetSource(parquet, ["label", Column(name="id", field="user", shape=())], batch_size=4)
    (batch,) = source
    assert list(batch) == ["label", "id"]


def test_an_unknown_name_is_refused_when_the_source_is_made(parquet: str) -> None:
    with pytest.raises(SchemaError, match=r"no column 'uesr'; did you mean 'user'\?"):
        ParquetSource(parquet, ["uesr"], batch_size=4)


def test_a_source_without_types_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"got str 'user'; this source has no types.*Column\(name='user'"):
        CsvSource(str(tmp_path / "rows.csv"), ["user"], batch_size=4)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("user;label\n1;0\n", "has no ',': give delimiter=';'"),
        ("user\tlabel\n1\t0\n", "has no ',': give delimiter='\\t'"),
        ("uesr,label\n1,0\n", "did you mean 'uesr'?"),
        ("1,0\n2,1\n", "A file without a header line needs `names`"),
    ],
)
def test_csv_without_the_column_says_why(tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(SchemaError) as refused:
        list(CsvSource(str(tmp_path / "rows.csv"), [Column(name="user", shape=())], batch_size=4))
    assert hint in str(refused.value)
