"""Danger: a damaged or hostile table file that loads, crashes the process, or makes it allocate without bound.
Every damaged copy must be refused with `CorruptFileError`; a signal would end this test run, so there is nothing
to catch it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from comparison import int64, snapshot
from damage import assert_all_refused
from forked_processes import run_script
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import CorruptFileError, StorageError
from monolith.table import SGD, Adagrad, Adam, OneBit
from monolith.testing import bit_flips, scrambles, sgd_table_config, truncations


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with everything in it: two segments, optimizer slots, HashNet scales, times."""
    parts = (
        Segment(dim=3, optimizer=Adam(), precision="fp16"),
        Segment(dim=2, optimizer=Adagrad(), compressor=OneBit(step_size=2)),
    )
    table = EmbeddingTable(TableConfig(name="small", segments=parts))
    for step in range(3):
        table.apply_gradients(int64(range(-4, 8)), torch.ones(12, 5), step=step, event_time=100 + step)
    path = tmp_path_factory.mktemp("pristine") / "t"
    table.save(path)
    assert snapshot(EmbeddingTable.load(path)) == snapshot(table)
    return path.read_bytes()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A path in memory where possible: tens of thousands of files are written there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "t"


def test_every_truncation_is_refused(pristine: bytes, scratch: Path) -> None:
    assert assert_all_refused(truncations(pristine), scratch, EmbeddingTable.load) == len(pristine)


def test_every_flipped_bit_is_refused(pristine: bytes, scratch: Path) -> None:
    assert assert_all_refused(bit_flips(pristine), scratch, EmbeddingTable.load) == 8 * len(pristine)


def test_larger_accidents_are_refused(pristine: bytes, scratch: Path) -> None:
    assert assert_all_refused(scrambles(pristine, count=5_000, seed=2), scratch, EmbeddingTable.load) == 5_000


@pytest.mark.slow
def test_larger_accidents_are_refused_for_long(pristine: bytes, scratch: Path) -> None:
    for seed in range(100):
        assert_all_refused(scrambles(pristine, count=5_000, seed=seed), scratch, EmbeddingTable.load)


def blocks_of(first_id: int, scratch: Path) -> bytes:
    """A file of several blocks."""
    table = EmbeddingTable(sgd_table_config(64))
    ids = torch.arange(first_id, first_id + 40_000)
    table.assign(ids, torch.ones(40_000, 64))
    table.save(scratch)
    return scratch.read_bytes()


def test_damage_beyond_the_first_block_is_refused(scratch: Path) -> None:
    data = blocks_of(0, scratch)
    assert data.count(b"BLCK") > 1
    assert_all_refused(bit_flips(data, count=40, seed=4), scratch, EmbeddingTable.load)
    assert_all_refused(truncations(data, count=20, seed=5), scratch, EmbeddingTable.load)


def test_blocks_missing_repeated_or_of_another_file_are_refused(scratch: Path) -> None:
    # Each block's checksum is right; only the footer knows what belongs together.
    data, other = blocks_of(0, scratch), blocks_of(1_000_000, scratch)
    places = [match.start() for match in re.finditer(b"BLCK", data)]
    end = data.rindex(b"TEND")
    blocks = [data[begin:stop] for begin, stop in zip(places, [*places[1:], end], strict=True)]
    head, foot = data[: places[0]], data[end:]
    assert len(blocks) > 1
    assert head + b"".join(blocks) + foot == data
    foreign = other[places[0] : places[0] + len(blocks[0])]
    cases = {
        "first block missing": head + b"".join(blocks[1:]) + foot,
        "last block missing": head + b"".join(blocks[:-1]) + foot,
        "no blocks": head + foot,
        "a block twice": head + b"".join([*blocks, blocks[-1]]) + foot,
        "a block replaced by its neighbour": head + b"".join([blocks[0], blocks[0], *blocks[2:]]) + foot,
        "a foreign block appended": head + b"".join([*blocks, foreign]) + foot,
        "two files in one": data + other,
        "no footer": head + b"".join(blocks),
        "two footers": data + foot,
    }
    assert_all_refused(cases.items(), scratch, EmbeddingTable.load)


