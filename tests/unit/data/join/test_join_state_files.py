"""Danger: state that is damaged is believed, or the files of today cannot be read by the next release."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.data.join.state import SnapshotStore
from monolith.errors import CorruptFileError

ENTRIES = {b"key %d" % number: bytes([number % 256]) * (9 + number) for number in range(30)}


def saved(folder: Path) -> Path:
    SnapshotStore(folder).save(b'{"version":1}', ENTRIES, epoch=2)
    (path,) = folder.glob("*.windows")
    return path


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    assert SnapshotStore(tmp_path).load() == (b'{"version":1}', ENTRIES)


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        with pytest.raises(CorruptFileError):
            SnapshotStore(tmp_path).load()


def test_any_cut_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError, match=r"restore the folder from a copy|is cut short"):
            SnapshotStore(tmp_path).load()


def test_what_a_fenced_joiner_writes_late_is_not_the_newest(tmp_path: Path) -> None:
    stale, current = SnapshotStore(tmp_path), SnapshotStore(tmp_path)
    for number in range(12):
        stale.save(b"stale %d" % number, {}, epoch=9)
    current.load()
    current.save(b"current", {}, epoch=10)
    stale.save(b"stale", {}, epoch=9)
    found = SnapshotStore(tmp_path).load()
    assert found is not None
    assert found[0] == b"current"


def test_the_bytes_are_those_of_version_1(tmp_path: Path) -> None:
    """Golden: they change with the version only."""
    SnapshotStore(tmp_path).save(b"{}", {b"k": b"entry"}, epoch=1)
    (path,) = tmp_path.glob("*.windows")
    assert path.name == "0000000001-0000000001.windows"
    assert path.read_bytes().hex() == GOLDEN


GOLDEN = "4d4f4e4f4a4f494e0100000002000000aa8238067b7d0c000000040c24ce0100050000006b656e7472790000000000000000"
