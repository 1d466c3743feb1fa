"""Streams: records per second and milliseconds from produce to consume, in a folder, on Kafka's mock cluster and on Redis.

    python benchmarks/streams.py            # about two minutes
    python benchmarks/streams.py --short

Records have 200 bytes. Throughput is given by the processor time of this process, its threads included, and for brokers that of
the broker comes on top. Kinds take turns, and ratios to the folder are those of the medians. The mock cluster keeps records in
memory and Redis runs with `appendfsync always`, the folder is on the disk of --folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from monolith.streams import Stream, open_stream
from monolith.testing.mock_kafka import MockKafka
from monolith.testing.servers import RedisServer

VALUE = b"x" * 200


def kinds(stack: ExitStack, folder: Path) -> Iterator[tuple[str, Callable[[str], Stream]]]:
    """Names of the kinds that can be had here, with what makes a stream of one partition."""
    yield "folder", lambda topic: open_stream(folder / topic, partitions=1)
    try:
        kafka = stack.enter_context(MockKafka())
    except ImportError as error:
        print(f"Kafka is left out: {error}")
    else:

        def topic_of_kafka(topic: str) -> Stream:
            kafka.create_topic(topic, 1)
            # A broker answers as soon as there are records, the mock cluster only after this time.
            return open_stream(kafka.url(topic), settings={"fetch.wait.max.ms": "1"})

        yield "Kafka (mock)", topic_of_kafka
    if missing := RedisServer.missing():
        print(f"Redis is left out: {missing} is missing")
    else:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        yield "Redis", lambda topic: open_stream(f"redis://{redis.address}/0/{topic}", partitions=1)


def throughput(stream: Stream, count: int) -> tuple[float, float]:
    """Records per second of processor time: written, and read."""
    with stream.writer() as writer:
        begun = time.process_time()
        for _ in range(count):
            writer.append(VALUE)
        writer.flush()
        written = count / (time.process_time() - begun)
    with stream.reader() as reader:
        # The mock cluster keeps only the newest 5 MB.
        (name, (start, end)) = next(iter(stream.bounds().items()))
        reader.assign({name: start})
        begun, at, records = time.process_time(), start, 0
        while at < end:
            for got in reader.poll(8192, 10):
                at, records = got.next_offset, records + len(got)
        return written, records / (time.process_time() - begun)


def latencies(stream: Stream, count: int) -> list[float]:
    """Milliseconds from `append` to the return of `poll` in another reader, at some 200 records a second."""
    found = []
    with stream.writer() as writer, stream.reader() as reader:
        reader.assign({stream.partitions()[0]: "start"})
        for number in range(count + 20):
            begun = time.perf_counter()
            writer.append(VALUE)
            while not reader.poll(10, 10):
                pass
            if number >= 20:
                found.append(1000 * (time.perf_counter() - begun))
            time.sleep(0.005)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few seconds, for a test of this script")
    parser.add_argument("--folder", help="where the folder stream and the data of Redis are made")
    given = parser.parse_args()
    rounds, count, waits = (1, 2_000, 20) if given.short else (5, 100_000, 200)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        makers = dict(kinds(stack, folder))
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
        waited: dict[str, list[float]] = {name: [] for name in makers}
        for number in range(rounds):
            for name, make in makers.items():
                rates[name].append(throughput(make(f"rate{number}"), count))
                waited[name] += latencies(make(f"wait{number}"), waits)
        print(f"{'':<14}{'written/s':>12}{'read/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'written':>9}{'read':>7}  (x folder)")
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in rates.items()
        }
        for name, (written, read) in medians.items():
            times = sorted(waited[name])
            middle, high = times[len(times) // 2], times[int(len(times) * 0.99)]
            shown = f"{name:<14}{written:>12,.0f}{read:>12,.0f}{middle:>9.2f}{high:>9.2f}"
            print(f"{shown}{written / medians['folder'][0]:>9.2f}{read / medians['folder'][1]:>7.2f}")


if __name__ == "__main__":
    main()
