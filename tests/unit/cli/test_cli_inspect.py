"""Danger: `monolith inspect` of a checkpoint or run says something else than what a restore would find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tables import new_table, train
from monolith import EmbeddingTable
from monolith.cli import main
from monolith.features import hash_strings
from monolith.log import ChangeLog
from monolith.state import write_checkpoint
from monolith.testing import sgd_table_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        for step in (1, 2):
            train(table, range(10 * step), step=step)
            path = tmp_path / f"model.ckpt-{step}"
            write_checkpoint(path, state={}, step=step, tables=[table], log=log, config={"seed": 3}, full=step == 1)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, run / "model.ckpt-2", "--id", 15)
    assert (found["kind"], found["step"], found["problem"], found["config"]) == ("checkpoint", 2, None, {"seed": 3})
    assert (found["snapshot"], found["segments"]) == ("0" * 20, 2)
    table = found["tables"]["user"]
    assert (table["rows"], table["dim"], table["shards"], table["newest_event_time"]) == (20, 5, 1, 2)
    assert (len(table["id"]["values"]), table["id"]["time"]) == (5, 2)
    assert table["bytes"] == 20 * table["row_bytes"] > 0
    assert (sum(int(part.split()[0]) for part in table["segments"]), table["segments"][0]) == (5, "3 adam")
    assert answer(capsys, run / "model.ckpt-1", "--id", 15)["tables"]["user"]["id"].startswith("no row")
    assert main(["inspect", str(run / "model.ckpt-2")]) == 0
    text = capsys.readouterr().out
    assert "tables.user.rows" in text
    # Nothing is wrong: a person need not read that there is no problem.
    assert "problem" not in text


def test_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, run)
    assert (found["kind"], found["step"], found["checkpoints"], found["problem"]) == ("run", 2, [1, 2], None)
    assert found["tables"]["user"]["rows"] == 20
    assert found["newest_checkpoint"] == str(run / "model.ckpt-2")


def test_what_is_damaged_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "log" / f"{2:020d}.segment").unlink()
    found = answer(capsys, run / "model.ckpt-2", "--id", 15)
    assert "the file is missing" in found["problem"]
    assert "id" not in found["tables"]["user"]
    assert "--restore-to sequence=1" in answer(capsys, run)["problem"]


def test_a_url(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(f"memory://{tmp_path.name}/model.ckpt-4", state={}, step=4)
    assert answer(capsys, f"memory://{tmp_path.name}")["step"] == 4
    assert answer(capsys, f"memory://{tmp_path.name}/model.ckpt-4")["kind"] == "checkpoint"


def test_a_text_is_looked_up_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = EmbeddingTable(sgd_table_config(2, name="item"))
    table.reinitialize(hash_strings(["item-5"]))
    table.save(tmp_path / "item.table")
    found = answer(capsys, tmp_path / "item.table", "--text", "item-5")
    assert (found["text"], found["text_id"]) == ("item-5", hash_strings(["item-5"]).item())
    assert len(found["tables"]["item"]["id"]["values"]) == 2
    assert answer(capsys, tmp_path / "item.table", "--text", "new")["tables"]["item"]["id"].startswith("no row")
    assert main(["inspect", f"{tmp_path}/item.table", "--text", "item-5", "--id", "5"]) == 2
    assert "--id, --text: expected one of them" in capsys.readouterr().err


def test_of_many_slots_only_the_largest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = EmbeddingTable(sgd_table_config(2, name="item"))
    table.reinitialize([slot << 48 | n for slot in range(1, 31) for n in range(2 if slot > 25 else 1)])
    table.save(tmp_path / "item.table")
    found = answer(capsys, tmp_path / "item.table")["tables"]["item"]
    assert found["rows_by_slot"] == {
        **{str(slot): 1 for slot in range(1, 6)},
        **{str(slot): 2 for slot in range(26, 31)},
    }
    assert found["other_slots"] == 20
