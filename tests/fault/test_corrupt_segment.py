"""Danger: a damaged or hostile segment that yields a wrong row, crashes the process, or makes it allocate without bound.
Every damaged copy must be refused with `CorruptFileError`; a signal would end this test run, so there is nothing to catch it.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from comparison import int64, snapshot
from damage import assert_all_refused
from forked_processes import run_script
from log_tables import new_table, rebuilt, train
from monolith.errors import CorruptFileError, StorageError
from monolith.log import ChangeLog, LogReader, LogSegment, history
from monolith.log.segment_format import segment_name
from monolith.testing import bit_flips, scrambles, truncations

NAME = segment_name(1)


def written(folder: Path, *, first: int = 0, step: int = 3) -> bytes:
    """A small segment with everything in it: two tables, several pieces, erased ids, dense state and a place in the data."""
    user, item = new_table("user"), new_table("item")
    with ChangeLog(folder, [user, item], clock=lambda: 5.0) as log:
        train(user, range(first, first + 9), step=step, event_time=100)
        train(item, range(5))
        user.erase(int64([first, 77]))
        dense = {"weight": torch.arange(3.0), "list": [1, None]}
        sequence = log.commit(step=step, source={"offset": 4}, dense=dense)
    assert snapshot(rebuilt(folder, sequence)) == snapshot(user)
    return (folder / NAME).read_bytes()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A path in memory where possible: tens of thousands of files are written there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / NAME


def check(path: Path) -> None:
    LogSegment(path).check()


def test_every_truncation_is_refused(pristine: bytes, scratch: Path) -> None:
    assert assert_all_refused(truncations(pristine), scratch, check) == len(pristine)


def test_every_flipped_bit_is_refused(pristine: bytes, scratch: Path) -> None:
    assert assert_all_refused(bit_flips(pristine), scratch, check) == 8 * len(pristine)


def test_larger_accidents_are_refused(pristine: bytes, scratch: Path) -> None:
    assert assert_all_refused(scrambles(pristine, count=5_000, seed=2), scratch, check) == 5_000


@pytest.mark.slow
def test_larger_accidents_are_refused_for_long(pristine: bytes, scratch: Path) -> None:
    for seed in range(50):
        assert_all_refused(scrambles(pristine, count=5_000, seed=seed), scratch, check)


def _divided(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


REMAINDERS = [_divided(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """The file's checksum, byte by byte: slow, and independent of the core."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = REMAINDERS[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def sealed(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c(data))


class Hostile:
    """A file written by someone who knows the format and keeps every checksum right."""

    def __init__(self, data: bytes) -> None:
        _, self.version, length = struct.unpack_from("<8sII", data)
        self.meta = json.loads(data[16 : 16 + length])
        self.text: bytes | None = None
        widths = [table["row_bytes"] for table in self.meta["tables"]]
        place = 16 + length + 4
        self.pieces: list[list] = []
        while data[place : place + 4] == b"PIEC":
            table, rows, erased = struct.unpack_from("<III", data, place + 4)
            keys = place + 28
            body = keys + 12 * rows + 8 * erased
            end = body + rows * widths[table]
            self.pieces.append([table, rows, erased, data[keys:body], data[body:end]])
            place = end
        assert data[place : place + 4] == b"STAT"
        self.structure_size, self.tensors_size = struct.unpack_from("<QQ", data, place + 4)
        end = place + 28 + self.structure_size + self.tensors_size
        self.structure = data[place + 28 : place + 28 + self.structure_size]
        self.tensors = data[place + 28 + self.structure_size : end]
        tables = len(widths)
        self.said_tables, self.said_pieces, self.state_size = struct.unpack_from("<IQQ", data, end + 4)
        self.counts = list(struct.unpack_from(f"<{2 * tables}Q", data, end + 24))
        self.behind = b""
        assert self.build() == data, "the file format is not what this test thinks it is"

    def build(self) -> bytes:
        text = self.text if self.text is not None else json.dumps(self.meta, separators=(",", ":")).encode()
        data = sealed(struct.pack("<8sII", b"MONOSEGM", self.version, len(text)) + text)
        heads = data[-4:]
        for table, rows, erased, keys, body in self.pieces:
            head = sealed(struct.pack("<4sIIIII", b"PIEC", table, rows, erased, crc32c(keys), crc32c(body)))
            heads += head[:-4]
            data += head + keys + body
        if self.structure is not None:
            state = self.structure + self.tensors
            head = sealed(struct.pack("<4sQQI", b"STAT", self.structure_size, self.tensors_size, crc32c(state)))
            heads += head[:-4]
            data += head + state
        foot = struct.pack("<4sIQQ", b"LEND", self.said_tables, self.said_pieces, self.state_size)
        foot += struct.pack(f"<{len(self.counts)}QI", *self.counts, crc32c(heads))
        return data + sealed(foot) + self.behind

    def set_state(self, structure: bytes, tensors: bytes) -> None:
        self.structure, self.tensors = structure, tensors
        self.structure_size, self.tensors_size = len(structure), len(tensors)
        self.state_size = len(structure) + len(tensors)


