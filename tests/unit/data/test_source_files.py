"""Danger: workers that disagree about the list of files, or a compressed, remote or headed file that is read differently."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from monolith.data import (
    Column,
    RecordFileSource,
    RecordHeader,
    RecordWriter,
    TFRecordSource,
    TFRecordWriter,
    data_source_key,
    expand_pattern,
    gen_patterns,
)
from monolith.data.sources.files import expand_paths
from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.proto import example_pb2, instance_pb2
from rows import as_lists

IDS = [Column(name="id", shape=(), field="line_id.rank")]


def record(i: int) -> example_pb2.Example:
    message = example_pb2.Example()
    message.line_id.rank = i
    return message


def plain_records(count: int) -> bytes:
    payloads = [record(i).SerializeToString() for i in range(count)]
    return b"".join(struct.pack("<Q", len(payload)) + payload for payload in payloads)


def read(path: str, compression: str = "infer", size: int = 7) -> list[int]:
    source = RecordFileSource(path, IDS, batch_size=size, compression=compression)
    return [i for batch in source for i in as_lists(batch)["id"]]


def hadoop_snappy(data: bytes, block: int, chunk: int) -> bytes:
    out = io.BytesIO()
    for begin in range(0, len(data), block):
        part = data[begin : begin + block]
        out.write(struct.pack(">I", len(part)))
        for at in range(0, len(part), chunk):
            packed = pa.compress(part[at : at + chunk], codec="snappy", asbytes=True)
            out.write(struct.pack(">I", len(packed)) + packed)
    return out.getvalue()


COMPRESSORS = {
    "none": lambda data: data,
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    "snappy": lambda data: hadoop_snappy(data, 1000, 300),
}
SUFFIXES = {"none": "", "gzip": ".gz", "zlib": ".zz", "zstd": ".zst", "snappy": ".snappy"}


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_compressions_by_suffix_and_by_name(tmp_path: Path, compression: str) -> None:
    data = COMPRESSORS[compression](plain_records(500))
    (tmp_path / f"rows{SUFFIXES[compression]}").write_bytes(data)
    (tmp_path / "named").write_bytes(data)
    assert read(f"{tmp_path}/rows{SUFFIXES[compression]}") == list(range(500))
    assert read(f"{tmp_path}/named", compression) == list(range(500))


def test_a_gzip_file_of_several_members(tmp_path: Path) -> None:
    data = plain_records(500)
    (tmp_path / "rows.gz").write_bytes(gzip.compress(data[:777]) + gzip.compress(data[777:]))
    assert read(f"{tmp_path}/rows.gz") == list(range(500))


def test_records_longer_than_a_piece_of_the_file(tmp_path: Path) -> None:
    # The file is read in pieces of 4 MiB.
    path = str(tmp_path / "rows")
    with RecordWriter(path) as writer:
        for i in range(4):
            message = record(i)
            message.named_feature.add(name="big").feature.bytes_value = bytes(3_000_000 * i)
            writer.write(message)
    assert read(path, size=2) == [0, 1, 2, 3]


def test_urls(tmp_path: Path) -> None:
    with TFRecordWriter("memory://test_source_files/a/1.tfrecord.gz") as writer:
        writer.write(b"")
    with fsspec.open("memory://test_source_files/a/2.records", "wb") as file:
        file.write(plain_records(3))
    assert read("memory://test_source_files/a/2.records") == [0, 1, 2]
    assert read("memory://test_source_files/a/*.records") == [0, 1, 2]
    (batch,) = TFRecordSource("memory://test_source_files/a/*.gz", [Column(name="x")], batch_size=3)
    assert as_lists(batch) == {"x": [[]]}
    with pytest.raises(InvalidArgumentError, match="nosuchprotocol"):
        read("nosuchprotocol://x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot write"):
        TFRecordWriter(str(tmp_path / "file" / "rows"))
    with pytest.raises(InvalidArgumentError, match=r"gzip \(\.gz\)"):
        TFRecordWriter(str(tmp_path / "rows.snappy"))


def test_files_are_sorted_and_folders_are_searched_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a/1", "_SUCCESS", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    expected = [f"{tmp_path}/{name}" for name in ("a/1", "b/10", "b/2")]
    assert expand_paths(str(tmp_path)) == expected
    assert expand_paths([f"{tmp_path}/b/*", f"{tmp_path}/a/1"]) == [*expected[1:], expected[0]]


def test_patterns() -> None:
    assert expand_pattern("plain") == ["plain"]
    assert expand_pattern("p_{DATE(20201231,20210101)}/h_{INT(9,10)}") == [
        "p_20201231/h_9",
        "p_20201231/h_10",
        "p_20210101/h_9",
        "p_20210101/h_10",
    ]
    assert expand_pattern("{DATE(2020123123,2021010101)}") == ["2020123123", "2021010100", "2021010101"]
    assert len(expand_pattern("{DATE(20201120,20201210)}")) == 21
    assert expand_pattern("{INT(5,4)}") == []
    for wrong in ("{DATE(2020,2021)}", "{DATE(20201301,20201302)}", "{INT(0,9999999)}"):
        with pytest.raises(InvalidArgumentError):
            expand_pattern(wrong)


def test_only_the_files_of_a_pattern_that_exist_count(tmp_path: Path) -> None:
    for day in (20240228, 20240301):
        (tmp_path / f"{day}").write_bytes(b"")
    assert expand_paths(f"{tmp_path}/{{DATE(20240227,20240302)}}") == [f"{tmp_path}/20240228", f"{tmp_path}/20240301"]
    with pytest.raises(InvalidArgumentError, match="no file matches"):
        expand_paths(f"{tmp_path}/{{INT(1,2)}}")


def test_generated_patterns_end_before_their_end() -> None:
    days = gen_patterns("path/", 20220901, 0, 20220920, 0)
    assert (len(days), days[0], days[-1]) == (19, "path/20220901/*", "path/20220919/*")
    hours = gen_patterns("path", 20220901, 22, 20220902, 1, is_hourly=True, wildcard="*.gz")
    assert hours == ["path/20220901/22*.gz", "path/20220901/23*.gz", "path/20220902/00*.gz"]


@pytest.mark.parametrize(
    ("header", "bytes_before"),
    [
        (RecordHeader(), 0),
        (RecordHeader(sort_id=True), 8),
        (RecordHeader(kafka_dump=True), 8),
        (RecordHeader(kafka_dump_prefix=True), 16),
        (RecordHeader(kafka_dump_prefix=True, sort_id=True, kafka_dump=True), 32),
    ],
)
def test_headers_as_written_and_read(tmp_path: Path, header: RecordHeader, bytes_before: int) -> None:
    path = str(tmp_path / "rows")
    with RecordWriter(path, header=header) as writer:
        for i in range(5):
            writer.write(record(i))
    size = len(record(0).SerializeToString()) + 8 + bytes_before
    assert len(Path(path).read_bytes()) == 5 * size
    (batch,) = RecordFileSource(path, IDS, batch_size=5, header=header)
    assert as_lists(batch)["id"] == [0, 1, 2, 3, 4]


def test_a_lagrangex_file_has_both_kinds_of_messages_and_their_key(tmp_path: Path) -> None:
    path, header = str(tmp_path / "rows"), RecordHeader(lagrangex=True)
    key = data_source_key("flow")
    instance = instance_pb2.Instance(fid=[3 << 54 | 1], data_source_key=1)
    example = example_pb2.Example(data_source_key=1)
    example.named_feature.add(name="fc_slot_3").feature.fid_v1_list.value.append(3 << 54 | 2)
    with RecordWriter(path, header=header) as writer:
        writer.write(instance, is_instance=True, data_source_key=key)
        writer.write(example, data_source_key=256)
        with pytest.raises(InvalidArgumentError, match="low 8 zero"):
            writer.write(example, data_source_key=1)
    columns = [Column(name="fc_slot_3"), Column(name="key", field="data_source_key", shape=())]
    (batch,) = RecordFileSource(path, columns, batch_size=5, header=header)
    assert as_lists(batch) == {"fc_slot_3": [[3 << 48 | 1], [3 << 48 | 2]], "key": [key, 256]}
    # The header of a data flow: 0, then the low three bytes of Java's hash code of its name.
    assert struct.pack("<I", key) == b"\0" + struct.pack("<I", 3146030)[:3]
    with pytest.raises(ConfigError, match="lagrangex excludes"):
        RecordHeader(lagrangex=True, sort_id=True)
    with pytest.raises(InvalidArgumentError, match="no ExampleBatch"):
        RecordFileSource(path, columns, batch_size=5, header=header, format="example_batch")


def test_standard_input_gives_batches_while_it_is_still_open() -> None:
    script = (
        "from monolith.data import *\n"
        "columns = [Column(name='id', shape=(), field='line_id.rank')]\n"
        "for batch in RecordFileSource('-', columns, batch_size=2):\n"
        "    print(batch['id'].tolist(), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        data = plain_records(5)
        process.stdin.write(data[: len(data) // 2 + 3])
        process.stdin.flush()
        assert process.stdout.readline() == b"[0, 1]\n"
        process.stdin.write(data[len(data) // 2 + 3 :])
        process.stdin.close()
        assert process.stdout.read() == b"[2, 3]\n[4]\n"
    assert process.returncode == 0


def test_standard_input_cannot_be_resumed_nor_mixed() -> None:
    source = RecordFileSource("-", IDS, batch_size=2)
    state = source.state_dict()
    source.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="standard input"):
        source.load_state_dict({**state, "url": "-", "offset": 7})
    with pytest.raises(InvalidArgumentError, match="standard input"):
        RecordFileSource(["-", "x"], IDS, batch_size=2)


def test_options_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    path = str(tmp_path / "x")
    for wrong in ({"compression": "rar"}, {"batch_size": 0}, {"max_corrupt": -1}, {"format": "xml"}):
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            RecordFileSource(path, IDS, **{"batch_size": 2, **wrong})
    with pytest.raises(InvalidArgumentError, match="at least one"):
        RecordFileSource(path, [], batch_size=2)
    with pytest.raises(InvalidArgumentError, match="named 'id'"):
        RecordFileSource(path, IDS * 2, batch_size=2)
    for fields in (
        {"name": ""},
        {"name": "x", "shape": (0,)},
        {"name": "x", "shape": (), "nested": True},
        {"name": "x", "dtype": "bytes", "shape": ()},
        {"name": "x", "default": 1},
        {"name": "x", "shape": (), "default": 0.5},
        {"name": "x", "dtype": "int8"},
        {"name": "x", "shap": ()},
    ):
        with pytest.raises(ConfigError):
            Column(**fields)