def crc32c(data: bytes) -> int:
    """The file's checksum, bit by bit: slow, and independent of the core."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Hostile:
    """A file written by someone who knows the format and keeps every checksum right."""

    def __init__(self, data: bytes) -> None:
        self.row_bytes, layout, metadata = struct.unpack_from("<III", data, 12)
        self.version = struct.unpack_from("<I", data, 8)[0]
        self.layout = data[24 : 24 + layout]
        self.metadata = data[24 + layout : 24 + layout + metadata]
        first = 24 + layout + metadata + 4
        self.rows, length = struct.unpack_from("<IQ", data, first + 4)
        self.payload = data[first + 24 : first + 24 + length]
        foot = first + 24 + length
        self.footer = list(struct.unpack_from("<IIQQII", data, foot))
        self.scales = data[foot + 32 : -4]
        self.block_rows, self.block_length = self.rows, length
        assert self.build() == data, "the file format is not what this test thinks it is"

    def build(self) -> bytes:
        head = b"MONOTABL" + struct.pack("<IIII", self.version, self.row_bytes, len(self.layout), len(self.metadata))
        head += self.layout + self.metadata
        block = b"BLCK" + struct.pack("<IQI", self.block_rows, self.block_length, crc32c(self.payload))
        block += struct.pack("<I", crc32c(block))
        foot = struct.pack("<IIQQII", *self.footer) + self.scales
        return head + struct.pack("<I", crc32c(head)) + block + self.payload + foot + struct.pack("<I", crc32c(foot))

    def set_config(self, **changes: object) -> None:
        self.metadata = json.dumps({**json.loads(self.metadata), **changes}).encode()


def _too_new(h: Hostile) -> None:
    h.version = 2


def _far_too_new(h: Hostile) -> None:
    h.version = 2**32 - 1


def _version_zero(h: Hostile) -> None:
    h.version = 0


def _other_layout(h: Hostile) -> None:
    h.layout = h.layout.replace(b"adagrad", b"adadelta")


def _wider_rows(h: Hostile) -> None:
    h.row_bytes += 4


def _no_row_bytes(h: Hostile) -> None:
    h.row_bytes = 0


def _endless_rows(h: Hostile) -> None:
    h.row_bytes = 2**32 - 1


def _not_json(h: Hostile) -> None:
    h.metadata = b"\x00not json"


def _not_utf8(h: Hostile) -> None:
    h.metadata = b'{"name": "\xff\xfe"}'


def _empty_metadata(h: Hostile) -> None:
    h.metadata = b""


def _deep_json(h: Hostile) -> None:
    h.metadata = b"[" * 100_000


def _unknown_field(h: Hostile) -> None:
    h.set_config(surprise=1)


def _another_dim(h: Hostile) -> None:
    config = json.loads(h.metadata)
    config["segments"][0]["dim"] = 4
    h.metadata = json.dumps(config).encode()


def _huge_dim(h: Hostile) -> None:
    config = json.loads(h.metadata)
    config["segments"][0]["dim"] = 10**12
    h.metadata = json.dumps(config).encode()


def _nan_hyperparameter(h: Hostile) -> None:
    h.metadata = h.metadata.replace(b'"beta1":0.9', b'"beta1":NaN')


def _huge_number(h: Hostile) -> None:
    h.set_config(seed=10**400)


def _seed_of_65_bits(h: Hostile) -> None:
    h.set_config(seed=2**64)


def _more_rows_than_bytes(h: Hostile) -> None:
    h.block_rows = 2**32 - 1


def _endless_block(h: Hostile) -> None:
    h.block_length = 2**63


def _wrapping_block(h: Hostile) -> None:
    h.block_rows, h.block_length = 2**31, 2**64 - 24


def _no_rows(h: Hostile) -> None:
    h.block_rows, h.block_length, h.payload = 0, 0, b""


def _footer_counts_more(h: Hostile) -> None:
    h.footer[3] += 1


def _footer_counts_endless(h: Hostile) -> None:
    h.footer[3] = 2**64 - 1


def _footer_counts_more_blocks(h: Hostile) -> None:
    h.footer[2] = 2**63


def _footer_of_more_segments(h: Hostile) -> None:
    h.footer[1] += 1
    h.scales += b"\0\0\0\0"


def _footer_of_endless_segments(h: Hostile) -> None:
    h.footer[1] = 2**32 - 1


def _an_id_twice(h: Hostile) -> None:
    h.payload = h.payload[:8] + h.payload[:8] + h.payload[16:]


def _nan_scale(h: Hostile) -> None:
    h.scales = struct.pack("<ff", 1.0, float("nan"))


def _negative_scale(h: Hostile) -> None:
    h.scales = struct.pack("<ff", 1.0, -1.0)


HOSTILE: list[Callable[[Hostile], None]] = [
    _too_new,
    _far_too_new,
    _version_zero,
    _other_layout,
    _wider_rows,
    _no_row_bytes,
    _endless_rows,
    _not_json,
    _not_utf8,
    _empty_metadata,
    _deep_json,
    _unknown_field,
    _another_dim,
    _huge_dim,
    _nan_hyperparameter,
    _huge_number,
    _seed_of_65_bits,
    _more_rows_than_bytes,
    _endless_block,
    _wrapping_block,
    _no_rows,
    _footer_counts_more,
    _footer_counts_endless,
    _footer_counts_more_blocks,
    _footer_of_more_segments,
    _footer_of_endless_segments,
    _an_id_twice,
    _nan_scale,
    _negative_scale,
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda f: f.__name__.strip("_"))
def test_right_checksums_do_not_make_it_right(
    change: Callable[[Hostile], None], pristine: bytes, scratch: Path
) -> None:
    hostile = Hostile(pristine)
    change(hostile)
    data = hostile.build()
    assert data != pristine
    assert_all_refused([(change.__name__, data)], scratch, EmbeddingTable.load)


LOAD_WITH_LITTLE_MEMORY = """
import resource, sys
from monolith import EmbeddingTable
from monolith.errors import CorruptFileError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
for path in sys.argv[1:]:
    try:
        EmbeddingTable.load(path)
    except CorruptFileError:
        pass
