"""Danger: a Parquet file of another tool, or of another table, that becomes rows that were never written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from comparison import float32, int64
from dumps import assert_same_rows
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import CorruptFileError, SchemaError, StorageError
from monolith.table import Adagrad, Adam, BatchSoftmax, FixedR8
from monolith.table.exchange import export_parquet, import_parquet


def trained() -> EmbeddingTable:
    segments = (Segment(dim=2, optimizer=Adagrad()), Segment(dim=1, optimizer=BatchSoftmax()))
    table = EmbeddingTable(TableConfig(name="t", segments=segments))
    table.apply_gradients(int64([5, -7]), float32([[1, 2, 0], [3, 4, 0]]), step=9, event_time=1_700_000_000)
    return table


def columns(table: EmbeddingTable) -> dict[str, pa.Array]:
    arrow = table.to_arrow()
    return {name: arrow[name].combine_chunks() for name in arrow.column_names}


def write(path: Path, **changed: pa.Array | None) -> Path:
    """What another tool would write: the columns of `trained`, some changed or missing, and no metadata of ours."""
    found = {**columns(trained()), **{name.replace("__", "/"): column for name, column in changed.items()}}
    pq.write_table(pa.table({name: column for name, column in found.items() if column is not None}), path)
    return path


def test_columns_and_types(tmp_path: Path) -> None:
    table = trained()
    file = export_parquet(table, tmp_path / "deep" / "t.parquet")
    read = pq.read_table(file)
    assert read.column_names == ["ids", "times", "values", "0/norm", "1/global_step"]
    assert [str(kind).split("<")[0] for kind in read.schema.types] == ["int64", "int64"] + 3 * ["fixed_size_list"]
    rows = {row["ids"]: row for row in read.to_pylist()}
    expected = table.lookup_entry([5])
    assert rows[5]["values"] == expected.values[0].tolist()
    assert rows[5]["0/norm"] == expected.slots["0/norm"][0].tolist()
    assert (rows[5]["1/global_step"], rows[5]["times"]) == ([9], 1_700_000_000)


def test_many_batches_and_progress(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1),)))
    table.reinitialize(np.arange(200_000))
    seen: list[tuple[int, int]] = []
    file = export_parquet(table, tmp_path / "t.parquet", progress=lambda *now: seen.append(now))
    assert len(seen) > 1
    assert seen[-1] == (200_000, 200_000)
    copy = import_parquet(file, progress=lambda *now: seen.append(now))
    assert seen[-1] == (200_000, 200_000)
    assert_same_rows(copy, table)


def test_a_serving_table(tmp_path: Path) -> None:
    config = TableConfig(name="t", segments=(Segment(dim=2, compressor=FixedR8()),), mode="serving")
    table = EmbeddingTable(config)
    table.assign(int64([1, 2]), float32([[0.5, -0.25], [0.1, 0.9]]))
    assert_same_rows(import_parquet(export_parquet(table, tmp_path / "t.parquet")), table)


def test_a_file_of_another_tool(tmp_path: Path) -> None:
    table = trained()
    lists = pa.array(table.entries().values.tolist(), pa.list_(pa.float32()))
    file = write(tmp_path / "t.parquet", values=lists)
    with pytest.raises(SchemaError, match="does not say what table it holds; give its configuration"):
        import_parquet(file)
    assert_same_rows(import_parquet(file, table.config), table)


def test_without_state_and_times(tmp_path: Path) -> None:
    file = write(tmp_path / "t.parquet", times=None, **{"0__norm": None, "1__global_step": None})
    rows = import_parquet(file, trained().config).lookup_entry([5])
    assert rows.values.tolist() == trained().lookup_entry([5]).values.tolist()
    assert rows.slots["0/norm"].tolist() == [[np.float32(0.1), np.float32(0.1)]]
    assert rows.times.tolist() == [0]


def test_weights_alone_for_another_optimizer(tmp_path: Path) -> None:
    file = export_parquet(trained(), tmp_path / "t.parquet")
    other = TableConfig(name="t", segments=(Segment(dim=3, optimizer=Adam()),))
    with pytest.raises(SchemaError, match=r"no column '0/m'.*import without optimizer state"):
        import_parquet(file, other)
    rows = import_parquet(file, other, optimizer_state=False).lookup_entry([5])
    assert rows.values.tolist() == trained().lookup_entry([5]).values.tolist()
    assert rows.slots["0/m"].tolist() == [[0, 0, 0]]


WRONG: dict[str, tuple[dict[str, pa.Array | None], str]] = {
    "half of the state": ({"0__norm": None}, "no column '0/norm'"),
    "no ids": ({"ids": None}, "no column 'ids'"),
    "no values": ({"values": None}, "no column 'values'; it has 0/norm"),
    "float ids": ({"ids": pa.array([1.0, 2.0])}, "column 'ids': expected int64"),
    "null ids": ({"ids": pa.array([1, None], pa.int64())}, "column 'ids': expected int64 without nulls"),
    "plain values": ({"values": pa.array([1.0, 2.0])}, "column 'values': expected lists of float"),
    "double values": ({"values": pa.array([[1.0] * 3] * 2)}, "column 'values': expected lists of float"),
    "other dim": ({"values": pa.array([[1.0] * 2] * 2, pa.list_(pa.float32(), 2))}, "expected 3 numbers in each list"),
    "ragged values": ({"values": pa.array([[1.0] * 2, [1.0] * 4], pa.list_(pa.float32()))}, "expected 3 numbers"),
    "null list": ({"values": pa.array([[1.0] * 3, None], pa.list_(pa.float32()))}, "without nulls"),
    "null element": ({"values": pa.array([[1.0] * 3, [1, 2, None]], pa.list_(pa.float32()))}, "expected 3 numbers"),
    "time before 1970": ({"times": pa.array([1, -1])}, "column 'times': expected seconds"),
    "time too late": ({"times": pa.array([1, 2**32])}, "column 'times': expected seconds"),
    "times as text": ({"times": pa.array(["now", "then"])}, "column 'times': expected int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_columns_that_do_not_fit(case: str, tmp_path: Path) -> None:
    changed, message = WRONG[case]
    file = write(tmp_path / "t.parquet", **changed)
    with pytest.raises(SchemaError, match=message):
        import_parquet(file, trained().config)


def test_the_seal_finds_what_the_pages_cannot(tmp_path: Path) -> None:
    """Parquet has no checksum over its footer: a whole row group can go missing without a trace."""
    file = export_parquet(trained(), tmp_path / "t.parquet")
    read = pq.read_table(file)
    stored = {key: value for key, value in pq.ParquetFile(file).metadata.metadata.items() if key != b"ARROW:schema"}
    pq.write_table(read.slice(0, 1).replace_schema_metadata(stored), tmp_path / "short.parquet")
    with pytest.raises(CorruptFileError, match="the rows are not those that were written"):
        import_parquet(tmp_path / "short.parquet", trained().config)


def test_pages_of_another_tool_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(trained().to_arrow(), file, write_page_checksum=True, **plain)
    data = bytearray(file.read_bytes())
    data[data.index((-7).to_bytes(8, "little", signed=True))] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"damaged, or not a Parquet file.*CRC"):
        import_parquet(file, trained().config)


def test_rows_chosen_with_another_tool_are_welcome(tmp_path: Path) -> None:
    read = pq.read_table(export_parquet(trained(), tmp_path / "t.parquet"))
    pq.write_table(read.filter(pa.compute.equal(read["ids"], 5)), tmp_path / "one.parquet")
    assert list(import_parquet(tmp_path / "one.parquet")) == [5]


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        import_parquet(tmp_path / "nowhere.parquet")
    with pytest.raises(CorruptFileError, match="is a directory"):
        import_parquet(tmp_path)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    with pytest.raises(CorruptFileError, match="damaged, or not a Parquet file"):
        import_parquet(tmp_path / "t.parquet")


def test_metadata_that_is_no_configuration(tmp_path: Path) -> None:
    table = pa.table(columns(trained())).replace_schema_metadata({b"monolith.table_config": b"{}"})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(CorruptFileError, match="its configuration cannot be read"):
        import_parquet(tmp_path / "t.parquet")
