"""Danger: a Parquet, CSV or Python column that changes its values, its nulls or its nesting on the way into a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forked_processes import run_script
from monolith.data import Column, CsvSource, IteratorSource, ParquetSource
from monolith.data.sources.arrow import columns_of, to_batch
from monolith.errors import CorruptFileError, InvalidArgumentError, SchemaError, StorageError
from rows import as_lists


def column(**fields: object) -> Column:
    return Column.model_validate({"name": "c", **fields})


def convert(array: pa.Array, **fields: object) -> dict[str, list[Any]]:
    return as_lists(to_batch(pa.table({"c": array}), [column(**fields)]))


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.uint16(), pa.int64(), pa.bool_()])
def test_integers(kind: pa.DataType) -> None:
    array = pa.array([0, 1, 1, 0], pa.int64()).cast(kind)
    assert convert(array, shape=()) == {"c": [0, 1, 1, 0]}
    assert convert(array, dtype="float32", shape=(1,)) == {"c": [[0.0], [1.0], [1.0], [0.0]]}
    assert convert(array) == {"c": [[0], [1], [1], [0]]}


def test_unsigned_ids_keep_their_bits() -> None:
    array = pa.array([2**64 - 1, 2**63, 5], pa.uint64())
    assert convert(array, shape=()) == {"c": [-1, -(2**63), 5]}


def test_numbers_that_would_change_are_refused() -> None:
    for array, dtype in ((pa.array([0.5]), "int64"), (pa.array([2**24 + 1]), "float32"), (pa.array(["x"]), "float32")):
        with pytest.raises(SchemaError, match="column 'c'"):
            convert(array, dtype=dtype, shape=())


def test_nulls() -> None:
    assert convert(pa.array([1, None]), shape=(), default=-1) == {"c": [1, -1]}
    assert convert(pa.array([1, None])) == {"c": [[1], []]}
    assert convert(pa.array([[1, 2], None, []])) == {"c": [[1, 2], [], []]}
    assert convert(pa.array([[1, 2], None]), shape=(2,), default=0) == {"c": [[1, 2], [0, 0]]}
    assert convert(pa.array([b"ab", None]), dtype="bytes") == {"c": [[97, 98], []]}
    for array, fields in (
        (pa.array([1, None]), {"shape": ()}),
        (pa.array([[1], None]), {"shape": (1,)}),
        (pa.array([[1, None]]), {}),
    ):
        with pytest.raises(SchemaError, match=r"has no value|a list has a null"):
            convert(array, **fields)


def test_lists_of_a_fixed_size() -> None:
    array = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    assert convert(array, dtype="float32", shape=(2,)) == {"c": [[1.0, 2.0], [3.0, 4.0]]}
    assert convert(array.slice(1), dtype="float32", shape=(1, 2)) == {"c": [[[3.0, 4.0]]]}
    assert convert(array.slice(1), dtype="float32") == {"c": [[3.0, 4.0]]}
    with pytest.raises(SchemaError, match="row 1 of the batch has 1 values, expected 2"):
        convert(pa.array([[1, 2], [3]]), shape=(2,))


nested = st.lists(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), max_size=3), min_size=1, max_size=6)


@given(nested, st.integers(0, 5), st.sampled_from([pa.list_, pa.large_list]))
def test_any_nesting_and_slice(
    rows: list[list[list[int]]], start: int, kind: Callable[[pa.DataType], pa.DataType]
) -> None:
    array = pa.array(rows, kind(kind(pa.int64()))).slice(start)
    expected = rows[start:]
    assert convert(array, nested=True) == {
        "c": [[value for inner in row for value in inner] for row in expected],
        "c.lengths": [[len(inner) for inner in row] for row in expected],
    }
    flat = [[value for inner in row for value in inner] for row in rows]
    assert convert(pa.array(flat, kind(pa.int64())).slice(start)) == {"c": flat[start:]}


@given(st.lists(st.lists(st.binary(max_size=3), max_size=3), min_size=1, max_size=6), st.integers(0, 5))
def test_any_strings_and_slice(rows: list[list[bytes]], start: int) -> None:
    array = pa.array(rows, pa.list_(pa.binary())).slice(start)
    assert convert(array, dtype="bytes", nested=True) == {
        "c": [list(b"".join(row)) for row in rows[start:]],
        "c.lengths": [[len(text) for text in row] for row in rows[start:]],
    }
    one = [b"".join(row) for row in rows]
    assert convert(pa.array(one).slice(start), dtype="bytes") == {"c": [list(text) for text in one[start:]]}
    words = pa.array([text.hex() for text in one]).dictionary_encode().slice(start)
    assert convert(words, dtype="bytes") == {"c": [list(text.hex().encode()) for text in one[start:]]}


def test_columns_of_other_kinds_are_refused() -> None:
    for array, fields, says in (
        (pa.array([1]), {"nested": True}, "expected lists"),
        (pa.array([1]), {"shape": (2,)}, "expected lists of 2"),
        (pa.array([1]), {"dtype": "bytes"}, "expected strings"),
        (pa.array([["a"]]), {}, "expected int64"),
        (pa.array([[[1]]]), {}, "expected int64"),
    ):
        with pytest.raises(SchemaError, match=says):
            convert(array, **fields)
    with pytest.raises(SchemaError, match="there is no 'c'; there are d"):
        to_batch(pa.table({"d": [1]}), [column()])


def test_columns_by_schema(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "score": pa.array([0.5, 1.5], pa.float16()),
            "exact": [0.5, 1.5],
            "text": ["a", "bc"],
            "tags": [[1], []],
            "lists": [[[1], [2, 3]], []],
            "words": [["a", "b"], []],
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    (batch,) = ParquetSource(str(tmp_path / "rows.parquet"), batch_size=4)
    assert as_lists(batch) == {
        "id": [1, 2],
        "score": [0.5, 1.5],
        "exact": [0.5, 1.5],
        "text": [[97], [98, 99]],
        "tags": [[1], []],
        "lists": [[1, 2, 3], []],
        "lists.lengths": [[1, 2], []],
        "words": [[97, 98], []],
        "words.lengths": [[1, 1], []],
        "vector": [[1.0, 2.0], [3.0, 4.0]],
    }
    assert isinstance(batch["exact"], torch.Tensor)
    assert batch["exact"].dtype == torch.float64
    for kind in (pa.timestamp("s"), pa.list_(pa.list_(pa.string())), pa.struct([("x", pa.int64())])):
        with pytest.raises(SchemaError, match="cannot be a column of a batch"):
            columns_of(pa.schema([("x", kind)]))


def test_only_the_columns_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2], "c": [3]}), tmp_path / "rows.parquet")
    asked = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, columns: asked.append(columns) or read(self, i, columns)
    )
    (batch,) = ParquetSource(str(tmp_path), [Column(name="x", field="c", shape=())], batch_size=4)
    assert (as_lists(batch), asked) == ({"x": [3]}, [["c"]])


def test_many_batches_of_one_row_group(tmp_path: Path) -> None:
    rows = [{"tags": list(range(i % 5)), "words": [str(i)] * (i % 3)} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    columns = [Column(name="tags"), Column(name="words", dtype="bytes", nested=True)]
    batches = [as_lists(batch) for batch in ParquetSource(str(tmp_path), columns, batch_size=8)]
    assert [row for batch in batches for row in batch["tags"]] == [row["tags"] for row in rows]
    assert [row for batch in batches for row in batch["words"]] == [
        list("".join(row["words"]).encode()) for row in rows
    ]
    assert [row for batch in batches for row in batch["words.lengths"]] == [
        [len(w) for w in row["words"]] for row in rows
    ]


def test_parquet_by_url() -> None:
    with fsspec.open("memory://test_source_tables/rows.parquet", "wb") as file:
        pq.write_table(pa.table({"a": [1, 2]}), file)
    (batch,) = ParquetSource("memory://test_source_tables/*.parquet", batch_size=4)
    assert as_lists(batch) == {"a": [1, 2]}


def test_parquet_files_that_are_not(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(CorruptFileError, match=r"rows\.parquet: not a Parquet file"):
        ParquetSource(str(tmp_path), batch_size=1)
    with pytest.raises(StorageError, match="missing"):
        ParquetSource(str(tmp_path / "missing"), batch_size=1)
    with pytest.raises(InvalidArgumentError, match="standard input"):
        ParquetSource("-", batch_size=1)
    table = pa.table({"a": np.arange(10_000)})
    pq.write_table(table, tmp_path / "bad.parquet", use_dictionary=False, compression="none", write_page_checksum=True)
    data = bytearray((tmp_path / "bad.parquet").read_bytes())
    data[40:80] = bytes(40)
    data[4:24] = b"\xff" * 20
    (tmp_path / "bad.parquet").write_bytes(bytes(data))
    with pytest.raises(CorruptFileError, match="row group 0"):
        list(ParquetSource(str(tmp_path / "bad.parquet"), batch_size=1))


def test_csv_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('id,score,name,tags,words,pair\n1,.5,"a,b",1|2,x|yz,1|2\n2,,,,,\n')
    columns = [
        Column(name="id", shape=()),
        Column(name="score", dtype="float32", shape=(), default=-1.0),
        Column(name="name", dtype="bytes"),
        Column(name="tags"),
        Column(name="words", dtype="bytes", nested=True),
        Column(name="pair", dtype="float64", shape=(2,), default=9.0),
    ]
    (batch,) = CsvSource(str(path), columns, batch_size=4)
    assert as_lists(batch) == {
        "id": [1, 2],
        "score": [0.5, -1.0],
        "name": [list(b"a,b"), []],
        "tags": [[1, 2], []],
        "words": [list(b"xyz"), []],
        "words.lengths": [[1, 2], []],
        "pair": [[1.0, 2.0], [9.0, 9.0]],
    }
    with pytest.raises(SchemaError, match="nobody"):
        list(CsvSource(str(path), [Column(name="nobody")], batch_size=4))
    with pytest.raises(InvalidArgumentError, match="no lists of lists"):
        CsvSource(str(path), [Column(name="tags", nested=True)], batch_size=4)
    path.write_text("")
    assert list(CsvSource(str(path), columns, batch_size=4)) == []


def test_csv_columns_of_one_field_have_each_their_own_type(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    columns = [Column(name="id", field="x", shape=()), Column(name="y", field="x", dtype="float32", shape=(1,))]
    (batch,) = CsvSource(str(tmp_path / "a.csv"), columns, batch_size=9)
    assert as_lists(batch) == {"id": [1, 3], "y": [[1.0], [3.0]]}


def test_csv_over_many_blocks(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{i}\t{i * i}\n" for i in range(200_000)))
    columns = [Column(name="a", shape=()), Column(name="b", shape=())]
    source = CsvSource(str(path), columns, batch_size=70_001, delimiter="\t", names=["a", "b"])
    batches = list(source)
    assert [len(batch["a"]) for batch in batches] == [70_001, 70_001, 59_998]
    a = torch.cat([batch["a"] for batch in batches])
    assert torch.equal(a, torch.arange(200_000))
    assert torch.equal(torch.cat([batch["b"] for batch in batches]), a * a)


def test_csv_from_standard_input(tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(
        "from monolith.data import *\n"
        "for batch in CsvSource('-', [Column(name='x')], batch_size=2, delimiter='\\t', names=['x', 'y']):\n"
        "    print(batch['x'].to_lists())\n"
    )
    output = run_script(script, stdin="1|2\ta\n\tb\n3\tc\n")
    assert (output.returncode, output.stdout) == (0, "[[1, 2], []]\n[[3]]\n")


def test_python_rows() -> None:
    columns = [
        Column(name="id", shape=()),
        Column(name="name", dtype="bytes"),
        Column(name="tags"),
        Column(name="lists", dtype="float32", nested=True),
        Column(name="pair", dtype="float32", shape=(2,), default=0.5),
    ]
    rows = [
        {"id": 1, "name": "ab", "tags": np.array([1, 2]), "lists": [[1, 2], []], "pair": [1, 2]},
        {"id": 2, "name": None, "unused": object()},
    ]
    (batch,) = IteratorSource(rows, columns, batch_size=3)
    assert as_lists(batch) == {
        "id": [1, 2],
        "name": [[97, 98], []],
        "tags": [[1, 2], []],
        "lists": [[1.0, 2.0], []],
        "lists.lengths": [[2, 0], []],
        "pair": [[1.0, 2.0], [0.5, 0.5]],
    }
    for row in ({"id": "x"}, {"id": 2**63}, {"id": 1, "tags": 5}, {"id": None}):
        with pytest.raises(SchemaError, match="column"):
            list(IteratorSource([row], columns, batch_size=1))
    with pytest.raises(InvalidArgumentError, match="read only once"):
        IteratorSource(iter([]), columns, batch_size=1)
    with pytest.raises(InvalidArgumentError, match="both"):
        IteratorSource([], columns)