"""


def test_a_file_cannot_ask_for_room_it_does_not_fill(pristine: bytes, tmp_path: Path) -> None:
    # `initial_capacity` is the writer's wish; a dozen rows are in the file.
    paths = []
    for capacity in (10**9, 10**12, 2**62):
        hostile = Hostile(pristine)
        hostile.set_config(initial_capacity=capacity)
        paths.append(tmp_path / str(capacity))
        paths[-1].write_bytes(hostile.build())
    script = tmp_path / "load.py"
    script.write_text(LOAD_WITH_LITTLE_MEMORY)
    child = run_script(script, *map(str, paths))
    assert child.returncode == 0, child.stderr


def test_a_newer_version_says_to_upgrade(pristine: bytes, tmp_path: Path) -> None:
    hostile = Hostile(pristine)
    hostile.version = 2
    (tmp_path / "t").write_bytes(hostile.build())
    with pytest.raises(CorruptFileError, match=r"version 2.*upgrade"):
        EmbeddingTable.load(tmp_path / "t")


def test_a_file_of_another_layout_names_both(pristine: bytes, tmp_path: Path) -> None:
    hostile = Hostile(pristine)
    hostile.layout = hostile.layout.replace(b"adagrad", b"adadelta")
    (tmp_path / "t").write_bytes(hostile.build())
    with pytest.raises(CorruptFileError) as error:
        EmbeddingTable.load(tmp_path / "t")
    assert "adadelta" in str(error.value)
    assert "adagrad" in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"MONOTABL", b"\x80\x04\x95 a pickle", b"PK\x03\x04 a zip", bytes(10_000)]
)
def test_files_of_another_kind_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(CorruptFileError, match=str(tmp_path)):
        EmbeddingTable.load(tmp_path / "t")


def test_what_is_not_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_bytes(b"")
    for name in ("missing", "", "file/below", "loop", "no/such/folder"):
        with pytest.raises((StorageError, CorruptFileError)) as error:
            EmbeddingTable.load(tmp_path / name)
        assert isinstance(error.value, OSError | CorruptFileError)
        assert str(tmp_path) in str(error.value)
    with pytest.raises(StorageError):
        EmbeddingTable.load("/dev/null")


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = tmp_path / "load.py"
    script.write_text("import sys; from monolith import EmbeddingTable; EmbeddingTable.load(sys.argv[1])")
    # In a process of its own: a call that waits does so for ever.
    child = run_script(script, str(tmp_path / "fifo"))
    assert "StorageError" in child.stderr


def test_a_missing_file_is_an_oserror_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        EmbeddingTable.load(tmp_path / "missing")


def test_a_path_with_a_null_byte_is_refused_whole(tmp_path: Path) -> None:
    # Cut at the null it would name another file.
    table = EmbeddingTable(sgd_table_config(1))
    table.save(tmp_path / "t")
    with pytest.raises((ValueError, OSError)):
        EmbeddingTable.load(f"{tmp_path}/t\0suffix")
    with pytest.raises((ValueError, OSError)):
        table.save(f"{tmp_path}/u\0suffix")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_refused_files_leave_no_memory_and_no_descriptor_behind(pristine: bytes, scratch: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    flips = list(bit_flips(pristine, count=400, seed=6))
    assert_all_refused(flips, scratch, EmbeddingTable.load)
    memory, descriptors = resident(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        assert_all_refused(flips, scratch, EmbeddingTable.load)
    # Fewer, if something of an earlier test was collected meanwhile.
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    assert resident() - memory < 32 << 20


def test_a_table_loaded_from_a_shared_file_does_not_share_rows(tmp_path: Path) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=2, optimizer=SGD(learning_rate=1.0)),)))
    table.reinitialize(int64([1]))
    table.save(tmp_path / "t")
    first, second = EmbeddingTable.load(tmp_path / "t"), EmbeddingTable.load(tmp_path / "t")
    first.apply_gradients(int64([1]), torch.ones(1, 2))
    np.testing.assert_array_equal(second.lookup(int64([1])).numpy(), table.lookup(int64([1])).numpy())
