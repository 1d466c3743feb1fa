"""Danger: an error about one row of a large file that does not say which, so that somebody has to search for it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from monolith.data import Column, CsvSource, IteratorSource, ParquetSource
from monolith.errors import SchemaError

USER, PRICE = Column(name="user", shape=()), Column(name="price", dtype="float32", shape=())
TAGS = Column(name="tags")


def refusal(path: Path, *columns: Column, max_corrupt: int = 0, names: list[str] | None = None) -> str:
    source = CsvSource(str(path), columns, batch_size=2, max_corrupt=max_corrupt, names=names)
    with pytest.raises(SchemaError) as refused:
        list(source)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,price,tags\n1,2,3\n2,cheap,1\n", "line 3: column 'price': expected a number, got 'cheap'"),
        ("user,price,tags\n1.5,2,3\n", "line 2: column 'user': expected an integer, got '1.5'"),
        ("user,price,tags\n1,2,3|x\n", "line 2: column 'tags': expected integers between list separators, got '3|x'"),
        ("user,price,tags\n\n\n1,2,3\n\n1,,3\n", "line 6: column 'price' has no value; leave the row out"),
        ("user,price,tags\r\n1,2,3\r\n\r\n1,y,3\r\n", "line 4: column 'price': expected a number, got 'y'"),
    ],
)
def test_file_line_column_and_value(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(text.encode())
    assert f"{file}: {message}" in refusal(file, USER, PRICE, TAGS)


def test_rows_that_were_skipped_count_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv.gz"
    file.write_bytes(gzip.compress(b"1,2\n1\n\n1,2,3\n2,z\n"))
    assert f"{file}: line 5: column 'price'" in refusal(file, USER, PRICE, max_corrupt=2, names=["user", "price"])


def test_a_field_that_is_not_in_the_header(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("user,item\n1,2\n")
    assert refusal(file, PRICE) == (
        f"{file}: there is no field 'price'; it has 'user', 'item'. A file without a header line needs `names`, those of all its "
        "fields"
    )


def test_a_null_in_parquet(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"user": [1, 2, 3, None]}), file, row_group_size=2)
    with pytest.raises(
        SchemaError, match=r"rows.parquet: row group 1, row 1: column 'user' has no value; leave the row"
    ):
        list(ParquetSource(str(file), [USER], batch_size=3))


def test_another_type_in_parquet(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"user": ["a"]}), file)
    with pytest.raises(SchemaError, match=r"rows.parquet: column 'user': expected int64, 'user' is string"):
        list(ParquetSource(str(file), [USER], batch_size=3))


def test_a_missing_value_among_python_rows() -> None:
    rows = [{"user": 1}, {"user": 2}, {}]
    with pytest.raises(SchemaError, match=r"rows 0\.\.2: row 2 of the batch: column 'user' has no value"):
        list(IteratorSource(rows, [USER], batch_size=3))
