"""Compare reading and training from streams with reading the same records from files.

python benchmarks/stream_training.py                      folder stream, Kafka (librdkafka's mock cluster) and files
python benchmarks/stream_training.py --rows 50000 --rounds 1 --no-kafka
python benchmarks/stream_training.py --format arrow --case train --rounds 3

Records of 26 ids and a label, each format in its turn. "files" are the original's record files for `instance`, Parquet for
`arrow` with 256 rows in a message, and for `json` the same values in memory, decoded without a stream, because there is no source
of JSON files. "memory" is training on batches that were made before: the floor under every source.

Every case is measured twice in a round, with few records and with all of them. A record costs the difference of both divided by
the difference in records, so what it takes to start and connect is not in it. "start" is that rest.

Rounds go through all cases in turn; a number is the median of the rounds. `read` only makes batches, `train` also trains 26
tables with a linear layer on them, while another thread reads ahead, as a run does. Processor time is that of this process, in
microseconds per record; a broker's is not in it. `--case` and `--profile` show where the time of one case goes.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import itertools
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


def fill(stream: Stream, messages: list[bytes], repeats: int) -> None:
    partitions = len(stream.partitions())
    with stream.writer() as writer:
        for number, message in enumerate(itertools.chain.from_iterable(itertools.repeat(messages, repeats))):
            writer.append(message, partition=number % partitions)
        writer.flush()


def files_of(
    folder: Path, rows: list[dict[str, object]], messages: list[bytes], kind: StreamFormat, repeats: int
) -> Callable[[], Iterable[Batch]]:
    if kind == "instance":
        path = folder / f"instances-{repeats}"
        with RecordWriter(str(path)) as writer:
            for _ in range(repeats):
                for message in messages:
                    writer.write(message)
        return lambda: RecordFileSource(str(path), COLUMNS, batch_size=BATCH, format="instance")
    if kind == "arrow":
        table = pa.table(
            {column.name: pa.array([row[column.name] for row in rows], arrow_type(column)) for column in COLUMNS}
        )
        path = folder / f"rows-{repeats}.parquet"
        pq.write_table(pa.concat_tables([table] * repeats), path, row_group_size=32 * BATCH)
        return lambda: ParquetSource(str(path), COLUMNS, batch_size=BATCH)

    def decoded() -> Iterator[Batch]:
        decoder, at = MessageDecoder(COLUMNS), 0
        values = messages * repeats
        while at < len(values):
            assert decoder.add(values, at, max_rows=BATCH) is None
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


def in_memory(rows: list[dict[str, object]], repeats: int) -> Callable[[], Iterable[Batch]]:
    messages = messages_of(rows, "arrow")

    def made() -> Iterable[Batch]:
        decoder, at, batches = MessageDecoder(COLUMNS, format="arrow"), (0, 0), []
        while at[0] < len(messages):
            assert decoder.add(messages, *at, max_rows=BATCH) is None
            at = decoder.position
            batches.append(decoder.take())
        return itertools.chain.from_iterable(itertools.repeat(batches, repeats))

    return made


def measure(work: Callable[[int], int], repeats: int, rows: int) -> tuple[float, float]:
    """Return seconds and seconds of processor time of reading the rows so many times."""
    started, used = time.perf_counter(), time.process_time()
    assert work(repeats) == rows * repeats
    return time.perf_counter() - started, time.process_time() - used


def cases_of(
    format: StreamFormat,  # noqa: A002
    folder: Path,
    kafka: MockKafka | None,
    rows: list[dict[str, object]],
    repeats: int,
) -> dict[str, Callable[[int], int]]:
    """Return what to measure, by name. Each is called with 1 or `repeats`."""
    folder.mkdir()
    messages = messages_of(rows, format)
    sources: dict[str, dict[int, Callable[[], Iterable[Batch]]]] = {}
    for times in (1, repeats):
        sources.setdefault("memory", {})[times] = in_memory(rows, times)
        sources.setdefault("files", {})[times] = files_of(folder, rows, messages, format, times)
        streams = {"folder": open_stream(folder / f"events-{times}", partitions=4)}
        if kafka is not None:
            kafka.create_topic(f"{format}-{times}", KAFKA_PARTITIONS)
            streams["kafka"] = open_stream(kafka.url(f"{format}-{times}"))
        for kind, stream in streams.items():
            fill(stream, messages, times)
            sources.setdefault(kind, {})[times] = functools.partial(
                StreamSource, stream, COLUMNS, batch_size=BATCH, format=format, until_end=True, max_future_secs=None
            )
    cases: dict[str, Callable[[int], int]] = {}
    for kind, makes in sources.items():
        if kind != "memory":
            cases[f"{format} {kind} read"] = lambda times, makes=makes: read(makes[times]())
        cases[f"{format} {kind} train"] = lambda times, makes=makes: train(makes[times]())
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_480, help="different records, which are also the short read")
    parser.add_argument("--repeats", type=int, default=11, help="how often they come in the long read")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=FORMATS, help="only this one")
    parser.add_argument("--no-kafka", action="store_true")
    parser.add_argument("--case", default="", help="only cases whose name has this in it, such as 'folder read'")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats: expected 2 or more")
    torch.set_num_threads(1)
    rows, repeats = make_rows(arguments.rows), arguments.repeats
    with tempfile.TemporaryDirectory() as name, MockKafka() as kafka:
        cases: dict[str, Callable[[int], int]] = {}
        for format in (arguments.format,) if arguments.format else FORMATS:  # noqa: A001
            broker = None if arguments.no_kafka else kafka
            cases |= cases_of(format, Path(name) / format, broker, rows, repeats)
        cases = {case: work for case, work in cases.items() if arguments.case in case}
        for work in cases.values():
            work(1)  # what is loaded and made once in a process
        starts: dict[str, list[float]] = {case: [] for case in cases}
        results: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(arguments.rounds):
            for case, work in cases.items():
                if arguments.profile:
                    with cProfile.Profile() as profile:
                        work(repeats)
                    profile.print_stats("tottime")
                short, long = measure(work, 1, len(rows)), measure(work, repeats, len(rows))
                more = len(rows) * (repeats - 1)
                wall, processor = (long[0] - short[0]) / more, (long[1] - short[1]) / more
                results[case].append((wall, processor))
                starts[case].append(short[1] - processor * len(rows))
    print(
        f"{'':24} {'records/s':>12} {'µs each':>8} {'time of files':>14} {'processor time of files':>24} {'start ms':>9}"
    )
    for case, measured in results.items():
        wall, cost = (statistics.median(values) for values in zip(*measured, strict=True))
        format, _, what = case.split(" ")  # noqa: A001
        files = results.get(f"{format} files {what}", measured)
        slower = statistics.median(own[0] / file[0] for file, own in zip(files, measured, strict=True))
        dearer = statistics.median(own[1] / file[1] for file, own in zip(files, measured, strict=True))
        start = statistics.median(starts[case]) * 1e3
        print(f"{case:24} {1 / wall:12,.0f} {cost * 1e6:8.2f} {slower:13.2f}x {dearer:23.2f}x {start:9.0f}")


if __name__ == "__main__":
    main()
