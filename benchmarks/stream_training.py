"""Compare reading and training from streams with reading the same records from files.

python benchmarks/stream_training.py                      folder stream, Kafka (librdkafka's mock cluster) and files
python benchmarks/stream_training.py --rows 50000 --rounds 1 --no-kafka

Records of 26 ids and a label, each format in its turn. "files" are the original's record files for `instance`, Parquet for
`arrow`, and for `json` the same values in memory, decoded without a stream, because there is no source of JSON files.

Rounds go through all cases in turn; a number is the median of the rounds. `read` only makes batches, `train` also trains 26
tables with a linear layer on them, while another thread reads ahead, as a run does. Processor time is that of this process, in
microseconds per record; a broker's is not in it. `--case` and `--profile` show where the time of one case goes.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from monolith.data import (
    Column,
    MessageDecoder,
    MessageEncoder,
    ParquetSource,
    Prefetch,
    RecordFileSource,
    RecordWriter,
    StreamSource,
)
from monolith.data.messages import StreamFormat
from monolith.data.sources.arrow import arrow_type
from monolith.features import Batch, Feature, num_rows
from monolith.nn import EmbeddingBagCollection
from monolith.streams import Stream, open_stream
from monolith.table import Adagrad
from monolith.testing.mock_kafka import MockKafka
from monolith.train import Head, Trainer

FIELDS, BATCH, PER_MESSAGE = 26, 2048, 256
IDS = [f"id_{number}" for number in range(FIELDS)]
COLUMNS = [*(Column(name=name) for name in IDS), Column(name="label", dtype="float32", shape=())]
FORMATS: tuple[StreamFormat, ...] = ("json", "instance", "arrow")
# The mock cluster keeps about 5 MB of a partition.
KAFKA_PARTITIONS = 40


class Clicks(nn.Module):
    """26 tables and a linear layer."""

    heads = (Head(name="click", label="label"),)

    def __init__(self) -> None:
        super().__init__()
        optimizer = Adagrad(learning_rate=0.1)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=8, optimizer=optimizer, pooling="sum", stack="ids") for name in IDS]
        )
        self.linear = nn.Linear(FIELDS * 8, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(self.embeddings(batch)["ids"].flatten(1)).squeeze(1)


def make_rows(rows: int) -> list[dict[str, object]]:
    random = np.random.default_rng(1)
    # Ids repeat, as they do in clicks, so that training does not only insert rows.
    ids = (random.zipf(1.2, (rows, FIELDS)) % 100_000).astype(np.int64) * 7_919_377 + 2**40
    labels = (random.random(rows) < 0.2).astype(np.float32).tolist()
    return [
        {**dict(zip(IDS, ([each] for each in row), strict=True)), "label": label}
        for row, label in zip(ids.tolist(), labels, strict=True)
    ]


def messages_of(rows: list[dict[str, object]], format: StreamFormat) -> list[bytes]:  # noqa: A002
    encoder = MessageEncoder(COLUMNS, format=format)
    if format != "arrow":
        return encoder.encode_rows(rows)
    return [encoder.encode_rows(rows[begin : begin + PER_MESSAGE])[0] for begin in range(0, len(rows), PER_MESSAGE)]


def fill(stream: Stream, messages: list[bytes]) -> None:
    partitions = len(stream.partitions())
    with stream.writer() as writer:
        for number, message in enumerate(messages):
            writer.append(message, partition=number % partitions)
        writer.flush()


def files_of(
    folder: Path, rows: list[dict[str, object]], messages: list[bytes], kind: StreamFormat
) -> Callable[[], Iterable[Batch]]:
    if kind == "instance":
        with RecordWriter(str(folder / "instances")) as writer:
            for message in messages:
                writer.write(message)
        return lambda: RecordFileSource(str(folder / "instances"), COLUMNS, batch_size=BATCH, format="instance")
    if kind == "arrow":
        table = pa.table(
            {column.name: pa.array([row[column.name] for row in rows], arrow_type(column)) for column in COLUMNS}
        )
        pq.write_table(table, folder / "rows.parquet", row_group_size=32 * BATCH)
        return lambda: ParquetSource(str(folder / "rows.parquet"), COLUMNS, batch_size=BATCH)

    def decoded() -> Iterator[Batch]:
        decoder, at = MessageDecoder(COLUMNS), 0
        while at < len(messages):
            assert decoder.add(messages, at, max_rows=BATCH) is None
            at, _ = decoder.position
            yield decoder.take()

    return decoded


def read(source: Iterable[Batch]) -> int:
    return sum(map(num_rows, source))


def train(source: Iterable[Batch]) -> int:
    model, rows = Clicks(), 0
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Prefetch(source, capacity=2) as batches:
        for batch in batches:
            trainer.train_step(batch)
            rows += num_rows(batch)
    return rows


def measure(work: Callable[[], int], rows: int) -> tuple[float, float]:
    """Return records per second, and microseconds of processor time per record."""
    started, used = time.perf_counter(), time.process_time()
    assert work() == rows
    return rows / (time.perf_counter() - started), (time.process_time() - used) / rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-kafka", action="store_true")
    parser.add_argument("--case", default="", help="only cases whose name has this in it, such as 'json folder read'")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(arguments.rows)
    cases: dict[str, Callable[[], int]] = {}
    with tempfile.TemporaryDirectory() as name, MockKafka() as kafka:
        for format in FORMATS:  # noqa: A001
            folder = Path(name) / format
            folder.mkdir()
            messages = messages_of(rows, format)
            sources = {"files": files_of(folder, rows, messages, format)}
            streams = {"folder": open_stream(folder / "events", partitions=4)}
            if not arguments.no_kafka:
                kafka.create_topic(format, KAFKA_PARTITIONS)
                streams["kafka"] = open_stream(kafka.url(format))
            for kind, stream in streams.items():
                fill(stream, messages)
                sources[kind] = functools.partial(
                    StreamSource, stream, COLUMNS, batch_size=BATCH, format=format, until_end=True, max_future_secs=None
                )
            for kind, make in sources.items():
                cases[f"{format} {kind} read"] = lambda make=make: read(make())
                cases[f"{format} {kind} train"] = lambda make=make: train(make())
        cases = {case: work for case, work in cases.items() if arguments.case in case}
        results: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(arguments.rounds):
            for case, work in cases.items():
                if arguments.profile:
                    with cProfile.Profile() as profile:
                        work()
                    profile.print_stats("tottime")
                results[case].append(measure(work, len(rows)))
    print(f"{'':24} {'records/s':>12} {'µs each':>8} {'time of files':>14} {'processor time of files':>24}")
    for case, measured in results.items():
        speed, cost = (statistics.median(values) for values in zip(*measured, strict=True))
        format, _, what = case.split(" ")  # noqa: A001
        beside = results.get(f"{format} files {what}", measured)
        slower = statistics.median(files[0] / own[0] for files, own in zip(beside, measured, strict=True))
        dearer = statistics.median(own[1] / files[1] for files, own in zip(beside, measured, strict=True))
        print(f"{case:24} {speed:12,.0f} {cost:8.2f} {slower:13.2f}x {dearer:23.2f}x")


if __name__ == "__main__":
    main()
