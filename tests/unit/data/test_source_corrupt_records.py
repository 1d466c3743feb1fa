"""Danger: one damaged record that stops a month of training, or a thousand of them that go unnoticed."""

from __future__ import annotations

import gzip
import logging
import random
from pathlib import Path

import pytest

from monolith.data import (
    Column,
    CsvSource,
    RecordFileSource,
    RecordHeader,
    RecordWriter,
    TFRecordSource,
    TFRecordWriter,
    parse_records,
)
from monolith.errors import CorruptFileError, InvalidArgumentError, MonolithError, SchemaError, StorageError
from monolith.proto import example_pb2, tf_example_pb2
from rows import as_lists

IDS = [Column(name="id", shape=())]


def example(i: int) -> tf_example_pb2.Example:
    message = tf_example_pb2.Example()
    message.features.feature["id"].int64_list.value.append(i)
    return message


def write(path: Path, count: int = 10) -> Path:
    with TFRecordWriter(str(path)) as writer:
        for i in range(count):
            writer.write(example(i))
    return path


def ids(source: TFRecordSource | RecordFileSource | CsvSource) -> list[int]:
    return [i for batch in source for i in as_lists(batch)["id"]]


def record_size() -> int:
    return 16 + len(example(0).SerializeToString())


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(bytes(data))


def test_a_damaged_payload_is_skipped_within_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "rows")
    damage(path, 3 * record_size() + 14)
    damage(path, 5 * record_size() + 14)
    with pytest.raises(
        CorruptFileError, match=rf"{path}: record at byte {3 * record_size()}: the checksum.*max_corrupt"
    ):
        ids(TFRecordSource(str(path), IDS, batch_size=4))
    with pytest.raises(CorruptFileError, match=rf"record at byte {5 * record_size()}"):
        ids(TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=1))
    source = TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="monolith"):
        assert [as_lists(batch)["id"] for batch in source] == [[0, 1, 2, 4], [6, 7, 8, 9]]
    assert caplog.text.count("skipped") == 2


def test_the_count_goes_on_after_resuming(tmp_path: Path) -> None:
    path = write(tmp_path / "rows")
    damage(path, 1 * record_size() + 14)
    damage(path, 8 * record_size() + 14)
    source = TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=1)
    next(iter(source))
    assert source.skipped == 1
    again = TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=1)
    again.load_state_dict(source.state_dict())
    with pytest.raises(CorruptFileError, match="2 bad records, max_corrupt is 1"):
        ids(again)


def test_a_damaged_length_costs_the_rest_of_its_file_only(tmp_path: Path) -> None:
    damage(write(tmp_path / "0"), 4 * record_size() + 1)
    write(tmp_path / "1", 2)
    assert ids(TFRecordSource(str(tmp_path), IDS, batch_size=4, max_corrupt=1)) == [0, 1, 2, 3, 0, 1]
    with pytest.raises(CorruptFileError, match="length is wrong"):
        ids(TFRecordSource(str(tmp_path), IDS, batch_size=4))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zz"])
def test_a_truncated_file_gives_its_whole_records_and_an_error(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", 1000)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptFileError, match=r"rows"):
        ids(TFRecordSource(str(path), IDS, batch_size=4))
    found = ids(TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=1))
    assert found == list(range(len(found)))
    # Of compressed records the last bytes are those of a checksum, and little more.
    assert len(found) > 990


def test_bytes_that_are_not_compressed_as_the_name_says(tmp_path: Path) -> None:
    for suffix in ("gz", "zz", "zst", "snappy"):
        path = tmp_path / f"rows.{suffix}"
        path.write_bytes(b"certainly not compressed data " * 10)
        with pytest.raises(CorruptFileError, match=str(path)):
            ids(TFRecordSource(str(path), IDS, batch_size=4))


def test_random_damage_never_gives_a_row_that_was_not_written(tmp_path: Path) -> None:
    original = write(tmp_path / "good", 40).read_bytes()
    chance = random.Random(3)
    path = tmp_path / "bad"
    for _ in range(300):
        data = bytearray(original)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data[: chance.randrange(len(data)) if chance.random() < 0.3 else None]))
        found = ids(TFRecordSource(str(path), IDS, batch_size=7, max_corrupt=100))
        assert found == sorted(set(found))
        assert set(found) <= set(range(40))


def test_record_files_have_no_checksum_but_their_damage_is_an_error_of_ours(tmp_path: Path) -> None:
    header = RecordHeader(sort_id=True)
    path = tmp_path / "records"
    with RecordWriter(str(path), header=header) as writer:
        for i in range(30):
            message = example_pb2.Example(label=[i])
            message.named_feature.add(name="id").feature.int64_value = i
            writer.write(message)
    original = path.read_bytes()
    chance = random.Random(4)
    failures = 0
    for _ in range(300):
        data = bytearray(original)
        data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(bytes(data))
        try:
            ids(RecordFileSource(str(path), IDS, batch_size=7, header=header))
        except MonolithError:
            failures += 1
    assert failures > 100


