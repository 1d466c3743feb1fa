"""Danger: a segment whose lengths, counts and names lie, with checksums that fit, and whose reader then neither reads nor
refuses it.

This is the fuzz target of segments, which Python reads; those of what the core reads are in core/fuzz. Files in corpus/segment
are replayed and changed at random, then sealed again, because behind a wrong checksum nothing is ever reached. What finds a fault
stays in the corpus.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from monolith import EmbeddingTable, _core
from monolith.errors import CheckpointMismatchError, CorruptFileError, InvalidArgumentError
from monolith.log import LogReader, LogSegment, history, replay
from monolith.log.segment_format import segment_name
from monolith.testing import scrambles

CORPUS = sorted((Path(__file__).parent / "corpus" / "segment").iterdir())
SEQUENCE = 1


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A path in memory where possible: thousands of files are written there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / segment_name(SEQUENCE)


def read(path: Path) -> bool:
    """Whether `path` is a segment. Whatever is in it, it is read or refused, and reading it changes nothing else."""
    try:
        segment = LogSegment(path)
        segment.check()
        total = 0
        for piece in segment:
            assert len(piece.ids) == len(piece.times) == len(piece.rows)
            total += len(piece.ids)
        assert total == segment.info.rows
        list(segment.select(np.arange(20)))
        segment.dense()
        tables = {part.name: EmbeddingTable(part.config()) for part in segment.info.tables}
        list(history(LogReader(path.parent), 3))
    except CorruptFileError:
        return False
    try:
        replay(segment, tables)
    except (CheckpointMismatchError, CorruptFileError, InvalidArgumentError):
        return False
    return True


def crc(data: bytes | bytearray) -> int:
    return int(_core.crc32c(bytes(data)))


def resealed(data: bytes) -> bytes:
    """`data` with checksums that fit wherever a part of a segment can be found."""
    sealed = bytearray(data)
    with contextlib.suppress(struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError):
        _reseal(sealed)  # as far as its parts can be found
    return bytes(sealed)


def _reseal(data: bytearray) -> None:
    (length,) = struct.unpack_from("<I", data, 12)
    place = 16 + length
    struct.pack_into("<I", data, place, crc(data[:place]))
    heads = bytes(data[place : place + 4])
    widths = [int(table["row_bytes"]) for table in json.loads(data[16:place])["tables"]]
    place += 4
    while data[place : place + 4] == b"PIEC":
        table, rows, erased = struct.unpack_from("<III", data, place + 4)
        keys = place + 28
        body = keys + 12 * rows + 8 * erased
        end = body + rows * widths[table % len(widths)]
        struct.pack_into("<II", data, place + 16, crc(data[keys:body]), crc(data[body:end]))
        struct.pack_into("<I", data, place + 24, crc(data[place : place + 24]))
        heads += data[place : place + 24]
        place = end
    if data[place : place + 4] == b"STAT":
        structure, tensors = struct.unpack_from("<QQ", data, place + 4)
        struct.pack_into("<I", data, place + 20, crc(data[place + 28 : place + 28 + structure + tensors]))
        struct.pack_into("<I", data, place + 24, crc(data[place : place + 24]))
        heads += data[place : place + 24]
        place += 28 + structure + tensors
    struct.pack_into("<I", data, len(data) - 8, crc(heads))
    struct.pack_into("<I", data, len(data) - 4, crc(data[place:-4]))


def changed(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """A few changes: bits, bytes, numbers at their limits, digits of the JSON, and larger accidents."""
    new = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(new)) if new else 0
        # Most of them keep the lengths: what is moved is found out at once.
        match chance.choices(range(6), (4, 4, 3, 1, 1, 1))[0]:
            case 0 if new:
                new[place] ^= 1 << chance.randrange(8)
            case 1 if new:
                new[place] = chance.choice(b'0123456789-"{}[],:tfn.e\x00\xff')
            case 2 if len(new) - place >= 8:
                size, limits = chance.choice(
                    [("<I", (0, 1, 65536, 2**31, 2**32 - 1)), ("<Q", (0, 1, 2**40, 2**64 - 1))]
                )
                struct.pack_into(size, new, place, chance.choice(limits))
            case 3:
                del new[place : place + chance.randrange(12)]
            case 4:
                new[place:place] = other[: chance.randrange(40)]
            case _ if len(new) > 1:
                ((_, damaged),) = scrambles(bytes(new), count=1, seed=chance.randrange(2**32))
                new = bytearray(damaged)
    return bytes(new)


def explore(path: Path, *, count: int, seed: int) -> int:
    """Read changed files; how many were whole segments all the same."""
    chance, corpus, whole = random.Random(seed), [one.read_bytes() for one in CORPUS], 0
    for number in range(count):
        data = changed(chance.choice(corpus), chance.choice(corpus), chance)
        path.write_bytes(resealed(data) if number % 4 else data)
        try:
            whole += read(path)
        except Exception as error:
            kept = Path(tempfile.gettempdir()) / f"segment-fault-{seed}-{number}"
            kept.write_bytes(path.read_bytes())
            raise AssertionError(f"{kept}: {type(error).__name__}: {error}; add it to {CORPUS[0].parent}") from error
    return whole


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_corpus(path: Path, scratch: Path) -> None:
    scratch.write_bytes(path.read_bytes())
    assert read(scratch) == path.name.startswith("whole")
    scratch.write_bytes(resealed(path.read_bytes()))
    read(scratch)


def test_sealing_again_changes_nothing_that_is_whole() -> None:
    for path in CORPUS:
        if path.name.startswith("whole"):
            assert resealed(path.read_bytes()) == path.read_bytes()


def test_changed_segments_are_read_or_refused(scratch: Path) -> None:
    whole = explore(scratch, count=1500, seed=1)
    assert whole > 20, "nothing gets past the checksums: the changes reach nothing"


@pytest.mark.slow
def test_changed_segments_for_long(scratch: Path) -> None:
    for seed in range(2, 22):
        explore(scratch, count=10_000, seed=seed)
