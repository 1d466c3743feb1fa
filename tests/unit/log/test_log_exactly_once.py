"""Danger: after a crash, a record that is trained twice or never, because rows and position in the data are of two moments.

The job is a pure function of which records were trained: every record adds one to the row of its id. It is stopped again and
again, its memory is thrown away, and it goes on from any restore point; in the end every record must have counted once.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from monolith import EmbeddingTable
from monolith.log import ChangeLog, LogReader, replay
from monolith.testing import sgd_table_config

RECORDS, IDS = 120, 11


def restored(folder: Path, to: int) -> tuple[EmbeddingTable, int, int]:
    """The table, the next record and the dense sum at sequence `to`."""
    table, reader = EmbeddingTable(sgd_table_config(1)), LogReader(folder)
    if to == 0:
        return table, 0, 0
    for info in reader.chain(to):
        replay(reader.read(info.sequence), {"test": table})
    segment = reader.read(to)
    return table, segment.source()["record"], segment.dense()["sum"]  # type: ignore[index]


def run(folder: Path, parent: int, rng: random.Random) -> bool:
    """Train from `parent` on until the end, or until the power fails; whether it was the end."""
    table, record, total = restored(folder, parent)
    with ChangeLog(folder, [table], parent=parent) as log:
        while record < RECORDS:
            table.assign_add([record % IDS], torch.ones(1, 1))
            record, total = record + 1, total + record
            if rng.random() < 0.3:
                commit = rng.choice([log.commit, log.commit_in_background])
                commit(step=record, source={"record": record}, dense={"sum": total})
            if rng.random() < 0.03:
                return False
        log.commit(step=record, source={"record": record}, dense={"sum": total})
    return True


@pytest.mark.parametrize("seed", range(8))
def test_every_record_counts_once(tmp_path: Path, seed: int) -> None:
    rng, parent, runs = random.Random(seed), 0, 1
    while not run(tmp_path, parent, rng):
        runs += 1
        points = [0, *(info.sequence for info in LogReader(tmp_path).restore_points())]
        parent = rng.choice(points[-3:])
    table, record, total = restored(tmp_path, LogReader(tmp_path).newest)
    assert (record, total) == (RECORDS, sum(range(RECORDS)))
    assert table.lookup(torch.arange(IDS)).flatten().tolist() == [len(range(i, RECORDS, IDS)) for i in range(IDS)]
    assert runs > 1
