"""Danger: a save returned, and is lost or torn after a power cut. The program and its disk are recorded, then the power is
cut after every change of the disk: what the program had reported as saved must be complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from disk_shim import Disk, DiskShim, Op, contents_of, read_journal, write_image

from monolith import EmbeddingTable
from monolith.table import AdmissionFilter, LocalStore, SlidingAdmission
from monolith.testing import sgd_table_config

PROGRAM = """
import sys
from pathlib import Path
import torch
from monolith import EmbeddingTable
from monolith.table import AdmissionFilter, LocalStore, SlidingAdmission
from monolith.testing import sgd_table_config

folder = Path(sys.argv[1])
table = EmbeddingTable(sgd_table_config(4), admission=AdmissionFilter(SlidingAdmission(capacity=300)))
store = LocalStore([table])
for number in range(1, 9):
    table.assign(torch.arange(50 * number), torch.full((50 * number, 4), float(number)))
    table.save(folder / "t.table")
    print("table", number, flush=True)
    store.save(folder / f"store-{number}")
    print("store", number, flush=True)
"""


def images(folder: Path, scratch: Path, seeds: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """A folder per power cut, with the last number that was reported as saved of each kind."""
    disk, number = Disk(), 0
    for record in read_journal(folder.parent / "journal"):
        disk.apply(record)
        if record.op in (Op.CLOSE, Op.OPEN):
            continue
        saved = {"table": 0, "store": 0} | {kind: int(n) for kind, n in map(str.split, disk.marks())}
        for _ in range(seeds):
            number += 1
            write_image(disk.image(number), scratch / str(number))
            yield scratch / str(number), saved
    assert disk.contents() == contents_of(folder)


def number_in(table: EmbeddingTable) -> int:
    """Which save the rows are of, after a look at all of them."""
    rows = table.lookup(torch.arange(1_000))
    number = int(rows[0, 0])
    expected = torch.zeros(1_000, 4)
    expected[: 50 * number] = number
    assert torch.equal(rows, expected)
    assert len(table) == 50 * number
    return number


def restored_store(folder: Path) -> EmbeddingTable:
    admission = AdmissionFilter(SlidingAdmission(capacity=300))
    store = LocalStore([EmbeddingTable(sgd_table_config(4), admission=admission)])
    store.restore(folder)
    return store.tables["test"]


def test_saved_tables_and_stores_survive_a_power_cut_at_any_moment(shim_library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    folder.mkdir()
    shim = DiskShim(library=shim_library, root=folder, journal=tmp_path / "journal")
    result = shim.run("-c", PROGRAM, str(folder))
    assert result.returncode == 0, result.stderr
    cuts = 0
    for image, saved in images(folder, tmp_path / "images", seeds=2):
        cuts += 1
        found = number_in(EmbeddingTable.load(image / "t.table")) if (image / "t.table").exists() else 0
        assert found in (saved["table"], saved["table"] + 1), image
        for path in image.glob("store-*"):
            # A folder appears complete or not at all, also when nobody had been told of it yet.
            assert number_in(restored_store(path)) == int(path.name[6:]), path
        assert len(list(image.glob("store-*"))) in (saved["store"], saved["store"] + 1), image
    assert cuts > 200