def test_a_record_longer_than_allowed_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows")
    with pytest.raises(CorruptFileError, match="longer than max_record_bytes"):
        ids(TFRecordSource(str(path), IDS, batch_size=4, max_record_bytes=4))


def test_the_mark_of_an_unfinished_file(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes((0xFEFEFEFE).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CorruptFileError, match="0xfefefefe"):
        ids(RecordFileSource(str(path), IDS, batch_size=4))


def feature(**kind: object) -> bytes:
    message = example_pb2.Example()
    target = message.named_feature.add(name="f").feature
    for name, value in kind.items():
        getattr(target, name).value.extend(value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("record", "column", "says"),
    [
        (feature(float_list=[1.0]), Column(name="f"), "has a float_list, the column is int64"),
        (feature(int64_list=[1]), Column(name="f", dtype="float32"), "has a int64_list, the column is float32"),
        (feature(bytes_list=[b"x"]), Column(name="f", dtype="float64"), "has a bytes_list, the column is float64"),
        (feature(int64_list=[1]), Column(name="f", dtype="bytes"), "has a int64_list, the column is bytes"),
        (feature(bytes_list=[b"x", b"y"]), Column(name="f", dtype="bytes"), "has 2 strings, expected 1"),
        (feature(int64_list=[1, 2, 3]), Column(name="f", shape=(2,)), "has 3 values, expected 2"),
        (feature(int64_list=[1]), Column(name="f", nested=True), "the column is nested"),
        (feature(int64_list=[]), Column(name="f", shape=()), "'f' is missing; a feature may have a default"),
        (b"", Column(name="f", shape=()), "'f' is missing; a feature may have a default"),
        (feature(int64_list=[1]) * 2, Column(name="f"), "'f' is there twice"),
    ],
)
def test_records_that_do_not_fit_the_columns(record: bytes, column: Column, says: str) -> None:
    with pytest.raises(SchemaError, match=rf"records\[1\]: .*{says}"):
        parse_records([fitting(column), record], [column])


def fitting(column: Column) -> bytes:
    """A record that has the column as it should be."""
    if column.nested:
        message = example_pb2.Example()
        message.named_feature.add(name="f").feature.int64_lists.list.add()
        return message.SerializeToString()
    size = 2 if column.shape == (2,) else 1
    kinds = {"int64": "int64_list", "float32": "float_list", "float64": "double_list", "bytes": "bytes_list"}
    return feature(**{kinds[column.dtype]: [b"x" if column.dtype == "bytes" else 1] * size})


def test_rows_that_do_not_fit_are_skipped_like_damaged_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with TFRecordWriter(str(path)) as writer:
        for i in range(6):
            message = example(i)
            if i == 2:
                message.features.feature["id"].float_list.value.append(0.5)
            if i == 4:
                message.features.feature["id"].int64_list.value.append(9)
            writer.write(message)
    assert ids(TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=2)) == [0, 1, 3, 5]
    with pytest.raises(SchemaError, match="has 2 values, expected 1"):
        ids(TFRecordSource(str(path), IDS, batch_size=4, max_corrupt=1))


def test_csv_rows_with_other_fields_or_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,x\n1,a\n2,b,c\nthree,d\n9223372036854775807,e\n99999999999999999999,f\n5\n6,g\n")
    source = CsvSource(str(path), IDS, batch_size=1, max_corrupt=4)
    assert ids(source) == [1, 2**63 - 1, 6]
    for limit, error in ((3, SchemaError), (1, CorruptFileError), (0, CorruptFileError)):
        with pytest.raises(error, match=r"rows\.csv"):
            ids(CsvSource(str(path), IDS, batch_size=1, max_corrupt=limit))
    whole = [as_lists(batch) for batch in source]
    for done, _ in enumerate(source, 1):
        again = CsvSource(str(path), IDS, batch_size=1, max_corrupt=4)
        again.load_state_dict(source.state_dict())
        assert [as_lists(batch) for batch in again] == whole[done:]


def test_csv_in_a_damaged_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"id\n" + b"1\n" * 100_000)[:-20])
    with pytest.raises(CorruptFileError, match=r"rows\.csv\.gz"):
        ids(CsvSource(str(path), IDS, batch_size=1000))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing"):
        ids(TFRecordSource(str(tmp_path / "nothing"), IDS, batch_size=1))
    with pytest.raises(InvalidArgumentError, match="no file matches"):
        TFRecordSource(str(tmp_path / "*.tfrecord"), IDS, batch_size=1)
