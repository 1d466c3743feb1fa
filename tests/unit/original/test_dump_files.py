"""Danger: a dump of which a file is missing, old or foreign, imported as if it were whole."""

from __future__ import annotations

import struct
from pathlib import Path

import fsspec
import numpy as np
import pytest

from comparison import float32, int64
from dumps import assert_same_rows, entry, snappy, tfrecords, write_dump, write_multi_dump
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.original import dump_counts, export_dump, export_multi_dump, import_dump, import_multi_dump
from monolith.proto import table_dump_pb2
from monolith.table import AdmissionFilter, SlidingAdmission
from monolith.testing import sgd_table_config

CONFIG = sgd_table_config(1)


def ids_of(table: EmbeddingTable) -> list[int]:
    return sorted(table)


def test_all_parts_are_read_and_other_files_are_not(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1])], [], [entry(2, [2]), entry(3, [3])])
    for stray in ("t-00000-of-00003-tmp-12345", "t-x-00000-of-00001", "t.meta-00000-of-00009", "t-0-of-3", "other"):
        (tmp_path / stray).write_bytes(b"rubbish")
    assert ids_of(import_dump(prefix, CONFIG)) == [1, 2, 3]


def test_the_last_of_equal_ids_counts(tmp_path: Path) -> None:
    first = write_dump(tmp_path / "a", [entry(1, [1]), entry(1, [2])], [entry(1, [3]), entry(2, [4])])
    second = write_dump(tmp_path / "b", [entry(2, [5])])
    assert import_dump([first, second], CONFIG).lookup([1, 2]).tolist() == [[3], [5]]
    assert import_dump([second, first], CONFIG).lookup([1, 2]).tolist() == [[3], [4]]


def test_no_dump_at_all(tmp_path: Path) -> None:
    for prefix in (str(tmp_path / "t"), str(tmp_path / "nowhere" / "t")):
        with pytest.raises(InvalidArgumentError, match=r"no dump of that name; expected t-00000-of-00001"):
            import_dump(prefix, CONFIG)


def test_a_missing_part(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1])], [entry(2, [2])])
    (tmp_path / "t-00001-of-00002").unlink()
    with pytest.raises(CorruptFileError, match=r"expected 2 parts, found 1: t-00001-of-00002 is missing"):
        import_dump(prefix, CONFIG)


def test_parts_of_two_dumps(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1])], [entry(2, [2])])
    write_dump(tmp_path / "t", [entry(3, [3])])
    with pytest.raises(CorruptFileError, match=r"dumps with 1 and 2 parts are in one folder"):
        import_dump(prefix, CONFIG)


@pytest.mark.parametrize(
    "name", ["t-00001-of-00001", "t-00000-of-999999999", "t-000000000-of-00001", "t-00000-of-00000"]
)
def test_numbers_that_make_no_sense(name: str, tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1])])
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"in one folder|two files for one part|expected 1 parts, found 2"):
        import_dump(prefix, CONFIG)


def test_a_huge_total_is_not_counted_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "t-000000000-of-999999999").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"expected 999999999 parts, found 1: t-00001-of-999999999 is missing"):
        import_dump(str(tmp_path / "t"), CONFIG)


def test_a_part_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "t-00000-of-00001").mkdir()
    with pytest.raises(StorageError, match=r"t-00000-of-00001: cannot read"):
        import_dump(str(tmp_path / "t"), CONFIG)


def test_urls_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dump(tmp_path / "t", [entry(1, [1])])
    with fsspec.open("memory://dumps/t-00000-of-00001", "wb") as file:
        file.write(tfrecords([entry(2, [2])]))
    monkeypatch.chdir(tmp_path)
    for prefix, ids in (("t", [1]), ("memory://dumps/t", [2]), (tmp_path.as_uri() + "/t", [1])):
        assert ids_of(import_dump(prefix, CONFIG)) == ids


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    prefix = write_dump(tmp_path / "t", [entry(1, [1])], [entry(2, [2])])
    seen: list[tuple[int, int]] = []
    import_dump(prefix, CONFIG, progress=lambda done, total: seen.append((done, total)))
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert seen[-1] == (size, size)


def two_configs() -> dict[str, TableConfig]:
    return {"a": sgd_table_config(1, name="a"), "b": sgd_table_config(2, name="b")}


def test_a_multi_table_dump(tmp_path: Path) -> None:
    prefix = write_multi_dump(
        tmp_path / "all",
        {"a": [entry(1, [1]), entry(2, [2])], "skipped": [entry(9, [1, 2, 3])], "b": [entry(1, [3, 4])]},
        {"a": [], "skipped": [], "b": [entry(5, [5, 6], time=7)]},
    )
    tables = import_multi_dump(prefix, two_configs())
    assert tables["a"].lookup([1, 2]).tolist() == [[1], [2]]
    assert tables["b"].lookup([1, 5]).tolist() == [[3, 4], [5, 6]]
    assert [len(table) for table in tables.values()] == [2, 2]
    assert tables["b"].stats().max_event_time == 7
    assert dump_counts(prefix) == {"a": 2, "skipped": 1, "b": 2}


def test_dumps_of_several_servers_become_one_table(tmp_path: Path) -> None:
    prefixes = [write_multi_dump(tmp_path / f"ps{i}", {"a": [entry(i, [i])], "b": []}) for i in range(3)]
    assert ids_of(import_multi_dump(prefixes, two_configs())["a"]) == [0, 1, 2]


