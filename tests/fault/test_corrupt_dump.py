"""Danger: a damaged file of the original, or a damaged Parquet file, that crashes the process or becomes other rows.

Every damaged file must end in a typed error or in exactly the rows that were written. For a dump without a count the rows of
whole records at its beginning are also right: a file cut between two records is a shorter file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from comparison import float32
from dumps import masked_crc32c, sorted_rows
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import CorruptFileError, MonolithError
from monolith.original import export_dump, export_multi_dump, import_dump, import_multi_dump
from monolith.table import Adagrad, Adam
from monolith.table.exchange import export_parquet, import_parquet
from monolith.testing import bit_flips, scrambles, truncations

CONFIG = TableConfig(name="t", segments=(Segment(dim=3, optimizer=Adagrad()), Segment(dim=2, optimizer=Adam())))
OTHER = TableConfig(name="u", segments=(Segment(dim=1),))


def table(config: TableConfig, rows: int = 40) -> EmbeddingTable:
    made = EmbeddingTable(config)
    grads = np.random.default_rng(7).normal(size=(rows, made.dim))
    made.apply_gradients(np.arange(rows) * 12345, float32(grads), event_time=1_700_000_000)
    return made


def damages(data: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    return chain(
        bit_flips(data, count=count), truncations(data, count=count, seed=1), scrambles(data, count=count, seed=2)
    )


def refused(file: Path, read: Callable[[], EmbeddingTable], count: int) -> dict[str, EmbeddingTable]:
    """Damage `file` in many ways; returns the tables that were read all the same."""
    good = file.read_bytes()
    accepted: dict[str, EmbeddingTable] = {}
    tried = 0
    for what, damaged in damages(good, count):
        file.write_bytes(damaged)
        tried += 1
        try:
            accepted[what] = read()
        except MonolithError:
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__} instead of an error of ours") from error
    file.write_bytes(good)
    assert tried > 2 * count
    return accepted


def is_part_of(some: EmbeddingTable, whole: EmbeddingTable) -> bool:
    rows, expected = sorted_rows(some), sorted_rows(whole)
    there = np.isin(expected["ids"], rows["ids"])
    return all(np.array_equal(rows[name], column[there]) for name, column in expected.items())


def test_single_table_dump(tmp_path: Path) -> None:
    original = table(CONFIG)
    (file,) = export_dump(original, str(tmp_path / "t"))
    accepted = refused(file, lambda: import_dump(str(tmp_path / "t"), CONFIG), 150)
    # Whole records removed or repeated.
    assert all(is_part_of(each, original) for each in accepted.values()), list(accepted)
    assert len(accepted) < 30


@pytest.mark.parametrize("which", [0, 1])
def test_multi_table_dump(which: int, tmp_path: Path) -> None:
    original = table(CONFIG)
    files = export_multi_dump([original, table(OTHER)], str(tmp_path / "all"))
    configs = {"t": CONFIG, "u": OTHER}
    accepted = refused(files[which], lambda: import_multi_dump(str(tmp_path / "all"), configs)["t"], 150)
    assert accepted == {}


def test_parquet(tmp_path: Path) -> None:
    original = table(CONFIG)
    file = export_parquet(original, tmp_path / "t.parquet")
    accepted = refused(file, lambda: import_parquet(file), 150)
    for what, each in accepted.items():
        assert (len(each), each.config) == (len(original), CONFIG), what
        assert is_part_of(each, original), what


HEADERS = {
    b"\xff\xff\xff\xff": "a snappy block of 4294967295 bytes",
    b"\x0f\xff\xff\xff": "ends in the middle of a snappy block",
    # Five bytes that claim to be four gigabytes: refused by their number, before any memory is asked for.
    b"\x00\x00\x00\x05\xff\xff\xff\xff\x0f": "a snappy block is damaged, or the file is not a snappy stream",
}


@pytest.mark.parametrize("header", HEADERS)
def test_snappy_blocks_that_ask_for_all_memory(header: bytes, tmp_path: Path) -> None:
    data, _ = export_multi_dump([table(CONFIG)], str(tmp_path / "all"))
    data.write_bytes(header + data.read_bytes()[len(header) :])
    with pytest.raises(CorruptFileError, match=HEADERS[header]):
        import_multi_dump(str(tmp_path / "all"), {"t": CONFIG})


def test_a_record_that_asks_for_all_memory(tmp_path: Path) -> None:
    header = struct.pack("<Q", 1 << 40)
    (tmp_path / "t-00000-of-00001").write_bytes(header + masked_crc32c(header) + bytes(1000))
    with pytest.raises(CorruptFileError, match="record 0 has 1099511627776 bytes, the limit is"):
        import_dump(str(tmp_path / "t"), CONFIG)
