"""Compare reading rows into batches with what a PyTorch user would otherwise use.

python benchmarks/reading.py                 every comparison; needs `pip install tfrecord` for the TFRecord one
python benchmarks/reading.py --rows 20000    a short run

Criteo-like rows: 13 floats, 26 ids, one label; and the same with ids in lists of 0 to 8. Both sides alternate on the same
file, which is in the page cache. A ratio is the median of the ratios of the turns. Before timing, the values of both sides are
compared. For TFRecord the peer returns one dict per row and no batch; ours returns a batch of tensors and verifies checksums.
For Parquet the peer is pyarrow alone, which reads the same columns and does nothing with them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from monolith.data import Column, ParquetSource, TFRecordSource, TFRecordWriter
from monolith.features import Ragged
from monolith.proto import tf_example_pb2

FLOATS = [f"dense_{i}" for i in range(13)]
IDS = [f"id_{i}" for i in range(26)]
Read = Callable[[], float]


def make_table(rows: int, *, lists: bool) -> pa.Table:
    random = np.random.default_rng(1)
    columns = {name: pa.array(random.random(rows, dtype=np.float32)) for name in FLOATS}
    for name in IDS:
        if lists:
            splits = np.concatenate([[0], random.integers(0, 9, rows).cumsum()]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(splits, random.integers(0, 2**62, splits[-1]))
        else:
            columns[name] = pa.array(random.integers(0, 2**62, rows))
    columns["label"] = pa.array(random.integers(0, 2, rows).astype(np.float32))
    return pa.table(columns)


def schema(*, lists: bool) -> list[Column]:
    floats = [Column(name=name, dtype="float32", shape=()) for name in (*FLOATS, "label")]
    return floats + [Column(name=name, shape=None if lists else ()) for name in IDS]


def write_tfrecord(table: pa.Table, path: str) -> None:
    with TFRecordWriter(path) as writer:
        for row in table.to_pylist():
            example = tf_example_pb2.Example()
            for name, value in row.items():
                feature = example.features.feature[name]
                if name in IDS:
                    feature.int64_list.value.extend(value if isinstance(value, list) else [value])
                else:
                    feature.float_list.value.append(value)
            writer.write(example)


def ours_tfrecord(path: str, *, lists: bool) -> Read:
    def read() -> float:
        total = 0.0
        for batch in TFRecordSource(path, schema(lists=lists), batch_size=2048):
            column = batch["id_0"]
            total += float((column.values if isinstance(column, Ragged) else column).double().sum())
        return total

    return read


def peer_tfrecord(path: str) -> Read:
    from tfrecord.reader import tfrecord_loader

    description = {**dict.fromkeys(IDS, "int"), **dict.fromkeys((*FLOATS, "label"), "float")}

    def read() -> float:
        return sum(float(row["id_0"].astype(np.float64).sum()) for row in tfrecord_loader(path, None, description))

    return read


def ours_parquet(path: str, *, lists: bool) -> Read:
    def read() -> float:
        return float(sum(len(batch["label"]) for batch in ParquetSource(path, schema(lists=lists), batch_size=2048)))

    return read


def peer_parquet(path: str) -> Read:
    def read() -> float:
        file = pq.ParquetFile(path)
        return float(sum(batch.num_rows for batch in file.iter_batches(2048, columns=[*FLOATS, "label", *IDS])))

    return read


def peer_parquet_groups(path: str) -> Read:
    def read() -> float:
        file = pq.ParquetFile(path)
        groups = range(file.num_row_groups)
        return float(sum(file.read_row_group(i, columns=[*FLOATS, "label", *IDS]).num_rows for i in groups))

    return read


def contest(name: str, ours: Read, theirs: Read, *, rows: int, turns: int, bar: str) -> None:
    assert np.isclose(ours(), theirs(), rtol=1e-9), f"{name}: the two sides read different values"
    times: dict[Read, list[float]] = {ours: [], theirs: []}
    for turn in range(turns):
        for side in (ours, theirs) if turn % 2 else (theirs, ours):
            start = time.perf_counter()
            side()
            times[side].append(time.perf_counter() - start)
    ratios = [b / a for a, b in itertools.zip_longest(times[ours], times[theirs])]
    speed = rows / statistics.median(times[ours])
    ratio = statistics.median(ratios)
    print(
        f"{name:<44} {speed / 1e6:6.2f} M rows/s   {ratio:6.2f} x the speed of {bar}  ({min(ratios):.2f}..{max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for lists in (False, True):
            kind = "ids in lists of 0 to 8" if lists else "one id per feature"
            table = make_table(arguments.rows, lists=lists)
            path = str(Path(folder, "rows.parquet"))
            pq.write_table(table, path, row_group_size=65_536)
            ours = ours_parquet(path, lists=lists)
            for bar, theirs in (
                ("pyarrow iter_batches", peer_parquet),
                ("pyarrow read_row_group", peer_parquet_groups),
            ):
                contest(f"Parquet, {kind}", ours, theirs(path), rows=arguments.rows, turns=arguments.turns, bar=bar)
            small = table.slice(0, arguments.rows // 25)
            path = str(Path(folder, "rows.tfrecord"))
            write_tfrecord(small, path)
            try:
                theirs = peer_tfrecord(path)
            except ImportError:
                print("TFRecord: skipped, the peer is not installed (pip install tfrecord)")
                continue
            ours = ours_tfrecord(path, lists=lists)
            contest(f"TFRecord, {kind}", ours, theirs, rows=small.num_rows, turns=arguments.turns, bar="tfrecord")


if __name__ == "__main__":
    main()
