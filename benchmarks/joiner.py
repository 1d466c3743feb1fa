"""Measure joining impressions and actions: events per second of processor time, in memory and on disk.

python benchmarks/joiner.py                  300,000 impressions of 540 bytes, one action for ten of them, twice
python benchmarks/joiner.py --events 50000   a short run

All read the same records from folder streams and write examples to one. `joiner` keeps its windows in memory, `spilling` keeps at
most a quarter of them there and the others in LMDB. `dict` is what one writes in an afternoon: a dict from key to impression,
which is emptied by time. It parses, joins and writes the same examples, and has no checkpoints, no order of events, no
duplicates and no limit of memory. `parsing` only calls orjson.loads for each record. Processor time includes the threads of
readers and writers.

At last the same records in two partitions are joined by one process, which has both, and by two. What that gains is the ratio of
the times that pass, in turns. It needs two processors that have nothing else to do: on a busy machine only the processor time
says what they would gain.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import orjson

from monolith.data.join import JoinConfig, Joiner
from monolith.streams import open_stream

QUIET = {"fsync": "false"}
WINDOW_SECS = 240.0
PER_SECOND = 500


def write_events(folder: Path, count: int, partitions: int = 1) -> None:
    chance = random.Random(1)
    ids = ",".join(f'"id_{column}":{chance.randrange(1 << 40)}' for column in range(26))
    with (
        open_stream(folder / "shown", partitions=partitions, settings=QUIET).writer() as shown,
        open_stream(folder / "acted", partitions=partitions, settings=QUIET).writer() as acted,
    ):
        for number in range(count):
            key, at = f"request-{number * 2654435761 % (1 << 40):013d}", 1_700_000_000 + number / PER_SECOND
            shown.append(f'{{"request":"{key}","time":{at:.3f},{ids}}}'.encode(), key=key.encode())
            if number % 10 == 0:
                late = at + chance.random() * WINDOW_SECS / 2
                acted.append(f'{{"request":"{key}","time":{late:.3f},"action":"click"}}'.encode(), key=key.encode())


def config(folder: Path, *, spill: bool, count: int) -> JoinConfig:
    # What is open at one moment: a window, and the keys that are remembered as long.
    open_mb = min(count, WINDOW_SECS * PER_SECOND) * 900 / (1 << 20)
    source = {"key": ["request"], "time": "time"}
    tree = {
        "impressions": {"stream": str(folder / "shown"), **source},
        "actions": {"stream": str(folder / "acted"), **source},
        "window_secs": WINDOW_SECS,
        "labels": [{"name": "clicked", "actions": {"click": 1}}],
        "output": {"stream": str(folder / "examples"), "settings": QUIET},
        "state": {
            "folder": str(folder / "state"),
            "spill": spill,
            "memory_mb": max(1, int(open_mb / 4)) if spill else 8192,
        },
    }
    return JoinConfig.from_json(json.dumps(tree))


def join(folder: Path, *, spill: bool, count: int) -> None:
    with Joiner(config(folder, spill=spill, count=count)) as joiner:
        joiner.run(until_end=True)


def all_values(folder: Path, name: str, size: int = 5000) -> Iterator[list[bytes]]:
    stream = open_stream(folder / name)
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        while batches := reader.poll(size, 0):
            for records in batches:
                yield list(records.values)


def parse(folder: Path) -> None:
    for name in ("shown", "acted"):
        for values in all_values(folder, name):
            for value in values:
                orjson.loads(value)


def join_with_a_dict(folder: Path) -> None:
    waiting: dict[str, bytes] = {}
    order: deque[tuple[float, str]] = deque()
    clicked: set[str] = set()
    actions = all_values(folder, "acted", 500)
    with open_stream(folder / "examples", partitions=1, settings=QUIET).writer() as writer:

        def emit(until: float) -> None:
            while order and order[0][0] <= until:
                _, key = order.popleft()
                label = b"1.0" if key in clicked else b"0.0"
                clicked.discard(key)
                writer.append(waiting.pop(key)[:-1] + b',"clicked":' + label + b"}", partition=0)

        for values in all_values(folder, "shown"):
            for value in next(actions, []):
                clicked.add(orjson.loads(value)["request"])
            for value in values:
                record = orjson.loads(value)
                waiting[record["request"]] = value
                order.append((record["time"] + WINDOW_SECS, record["request"]))
            emit(record["time"])
        emit(float("inf"))


def join_share(folder: Path, index: int, count: int, events: int, ready: Barrier, spent: Queue[float]) -> None:
    """Join some of the partitions, in a process of its own."""
    gc.set_threshold(50_000, 20, 100)
    with Joiner(config(folder, spill=False, count=events), index=index, count=count) as joiner:
        ready.wait()
        spent.put(processor_secs(lambda: joiner.run(until_end=True))[0])


def join_with_processes(folder: Path, count: int, events: int) -> tuple[float, float]:
    """Return processor time of all, and the time that passed."""
    spawn = multiprocessing.get_context("spawn")
    ready, spent = spawn.Barrier(count + 1), spawn.Queue()
    processes = [
        spawn.Process(target=join_share, args=(folder, index, count, events, ready, spent)) for index in range(count)
    ]
    for process in processes:
        process.start()
    ready.wait()
    began = time.perf_counter()
    total = sum(spent.get() for _ in processes)
    elapsed = time.perf_counter() - began
    for process in processes:
        process.join()
    return total, elapsed


def compare_processes(count: int, rounds: int) -> None:
    events = count + -(-count // 10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_events(folder, count, partitions=2)
        gains, bounds = [], []
        for turn in range(rounds):
            times, costs = {}, {}
            for processes in (1, 2):
                costs[processes], times[processes] = join_with_processes(folder, processes, count)
                print(
                    f"round {turn}: {processes} process(es) {costs[processes] / events * 1e6:6.1f} us/event of processor time, "
                    f"{times[processes]:.2f} s"
                )
                for made in ("examples", "state"):
                    shutil.rmtree(folder / made, ignore_errors=True)
            gains.append(times[1] / times[2])
            bounds.append(2 * costs[1] / costs[2])
        print(
            f"\ntwo processes are {statistics.median(gains):.2f} times as fast as one by the time that passed, and "
            f"{statistics.median(bounds):.2f} times by processor time, if each has a processor: medians of {rounds} rounds"
        )


def processor_secs(work: Callable[[], object]) -> tuple[float, float]:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before, began = used(), time.perf_counter()
    work()
    return used() - before, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=300_000, help="impressions")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    events = given.events + -(-given.events // 10)
    gc.set_threshold(50_000, 20, 100)  # as `monolith join` does, here for all
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_events(folder, given.events)
        contestants: dict[str, Callable[[], object]] = {
            "parsing": lambda: parse(folder),
            "dict": lambda: join_with_a_dict(folder),
            "joiner": lambda: join(folder, spill=False, count=given.events),
            "spilling": lambda: join(folder, spill=True, count=given.events),
        }
        rates: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for turn in range(given.rounds):
            for contestant, work in contestants.items():
                spent, elapsed = processor_secs(work)
                rates[contestant].append(spent / events * 1e6)
                print(
                    f"round {turn}: {contestant:<9}{spent / events * 1e6:7.1f} us/event of processor time, {elapsed:.1f} s"
                )
                for made in ("examples", "state"):
                    shutil.rmtree(folder / made, ignore_errors=True)
        print("\n            us/event   events/s of one processor   times parsing")
        for contestant, times in rates.items():
            middle = statistics.median(times)
            ratio = statistics.median(one / base for one, base in zip(times, rates["parsing"], strict=True))
            print(f"{contestant:<12}{middle:8.1f}{1e6 / middle:28,.0f}{ratio:16.1f}")
    print()
    compare_processes(given.events, given.rounds)


if __name__ == "__main__":
    main()