def test_the_filter_of_a_new_table_counts_only_what_comes_later(tmp_path: Path) -> None:
    admission = AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=1))
    single = import_dump(write_dump(tmp_path / "t", [entry(1, [1])]), CONFIG, admission=admission)
    prefix = write_multi_dump(tmp_path / "all", {"a": [entry(1, [1])], "b": []})
    multi = import_multi_dump(prefix, two_configs(), admission={"a": admission})
    assert (single.admission, multi["a"].admission, multi["b"].admission) == (admission, admission, None)
    assert (ids_of(single), ids_of(multi["a"])) == ([1], [1])
    single.apply_gradients(int64([1, 2]), float32([[1], [1]]))
    assert ids_of(single) == [1]


def test_a_table_the_dump_does_not_have(tmp_path: Path) -> None:
    prefix = write_multi_dump(tmp_path / "all", {"a": [], "c": []})
    with pytest.raises(InvalidArgumentError, match=r"no table 'b'; it has 'a', 'c'"):
        import_multi_dump(prefix, two_configs())


@pytest.mark.parametrize(("claimed", "message"), [(1, "more rows than"), (3, "1 rows fewer"), (2**63, "rows fewer")])
def test_the_counts_must_be_right(claimed: int, message: str, tmp_path: Path) -> None:
    prefix = write_multi_dump(tmp_path / "all", {"a": [entry(1, [1]), entry(2, [2])]})
    meta = table_dump_pb2.MultiHashTableMetadata(table_name="a", num_entries=claimed)
    (tmp_path / "all.meta-00000-of-00001").write_bytes(tfrecords([meta]))
    with pytest.raises(CorruptFileError, match=message):
        import_multi_dump(prefix, {"a": CONFIG})


def test_meta_files_must_be_there_and_as_many(tmp_path: Path) -> None:
    prefix = write_multi_dump(tmp_path / "all", {"a": [entry(1, [1])]}, {"a": [entry(2, [2])]})
    (tmp_path / "all.meta-00001-of-00002").unlink()
    (tmp_path / "all.meta-00000-of-00002").rename(tmp_path / "all.meta-00000-of-00001")
    with pytest.raises(CorruptFileError, match=r"2 files of rows, but 1 \.meta files"):
        import_multi_dump(prefix, {"a": CONFIG})
    (tmp_path / "all.meta-00000-of-00001").unlink()
    with pytest.raises(InvalidArgumentError, match=r"all\.meta: there is no dump of that name"):
        import_multi_dump(prefix, {"a": CONFIG})


def test_a_record_larger_than_a_block(tmp_path: Path) -> None:
    """TensorFlow reads blocks of up to 256 KiB, however long a record is."""
    table = EmbeddingTable(TableConfig(name="wide", segments=(Segment(dim=60_000),)))
    table.reinitialize([1, 2, 3])
    data, _ = export_multi_dump([table], str(tmp_path / "wide"))
    packed, sizes = data.read_bytes(), []
    while packed:
        (length,) = struct.unpack(">I", packed[:4])
        # Snappy data begins with its plain size, here always a varint of 3 bytes.
        sizes.append(packed[4] & 0x7F | (packed[5] & 0x7F) << 7 | packed[6] << 14)
        packed = packed[4 + length :]
    assert sum(sizes) > 3 * 60_000 * 10
    assert max(sizes) == 256 << 10
    assert_same_rows(import_multi_dump(str(tmp_path / "wide"), {"wide": table.config})["wide"], table)


def test_a_stream_cut_into_tiny_blocks(tmp_path: Path) -> None:
    prefix = write_multi_dump(tmp_path / "all", {"a": [entry(1, [1]), entry(2, [2])]})
    plain = tfrecords([entry(1, [1]), entry(2, [2])])
    (tmp_path / "all-00000-of-00001").write_bytes(snappy(plain, block=1))
    assert ids_of(import_multi_dump(prefix, {"a": CONFIG})["a"]) == [1, 2]


def test_an_export_does_not_mix_with_an_older_one(tmp_path: Path) -> None:
    table = EmbeddingTable(CONFIG)
    table.assign(int64([1]), float32([[1]]))
    export_dump(table, str(tmp_path / "new" / "t"), shards=2)
    with pytest.raises(InvalidArgumentError, match="there is a dump of that name"):
        export_dump(table, str(tmp_path / "new" / "t"), shards=3)
    export_dump(table, str(tmp_path / "new" / "t-x"))
    assert ids_of(import_dump(str(tmp_path / "new" / "t"), CONFIG)) == [1]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    table = EmbeddingTable(CONFIG)
    table.assign(int64(range(100_000)), float32(np.zeros((100_000, 1))))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dump(table, str(tmp_path / "t"), progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot write"):
        export_dump(table, str(tmp_path / "file" / "t"))


def test_names_of_exported_tables_differ(tmp_path: Path) -> None:
    table = EmbeddingTable(CONFIG)
    with pytest.raises(InvalidArgumentError, match="expected different names"):
        export_multi_dump([table, table], str(tmp_path / "all"))
    with pytest.raises(InvalidArgumentError, match="shards: expected 1"):
        export_dump(table, str(tmp_path / "t"), shards=0)
