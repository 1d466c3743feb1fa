"""Appends the numbers 0, 1, 2, ... to a folder stream, from the one after the last that is stored, and says what was flushed."""

from __future__ import annotations

import random
import sys

from monolith.errors import StorageError
from monolith.streams import open_stream

SETTINGS = {"segment_bytes": "4096", "linger_ms": "0.1"}


def value_of(number: int) -> bytes:
    """The number, and so many bytes that batches have different sizes."""
    return b"%d:" % number + bytes([number % 251]) * (number * 37 % 400)


def number_of(value: bytes) -> int:
    """The number of a value, which must be whole."""
    number = int(value.partition(b":")[0])
    assert value == value_of(number), f"the record of {number} is damaged"
    return number


def main(arguments: list[str]) -> None:
    """Append the number of records that is the second argument to the stream that is the first, flushing at random."""
    path, count, seed = arguments[0], int(arguments[1]), int(arguments[2])
    chance = random.Random(seed)
    try:
        stream = open_stream(path, partitions=1, settings=SETTINGS)
        name = stream.partitions()[0]
        writer = stream.writer()
        last = stream.last(name)
        first = 0 if last is None else number_of(last.values[-1]) + 1
        with writer:
            for number in range(first, first + count):
                writer.append(value_of(number))
                if chance.random() < 0.2:
                    writer.flush()
                    sys.stdout.write(f"flushed {number}\n")
                    sys.stdout.flush()
    except StorageError as error:
        sys.stdout.write(f"refused {str(error).splitlines()[0]}\n")
    else:
        sys.stdout.write(f"closed {number}\n")
