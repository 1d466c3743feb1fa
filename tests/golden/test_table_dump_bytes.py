"""Danger: a dump whose bytes the original cannot read, or reads as other numbers.

The bytes are written out by hand, from the message definitions and TensorFlow's framing. They may never change.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

from comparison import float32, int64
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.original import dump_counts, export_dump, export_multi_dump, import_dump, import_multi_dump
from monolith.table import SGD, Adagrad, Constant

# Id 258 with the values 1, 2, 0.5, an Adagrad norm of 0.25 twice, and the time 300.
ENTRY = bytes.fromhex(
    "09 0201000000000000"  # 1: id
    "15 0000803f 15 00000040 15 0000003f"  # 2: num, unpacked
    "1a 12"  # 3: opt, 18 bytes
    "0a 0c 0a 0a 0d 0000803e 0d 0000803e"  # dump of segment 0: adagrad with norm
    "0a 02 12 00"  # dump of segment 1: sgd, empty
    "20 ac02"  # 4: last_update_ts_sec
)
# Length 47, its masked CRC-32C, the entry, its masked CRC-32C.
RECORD = bytes.fromhex("2f00000000000000 6d5d1d50") + ENTRY + bytes.fromhex("8a3d7e78")
# table_name "t" and num_entries 1, framed.
META = bytes.fromhex("0500000000000000 eab2043e 0a01741001 db3bb953")


def golden_table() -> EmbeddingTable:
    segments = (
        Segment(dim=2, optimizer=Adagrad(initial_accumulator_value=0.25)),
        Segment(dim=1, initializer=Constant(value=0.5), optimizer=SGD()),
    )
    table = EmbeddingTable(TableConfig(name="t", segments=segments))
    table.assign(int64([258]), float32([[1, 2, 0.5]]), event_time=300)
    return table


def assert_golden(table: EmbeddingTable) -> None:
    entries = table.lookup_entry([258])
    assert entries.values.tolist() == [[1, 2, 0.5]]
    assert entries.slots["0/norm"].tolist() == [[0.25, 0.25]]
    assert entries.times.tolist() == [300]
    assert len(table) == 1


def test_single_table_file(tmp_path: Path) -> None:
    (file,) = export_dump(golden_table(), str(tmp_path / "t"))
    assert file == tmp_path / "t-00000-of-00001"
    assert file.read_bytes() == RECORD
    assert_golden(import_dump(str(tmp_path / "t"), golden_table().config))


def test_multi_table_file(tmp_path: Path) -> None:
    data, meta = export_multi_dump([golden_table()], str(tmp_path / "all"))
    assert (data.name, meta.name) == ("all-00000-of-00001", "all.meta-00000-of-00001")
    assert meta.read_bytes() == META
    block = data.read_bytes()
    assert block[:4] == struct.pack(">I", len(block) - 4)
    assert pa.decompress(block[4:], len(RECORD), codec="snappy", asbytes=True) == RECORD


def test_snappy_blocks_of_literals(tmp_path: Path) -> None:
    # Raw snappy without any compression: the plain size, then one literal, tagged with its length less one times four.
    (tmp_path / "all.meta-00000-of-00001").write_bytes(META)
    first, second = RECORD[:20], RECORD[20:]
    blocks = [bytes([len(part), len(part) - 1 << 2]) + part for part in (first, second)]
    (tmp_path / "all-00000-of-00001").write_bytes(b"".join(bytes([0, 0, 0, len(b)]) + b for b in blocks))
    assert dump_counts(str(tmp_path / "all")) == {"t": 1}
    assert_golden(import_multi_dump(str(tmp_path / "all"), {"t": golden_table().config})["t"])
