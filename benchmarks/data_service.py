"""Compare batches through the data service with reading the same files in the trainer's own process, on one machine.

python benchmarks/data_service.py                 one data worker, then two
python benchmarks/data_service.py --rows 20000    a short run

Criteo-like rows, as in `reading.py`, with ids in lists, in Parquet and TFRecord files, 2,048 per batch. Dispatcher and data
workers are separate processes, connected by Unix sockets, and the dispatcher writes its journal. Both sides alternate on the same
files, which are in the page cache, and their sums are compared before they are timed. A ratio is the median of the ratios of the
turns. CPU is that of the trainer's process, all threads. With few cores, all processes share them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow.parquet as pq
import torch

from monolith.data import ParquetSource, TFRecordSource
from monolith.dataservice import (
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
    DispatcherConfig,
)
from monolith.features import Batch, Ragged
from reading import make_table, schema, write_tfrecord

BATCH = 2048
FILES = 4
SOURCES = {"parquet": ParquetSource, "tfrecord": TFRecordSource}


def serve(told: Connection, dispatcher: str | None, folder: str) -> None:
    """Be the dispatcher, or a data worker of `dispatcher`, until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    if dispatcher is None:
        server: DataDispatcher | DataWorker = DataDispatcher(DispatcherConfig(folder=Path(folder)))
    else:
        server = DataWorker(DataWorkerConfig(dispatcher=dispatcher, read_ahead=8))
    with server:
        told.send(server.address)
        try:
            told.recv()
        except EOFError:
            return


@contextmanager
def process(dispatcher: str | None, folder: str) -> Iterator[str]:
    """A server in a process of its own; its address."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    started = context.Process(target=serve, args=(theirs, dispatcher, folder), daemon=True)
    started.start()
    theirs.close()
    try:
        yield mine.recv()
    finally:
        mine.close()
        started.join()


def total(batches: Iterable[Batch]) -> tuple[int, float]:
    """How many batches, and a sum over one column of them."""
    count, found = 0, 0.0
    for batch in batches:
        column = batch["id_0"]
        found += float((column.values if isinstance(column, Ragged) else column).double().sum())
        count += 1
    return count, found


def timed(batches: Iterable[Batch]) -> tuple[float, float]:
    """Batches a second, and milliseconds of this process' CPU for each."""
    start, cpu = time.perf_counter(), time.process_time()
    count, _ = total(batches)
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    return count / seconds, 1000 * used / count


@contextmanager
def service(workers: int, folder: str) -> Iterator[str]:
    """A dispatcher and its data workers; the address of the dispatcher."""
    with ExitStack() as stack:
        dispatcher = stack.enter_context(process(None, folder))
        for _ in range(workers):
            stack.enter_context(process(dispatcher, folder))
        yield dispatcher


def contest(kind: str, files: list[str], dispatcher: str, *, workers: int, turns: int) -> None:
    columns = [column.model_dump(mode="json") for column in schema(lists=True)]
    dataset = DatasetConfig(kind=kind, paths=tuple(files), fields={"columns": columns, "batch_size": BATCH})
    jobs = iter(range(1000))

    def served() -> Iterable[Batch]:
        return DataServiceSource(dispatcher, dataset, job=f"{kind}-{next(jobs)}", parallel=2)

    def local() -> Iterable[Batch]:
        return SOURCES[kind](files, schema(lists=True), batch_size=BATCH)

    (count, one), (_, other) = total(served()), total(local())
    assert abs(one - other) <= 1e-9 * abs(one), f"{kind}: the two sides read different values"
    found: list[tuple[float, float, float]] = []
    for turn in range(turns):
        sides = {side: timed(side()) for side in ((served, local) if turn % 2 else (local, served))}
        (speed, cpu), (bar, own) = sides[served], sides[local]
        found.append((speed, speed / bar, cpu / own))
    speeds, ratios, costs = (sorted(column) for column in zip(*found, strict=True))
    print(
        f"{kind}, {workers} data worker{'s' * (workers > 1)}: {statistics.median(speeds):.0f} batches/s ({count} a turn), "
        f"{statistics.median(ratios):.2f} x reading here ({ratios[0]:.2f}..{ratios[-1]:.2f}), with "
        f"{statistics.median(costs):.2f} x its CPU",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(arguments.rows // FILES, lists=True)
        parquet, records = str(Path(folder, "rows.parquet")), str(Path(folder, "rows.tfrecord"))
        pq.write_table(table, parquet, row_group_size=16_384)
        write_tfrecord(table, records)
        for workers in (1, 2):
            with service(workers, str(Path(folder, f"dispatcher-{workers}"))) as dispatcher:
                for kind, file in (("parquet", parquet), ("tfrecord", records)):
                    contest(kind, [file] * FILES, dispatcher, workers=workers, turns=arguments.turns)


if __name__ == "__main__":
    main()
