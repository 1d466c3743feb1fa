"""Danger: a release that cannot read the checkpoints of the one before.

`checkpoint-v1` is a model_dir as version 1 wrote it, by `write_run` below. It may never change. What is written now may have
other bytes, but has the same fields until the version is raised; the reader of each old version stays.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from monolith import CorruptFileError, EmbeddingTable, Segment, TableConfig, _core
from monolith.log import ChangeLog
from monolith.state import (
    find_restore_point,
    inspect_checkpoint,
    read_row,
    read_state,
    restore_tables,
    write_checkpoint,
)
from monolith.table import SGD, Adagrad, AdmissionFilter, SlidingAdmission, Zeros, bucket_of

VERSION_1 = Path(__file__).with_name("checkpoint-v1")
FILTER = SlidingAdmission(capacity=300, split_num=5, slot_thresholds={3: 1})
FILTERED = (3 << 48) + 7


def new_user() -> EmbeddingTable:
    parts = (
        Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),
        Segment(dim=2, initializer=Zeros(), optimizer=Adagrad(learning_rate=1.0), precision="fp16"),
    )
    return EmbeddingTable(TableConfig(name="user", segments=parts, seed=9), admission=AdmissionFilter(FILTER))


def values(ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Numbers that fp16 holds exactly."""
    return torch.stack([ids * scale, ids / 2, -ids.double()], dim=1).float()


def write_run(folder: Path) -> None:
    """Checkpoint 1 with a snapshot, 2 with what changed, 3 in two shards and without a log."""
    user = new_user()
    with ChangeLog(folder / "log", [user], clock=lambda: 1000.0) as log:
        for step in (1, 2):
            ids = torch.arange(1, 5) if step == 1 else torch.tensor([2, 50])
            user.assign(ids, values(ids, step), event_time=100 * step)
            # Admitted the second time.
            user.apply_gradients([FILTERED], torch.ones(1, 3), step=step, event_time=100 * step)
            if step == 2:
                user.erase([3])
            write_checkpoint(
                folder / f"model.ckpt-{step}",
                state={"w": torch.tensor([float(step)]), "source": {"rows": [step, None]}},
                step=step,
                tables=[user],
                log=log,
                full=step == 1,
                config={"seed": 5},
                time=1000.0 + step,
            )
        log.commit(step=3, dense={"w": torch.tensor([3.0])}, source={"rows": 3})
    shards = [new_user(), new_user()]
    for shard, even in zip(shards, (True, False), strict=True):
        ids = torch.tensor([id_ for id_ in range(20) if (int(bucket_of([id_])[0]) < 2048) == even])
        shard.assign(ids, values(ids))
    write_checkpoint(folder / "model.ckpt-3", state={}, step=3, tables=shards, time=1003.0)


@pytest.mark.parametrize("shards", [1, 3])
def test_version_1_is_restored(shards: int) -> None:
    def rows(path: Path) -> dict[int, list[float]]:
        tables = [new_user() for _ in range(shards)]
        restore_tables(path, tables)
        entries = [table.entries() for table in tables]
        return {id_: row for part in entries for id_, row in zip(part.ids.tolist(), part.values.tolist(), strict=True)}

    assert rows(VERSION_1 / "model.ckpt-1") == {id_: [id_, id_ / 2, -id_] for id_ in (1, 2, 3, 4)}
    second = rows(VERSION_1 / "model.ckpt-2")
    assert {id_: row for id_, row in second.items() if id_ != FILTERED} == {
        1: [1.0, 0.5, -1.0],
        2: [4.0, 1.0, -2.0],
        4: [4.0, 2.0, -4.0],
        50: [100.0, 25.0, -50.0],
    }
    assert second[FILTERED] == pytest.approx([-1.0, -1 / 1.1**0.5, -1 / 1.1**0.5], rel=1e-3)
    assert rows(VERSION_1 / "model.ckpt-3") == {id_: [id_, id_ / 2, -id_] for id_ in range(20)}


def test_slots_times_state_and_counts_of_version_1() -> None:
    user = new_user()
    restore_tables(VERSION_1 / "model.ckpt-1", [user])
    assert (user.state().max_event_time, user.state().updates) == (100, 1)
    user.apply_gradients([FILTERED], torch.ones(1, 3))
    assert FILTERED in user, "its first occurrence had been counted"
    row = read_row(VERSION_1 / "model.ckpt-2", "user", FILTERED)
    assert row is not None
    assert row.times.tolist() == [200]
    torch.testing.assert_close(row.slots["1/norm"], torch.tensor([[1.1, 1.1]]))


def test_states_and_restore_points_of_version_1() -> None:
    assert read_state(VERSION_1 / "model.ckpt-2") == {"w": torch.tensor([2.0]), "source": {"rows": [2, None]}}
    found = inspect_checkpoint(VERSION_1 / "model.ckpt-2")
    assert (found.step, found.time, found.sequence, found.config, found.segments) == (2, 1002.0, 2, {"seed": 5}, 2)
    point = find_restore_point(VERSION_1, sequence=3)
    assert (point.step, point.state()) == (3, {"w": torch.tensor([3.0]), "source": {"rows": 3}})


def fields(value: object) -> object:
    """The names of all fields; of lists, those of their first element; names of tables and states are content."""
    if isinstance(value, dict):
        return {name: fields(part) for name, part in value.items()}
    return fields(value[0]) if isinstance(value, list) and value else None


def test_what_is_written_has_the_fields_of_version_1(tmp_path: Path) -> None:
    write_run(tmp_path)
    golden, fresh = (
        # `head` came later: a log without one is read, with a warning.
        {p.relative_to(root): p for p in root.rglob("*") if p.is_file() and p.name not in ("writer.lock", "head")}
        for root in (VERSION_1, tmp_path)
    )
    assert sorted(golden) == sorted(fresh)
    for name, path in golden.items():
        if path.name == "manifest.json":
            assert fields(json.loads(fresh[name].read_text())) == fields(json.loads(path.read_text())), name


def test_a_newer_version_is_refused_politely(tmp_path: Path) -> None:
    write_run(tmp_path)
    for manifest in tmp_path.rglob("manifest.json"):
        body = manifest.read_bytes().rpartition(b',"checksum"')[0].replace(b'"version":1', b'"version":2')
        manifest.write_bytes(body + b',"checksum":%d}\n' % _core.crc32c(body))
    for step in (1, 2, 3):
        with pytest.raises(CorruptFileError, match=r"version 2 is newer .*; upgrade monolith-torch"):
            restore_tables(tmp_path / f"model.ckpt-{step}", [new_user()])
