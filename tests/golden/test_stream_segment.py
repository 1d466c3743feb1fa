"""Danger: a release that cannot read the streams in folders of the one before. These bytes may change only together with the
version; the reader of each old version stays.
"""

from __future__ import annotations

from pathlib import Path

from monolith.streams import FolderStream, create_folder_stream
from monolith.streams.folder.format import StreamSegmentHeader, closing_mark, encode_batch, stream_segment_name
from monolith.streams.stream import NewRecord

BASE = 2**40
RECORDS: list[NewRecord] = [
    (b"one", None, 1_700_000_000_000, ()),
    (b"", b"", 1_700_000_000_002, (("origin", b"\x00\xff"), ("\u00fc", b""))),
    (b"three", b"key", 1_700_000_000_001, ()),
]
VERSION_1 = bytes.fromhex(
    "4d4f4e4f5354524d37b2bcd001000000000102030405060708090a0b0c0d0e0f"
    "101112131415161718191a1b1c1d1e1f00000000000100000700000000000000"
    "4d534231aa378071c576659f9d00000003000000030000000000000000010000"
    "0068e5cf8b0100000268e5cf8b01000040000000000000000800000003000000"
    "0300000000000000050000000068e5cf8b0100000268e5cf8b0100000168e5cf"
    "8b010000ffffffff00000000030000000000000016000000000000006f6e6574"
    "687265656b65790600020000006f726967696e00ff020000000000c3bc4d5342"
    "317fcc3d58000000004000000000000000040000000300000000010000ffffff"
    "ffffffffffffffffffffffffffdd000000000000000000000000000000"
)


def test_the_bytes_of_a_segment() -> None:
    header = StreamSegmentHeader(stream=bytes(range(16)), boot=bytes(range(16, 32)), base=BASE, previous_end=7).pack()
    batch = encode_batch(RECORDS, BASE, len(header))
    assert header + batch + closing_mark(BASE + 3, len(header) + len(batch)) == VERSION_1


def test_a_segment_of_version_1_is_read(tmp_path: Path) -> None:
    create_folder_stream(tmp_path / "events", 1)
    (tmp_path / "events" / "0" / stream_segment_name(BASE)).write_bytes(VERSION_1)
    stream = FolderStream(tmp_path / "events")
    assert stream.bounds() == {"events/0": (BASE, BASE + 3)}
    with stream.reader() as reader:
        reader.assign({"events/0": 7})
        (records,) = reader.poll(10, 60)
    assert list(records.offsets) == [BASE, BASE + 1, BASE + 2]
    headers = records.headers or []
    assert list(zip(records.values, records.keys, records.timestamps, headers, strict=True)) == RECORDS
