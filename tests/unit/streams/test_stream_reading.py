"""Danger: a reader that sleeps while records come, cannot be woken or closed, or starves a partition."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from monolith.errors import InvalidArgumentError
from stream_kinds import StreamKind, read, values

READ_IN_ANOTHER_PROCESS = """
import sys
from monolith.streams import open_stream
settings = {"fetch.wait.max.ms": "5"} if sys.argv[1].startswith("kafka") else None
stream = open_stream(sys.argv[1], settings=settings)
reader = stream.reader()
reader.assign({name: "start" for name in stream.partitions()})
print("ready", flush=True)
left = int(sys.argv[2])
while left:
    for records in reader.poll(left, 60):
        left -= len(records)
        for value in records.values:
            print(value.decode(), flush=True)
"""


def test_a_waiting_reader_is_woken_by_another_thread(kind: StreamKind) -> None:
    stream = kind.new()
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(reader.poll(10, 600)))
        thread.start()
        reader.wake()
        thread.join(60)
        assert found == [[]]
        # It is awake once: the next poll waits for records again.
        with stream.writer() as writer:
            writer.append(b"x")
            writer.flush()
            assert values(read(reader, 1)[stream.partitions()[0]]) == [b"x"]


def test_a_call_before_the_wait_is_not_forgotten(kind: StreamKind) -> None:
    stream = kind.new()
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        reader.wake()
        begun = time.monotonic()
        assert reader.poll(10, 600) == []
        assert time.monotonic() - begun < 300, "it waited to the end"


def test_records_are_read_without_flush(kind: StreamKind) -> None:
    stream = kind.new()
    with stream.reader() as reader, stream.writer() as writer:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        for number in range(5):
            writer.append(b"%d" % number)
            assert values(read(reader, 1)[stream.partitions()[0]]) == [b"%d" % number]


def test_a_full_partition_does_not_starve_the_others(kind: StreamKind) -> None:
    stream = kind.new(partitions=3)
    names = stream.partitions()
    with stream.writer() as writer:
        for number in range(6000):
            writer.append(b"%d" % number, partition=0)
        writer.append(b"one", partition=1)
        writer.append(b"two", partition=2)
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(names, "start"))
        seen, polls = set[str](), 0
        while len(seen) < 3:
            seen |= {records.partition for records in reader.poll(50, 30)}
            polls += 1
            # librdkafka hands records out in the order in which it has fetched them.
            assert polls < (125 if kind.name == "kafka" else 4), f"only {seen} were served"


def test_several_readers_each_get_everything(kind: StreamKind) -> None:
    stream = kind.new(partitions=2)
    expected = {name: [b"%d" % n for n in range(part, 100, 2)] for part, name in enumerate(stream.partitions())}
    with stream.reader() as one, stream.reader() as other, stream.writer() as writer:
        for reader in (one, other):
            reader.assign(dict.fromkeys(stream.partitions(), "start"))
        for number in range(100):
            writer.append(b"%d" % number, partition=number % 2)
        writer.flush()
        for reader in (one, other):
            found = read(reader, 100, max_records=7)
            assert {name: values(parts) for name, parts in found.items()} == expected


def test_a_reader_in_another_process_gets_records_as_they_come(kind: StreamKind) -> None:
    stream = kind.new()
    command = [sys.executable, "-c", READ_IN_ANOTHER_PROCESS, stream.url, "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with stream.writer() as writer:
            for number in range(20):
                writer.append(b"%d" % number)
                # It is read before the next one is written.
                assert process.stdout.readline() == f"{number}\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None


def test_closing_twice_is_harmless_and_closing_flushes(kind: StreamKind) -> None:
    stream = kind.new()
    writer = stream.writer()
    writer.append(b"x")
    writer.close()
    writer.close()
    reader = stream.reader()
    reader.assign(dict.fromkeys(stream.partitions(), "start"))
    assert values(read(reader, 1)[stream.partitions()[0]]) == [b"x"]
    reader.close()
    reader.close()
    reader.wake()
    with pytest.raises(InvalidArgumentError, match="poll: the reader is closed"):
        reader.poll(1, 0)
    with pytest.raises(InvalidArgumentError, match="assign: the reader is closed"):
        reader.assign({})
    with pytest.raises(InvalidArgumentError, match="append: the writer is closed"):
        writer.append(b"x")