def _too_new(h: Hostile) -> None:
    h.version = 2


def _far_too_new(h: Hostile) -> None:
    h.version = 2**32 - 1


def _version_zero(h: Hostile) -> None:
    h.version = 0


def _not_json(h: Hostile) -> None:
    h.text = b"\x00not json"


def _not_utf8(h: Hostile) -> None:
    h.text = b'{"sequence": "\xff\xfe"}'


def _empty_meta(h: Hostile) -> None:
    h.text = b""


def _deep_json(h: Hostile) -> None:
    h.text = b"[" * 100_000


def _unknown_field(h: Hostile) -> None:
    h.meta["surprise"] = 1


def _no_tables(h: Hostile) -> None:
    h.meta["tables"] = []


def _one_table_less(h: Hostile) -> None:
    h.meta["tables"].pop()


def _another_sequence(h: Hostile) -> None:
    h.meta["sequence"] = 2


def _its_own_parent(h: Hostile) -> None:
    h.meta["parent"] = 1


def _a_younger_parent(h: Hostile) -> None:
    h.meta["parent"] = 9


def _negative_step(h: Hostile) -> None:
    h.meta["step"] = -1


def _time_not_a_number(h: Hostile) -> None:
    h.meta["time"] = float("nan")


def _time_beyond_calendars(h: Hostile) -> None:
    h.meta["time"] = 1e300


def _unknown_kind(h: Hostile) -> None:
    h.meta["kind"] = "pickle"


def _wider_rows(h: Hostile) -> None:
    h.meta["tables"][0]["row_bytes"] += 4


def _endless_rows(h: Hostile) -> None:
    h.meta["tables"][0]["row_bytes"] = 2**32 - 1


def _rows_of_no_bytes(h: Hostile) -> None:
    h.meta["tables"][0]["row_bytes"] = 0


def _infinite_scale(h: Hostile) -> None:
    h.meta["tables"][0]["state"]["hashnet_scales"] = [float("inf")]


def _unknown_table(h: Hostile) -> None:
    h.pieces[0][0] = 2


def _endless_piece(h: Hostile) -> None:
    h.pieces[0][1] = 2**32 - 1


def _endless_erased(h: Hostile) -> None:
    h.pieces[0][2] = 2**32 - 1


def _the_largest_piece_there_may_be(h: Hostile) -> None:
    h.pieces[0][1] = h.pieces[0][2] = 65536


def _a_piece_too_large(h: Hostile) -> None:
    h.counts[2] += 65537 - h.pieces[0][2]
    ids, times = h.pieces[0][3][: 8 * h.pieces[0][1]], h.pieces[0][3][-4 * h.pieces[0][1] :]
    h.pieces[0][2:4] = [65537, ids + bytes(8 * 65537) + times]


def _empty_piece(h: Hostile) -> None:
    h.pieces.append([0, 0, 0, b"", b""])
    h.said_pieces += 1


def _a_piece_of_the_other_table(h: Hostile) -> None:
    h.pieces[0][0] = 1 - h.pieces[0][0]


def _a_piece_missing(h: Hostile) -> None:
    h.pieces.pop()


def _a_piece_twice(h: Hostile) -> None:
    h.pieces.append(h.pieces[0])


def _a_piece_twice_and_said(h: Hostile) -> None:
    h.pieces.append(h.pieces[0])
    h.said_pieces += 1


def _endless_pieces(h: Hostile) -> None:
    h.said_pieces = 2**64 - 1


def _more_rows_said(h: Hostile) -> None:
    h.counts[0] += 1


def _endless_rows_said(h: Hostile) -> None:
    h.counts[0] = 2**64 - 1


def _footer_of_more_tables(h: Hostile) -> None:
    h.said_tables += 1
    h.counts += [0, 0]


def _footer_of_endless_tables(h: Hostile) -> None:
    h.said_tables = 2**32 - 1


def _endless_structure(h: Hostile) -> None:
    h.structure_size = 2**63


def _wrapping_structure(h: Hostile) -> None:
    h.structure_size, h.tensors_size = 2**64 - 8, 8


def _endless_state(h: Hostile) -> None:
    h.state_size = 2**64 - 1


def _no_state_said(h: Hostile) -> None:
    h.state_size = 0


def _no_dense_promised(h: Hostile) -> None:
    h.meta["has_dense"] = False


def _no_state_promised(h: Hostile) -> None:
    h.meta["has_dense"] = h.meta["has_source"] = False


def _state_of_another_shape(h: Hostile) -> None:
    h.set_state(b"[1]", h.tensors)


def _state_without_end(h: Hostile) -> None:
    h.set_state(b'{"list":[' * 50_000, h.tensors)


def _pickled_tensors(h: Hostile) -> None:
    h.set_state(h.structure, b"\x80\x04cos\nsystem\n(S'true'\ntR.")


def _endless_tensors(h: Hostile) -> None:
    h.set_state(h.structure, struct.pack("<Q", 2**62) + h.tensors[8:])


def _something_behind(h: Hostile) -> None:
    h.behind = b"\0"


