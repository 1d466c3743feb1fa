"""Danger: a job that resumes and sees a row twice, or never. Every source continues with exactly the next batch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from monolith.data import (
    Column,
    CsvSource,
    IteratorSource,
    ParquetSource,
    RecordFileSource,
    RecordHeader,
    RecordWriter,
    Source,
    TFRecordSource,
    TFRecordWriter,
)
from monolith.errors import InvalidArgumentError
from monolith.proto import example_pb2, tf_example_pb2
from rows import as_lists

COLUMNS = [Column(name="id", shape=()), Column(name="tags")]
ROWS = [{"id": i, "tags": [i * 10 + k for k in range(i % 4)]} for i in range(101)]
PARTS = [ROWS[:30], [], ROWS[30:37], ROWS[37:]]
HEADER = RecordHeader(kafka_dump_prefix=True, sort_id=True, kafka_dump=True)


def tfrecord(folder: Path, suffix: str) -> Source:
    for part, rows in enumerate(PARTS):
        with TFRecordWriter(f"{folder}/{part}.tfrecord{suffix}") as writer:
            for row in rows:
                example = tf_example_pb2.Example()
                example.features.feature["id"].int64_list.value.append(row["id"])
                example.features.feature["tags"].int64_list.value.extend(row["tags"])
                writer.write(example)
    return TFRecordSource(f"{folder}/*.tfrecord{suffix}", COLUMNS, batch_size=8)


def example(row: dict[str, Any]) -> example_pb2.Example:
    message = example_pb2.Example()
    message.named_feature.add(name="id").feature.int64_value = row["id"]
    message.named_feature.add(name="tags").feature.fid_v2_list.value.extend(row["tags"])
    return message


def record_file(folder: Path) -> Source:
    for part, rows in enumerate(PARTS):
        with RecordWriter(f"{folder}/{part}.records", header=HEADER) as writer:
            for row in rows:
                writer.write(example(row))
    return RecordFileSource(folder.as_uri(), COLUMNS, batch_size=8, header=HEADER)


def example_batch(folder: Path) -> Source:
    for part, rows in enumerate(PARTS):
        with RecordWriter(f"{folder}/{part}.records") as writer:
            for begin in range(0, len(rows), 13):
                batch = example_pb2.ExampleBatch(batch_size=len(rows[begin : begin + 13]))
                ids, tags = (batch.named_feature_list.add(name=name) for name in ("id", "tags"))
                for row in rows[begin : begin + 13]:
                    ids.feature.add().int64_value = row["id"]
                    tags.feature.add().fid_v2_list.value.extend(row["tags"])
                writer.write(batch)
    return RecordFileSource(str(folder), COLUMNS, batch_size=8, format="example_batch")


def parquet(folder: Path) -> Source:
    for part, rows in enumerate(PARTS):
        schema = pa.schema([("id", pa.int32()), ("tags", pa.list_(pa.int64()))])
        pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"{part}.parquet", row_group_size=11)
    return ParquetSource(str(folder), COLUMNS, batch_size=8)


def csv(folder: Path) -> Source:
    for part, rows in enumerate(PARTS):
        lines = [f"{row['id']},{'|'.join(map(str, row['tags']))}\n" for row in rows]
        (folder / f"{part}.csv").write_text("id,tags\n" + "".join(lines))
    return CsvSource(str(folder), COLUMNS, batch_size=8)


MAKERS: dict[str, Callable[[Path], Source]] = {
    "tfrecord": lambda folder: tfrecord(folder, ""),
    "tfrecord gzip": lambda folder: tfrecord(folder, ".gz"),
    "tfrecord zlib": lambda folder: tfrecord(folder, ".zz"),
    "record file": record_file,
    "example batch": example_batch,
    "parquet": parquet,
    "csv": csv,
    "rows": lambda _: IteratorSource(ROWS, COLUMNS, batch_size=8),
    "batches": lambda _: IteratorSource(lambda: iter(IteratorSource(ROWS, COLUMNS, batch_size=8))),
}


@pytest.fixture(params=MAKERS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return MAKERS[request.param](tmp_path)


def rows_of(batches: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for batch in map(as_lists, batches):
        rows += [{"id": i, "tags": tags} for i, tags in zip(batch["id"], batch["tags"], strict=True)]
    return rows


def test_all_rows_in_order_in_full_batches_every_epoch(source: Source) -> None:
    for _ in range(2):
        batches = list(source)
        assert rows_of(batches) == ROWS
        assert [len(batch["id"]) for batch in batches] == [8] * 12 + [5]


def test_a_new_source_with_the_saved_state_continues_with_the_next_batch(source: Source) -> None:
    whole = [as_lists(batch) for batch in source]
    fresh = source.shard(0, 1)
    for count, _ in enumerate(source, 1):
        fresh.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert [as_lists(batch) for batch in fresh] == whole[count:]


def test_a_job_that_is_stopped_after_every_batch_sees_every_row_once(source: Source) -> None:
    batches, state = [], source.state_dict()
    while len(batches) < 13:
        source = source.shard(0, 1)
        source.load_state_dict(state)
        batches.append(next(iter(source)))
        state = source.state_dict()
    assert rows_of(batches) == ROWS


def test_iteration_goes_on_where_the_last_one_stopped(source: Source) -> None:
    first = next(iter(source))
    assert rows_of([first, *source]) == ROWS


@pytest.mark.parametrize("count", [2, 3, 7])
def test_shards_have_every_row_once_and_resume_too(source: Source, count: int) -> None:
    seen = []
    for index in range(count):
        shard = source.shard(index, count)
        batches = [as_lists(batch) for batch in shard]
        seen += [i for batch in batches for i in batch["id"]]
        again = source.shard(index, count)
        for done, _ in enumerate(shard, 1):
            again.load_state_dict(shard.state_dict())
            assert [as_lists(batch) for batch in again] == batches[done:]
    assert sorted(seen) == list(range(len(ROWS)))


def test_a_shard_of_a_shard(source: Source) -> None:
    parts = [source.shard(i, 2).shard(j, 2) for i in range(2) for j in range(2)]
    assert sorted(row["id"] for part in parts for row in rows_of(list(part))) == list(range(len(ROWS)))


def test_a_state_that_cannot_be_this_source_s_is_refused(source: Source) -> None:
    state = source.state_dict()
    chance = random.Random(0)
    key = chance.choice([key for key in state if isinstance(state[key], int) and not key.startswith("shard")])
    for wrong in ({}, {**state, "extra": 1}, {**state, key: "7"}, {**state, key: -1}, {**state, "shard_count": 2}):
        with pytest.raises(InvalidArgumentError, match="state"):
            source.load_state_dict(wrong)
    with pytest.raises(InvalidArgumentError, match="shard"):
        source.shard(2, 2)


def test_a_state_of_other_files_is_refused(tmp_path: Path) -> None:
    source = record_file(tmp_path)
    next(iter(source))
    state = source.state_dict()
    (tmp_path / "0.records").rename(tmp_path / "9.records")
    with pytest.raises(InvalidArgumentError, match="list of files has changed"):
        RecordFileSource(tmp_path.as_uri(), COLUMNS, batch_size=8, header=HEADER).load_state_dict(state)


def test_the_last_batch_is_dropped_when_asked(tmp_path: Path) -> None:
    record_file(tmp_path)
    source = RecordFileSource(str(tmp_path), COLUMNS, batch_size=8, header=HEADER, drop_remainder=True)
    for _ in range(2):
        assert [len(batch["id"]) for batch in source] == [8] * 12