def _another_footer_behind(h: Hostile) -> None:
    h.behind = h.build()[-68:]


HOSTILE: list[Callable[[Hostile], None]] = [
    value
    for name, value in list(globals().items())
    if name.startswith("_") and getattr(value, "__annotations__", {}).get("h")
]


def test_all_ways_are_tried() -> None:
    assert len(HOSTILE) >= 45


@pytest.mark.parametrize("change", HOSTILE, ids=lambda f: f.__name__.strip("_"))
def test_right_checksums_do_not_make_it_right(
    change: Callable[[Hostile], None], pristine: bytes, scratch: Path
) -> None:
    hostile = Hostile(pristine)
    change(hostile)
    data = hostile.build()
    assert data != pristine
    assert_all_refused([(change.__name__, data)], scratch, check)


def test_parts_of_two_segments_do_not_make_one(pristine: bytes, scratch: Path, tmp_path: Path) -> None:
    # Lengths and counts agree, and each part's checksum is right; only the footer knows what belongs together.
    other = written(tmp_path, first=100, step=4)
    assert len(other) == len(pristine)
    cuts = [0, *(place for place in range(len(pristine)) if pristine[place : place + 4] in (b"PIEC", b"STAT", b"LEND"))]
    mine, theirs = (
        [data[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(data)], strict=True)] for data in (pristine, other)
    )
    assert b"".join(mine) == pristine
    mixed = {
        f"part {n}": b"".join([*mine[:n], theirs[n], *mine[n + 1 :]]) for n in range(len(mine)) if mine[n] != theirs[n]
    }
    assert len(mixed) >= 3
    assert_all_refused(mixed.items(), scratch, check)


READ_WITH_LITTLE_MEMORY = """
import resource, sys
from monolith.errors import CorruptFileError
from monolith.log import LogSegment
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
for path in sys.argv[1:]:
    try:
        LogSegment(path).check()
    except CorruptFileError:
        continue
    sys.exit(f"{path}: read")
"""


def test_lengths_in_a_file_ask_for_no_memory(pristine: bytes, tmp_path: Path) -> None:
    paths = []
    for change in HOSTILE:
        hostile = Hostile(pristine)
        change(hostile)
        paths.append(tmp_path / change.__name__ / NAME)
        paths[-1].parent.mkdir()
        paths[-1].write_bytes(hostile.build())
    script = tmp_path / "read.py"
    script.write_text(READ_WITH_LITTLE_MEMORY)
    child = run_script(script, *map(str, paths))
    assert child.returncode == 0, child.stderr


def test_a_newer_version_says_to_upgrade(pristine: bytes, scratch: Path) -> None:
    hostile = Hostile(pristine)
    hostile.version = 2
    scratch.write_bytes(hostile.build())
    with pytest.raises(CorruptFileError, match=r"version 2.*upgrade"):
        LogSegment(scratch)


def test_a_configuration_that_does_not_fit_its_rows_decodes_nothing(pristine: bytes, scratch: Path) -> None:
    for key, value in (("segments", []), ("name", 3), ("surprise", 1)):
        hostile = Hostile(pristine)
        hostile.meta["tables"][0]["config"][key] = value
        scratch.write_bytes(hostile.build())
        with pytest.raises(CorruptFileError, match="configuration"):
            list(history(LogReader(scratch.parent), 5, table="user"))
    hostile = Hostile(pristine)
    hostile.meta["tables"][0]["config"]["segments"][0]["dim"] = 4
    scratch.write_bytes(hostile.build())
    with pytest.raises(CorruptFileError, match="layout"):
        list(history(LogReader(scratch.parent), 5, table="user"))


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"MONOSEGM", b"MONOTABL", b"\x80\x04\x95 a pickle", b"PK\x03\x04 a zip", bytes(10_000)]
)
def test_files_of_another_kind_are_refused(content: bytes, scratch: Path) -> None:
    assert_all_refused([("another kind", content)], scratch, check)


def test_what_is_not_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / segment_name(1)).mkdir()
    (tmp_path / segment_name(2)).symlink_to(tmp_path / segment_name(2))
    os.mkfifo(tmp_path / segment_name(3))
    reader = LogReader(tmp_path)
    assert reader.sequences() == [1, 2, 3]
    for sequence in reader.sequences():
        with pytest.raises(StorageError, match=segment_name(sequence)):
            reader.info(sequence)
    # Each of them, and the file `head`, which this log does not have.
    assert [verdict.error is not None for verdict in reader.verify()] == [True] * 4


def test_a_file_that_shrinks_while_it_is_read_is_refused(pristine: bytes, scratch: Path) -> None:
    scratch.write_bytes(pristine)
    segment = LogSegment(scratch)
    pieces = iter(segment)
    next(pieces)
    os.truncate(scratch, len(pristine) // 2)
    with pytest.raises(CorruptFileError, match="shorter"):
        list(pieces)
    with pytest.raises(CorruptFileError, match="shorter"):
        segment.check()
    with pytest.raises(CorruptFileError, match="damaged"):
        LogSegment(scratch)
