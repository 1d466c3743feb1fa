"""Danger: a command does not understand a run of ranks, and says that it is empty or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monolith.cli import main
from monolith.state.restore_points import restore_point_at
from monolith.testing.rank_threads import run_ranks
from rank_state_run import RankRun, new_tables, rows_at, rows_of


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with a checkpoint of step 7 and a cut of step 8."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, lambda mesh: RankRun(mesh, str(folder), cut_every=100, cut_at_end=True).run(8))
    return folder


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What a command prints, read if it is JSON."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path, code: int = 0, as_json: bool = True) -> Any:  # noqa: ANN401
        assert main([*map(str, arguments), *["--json"] * as_json]) == code
        out = capsys.readouterr().out
        return json.loads(out) if as_json else " ".join(out.split())

    return run


Answer = Callable[..., Any]


def test_the_moments_of_the_run_are_listed(model_dir: Path, answer: Answer) -> None:
    points = answer("checkpoint", "list", model_dir)["restore_points"]
    assert [(p["checkpoint"], p["step"], p["parts"]) for p in points] == [("model.ckpt-7", 7, 2), (None, 8, 2)]
    assert "2 parts of ranks" in answer("checkpoint", "list", model_dir, as_json=False)


def test_cuts_are_in_the_log_with_the_segments_they_name(model_dir: Path, answer: Answer) -> None:
    segments = answer("log", "list", model_dir)["segments"]
    assert [segment["step"] for segment in segments] == [7, 8]
    assert segments[-1]["parts"] == [f"ps/{n}/log/00000000000000000002.segment" for n in (0, 1)]
    assert "2 ranks" in answer("log", "list", model_dir, as_json=False)


def test_the_log_of_a_rank_is_listed_like_any_other(model_dir: Path, answer: Answer) -> None:
    segments = answer("log", "list", model_dir / "ps" / "1")["segments"]
    assert [segment["step"] for segment in segments] == [7, 8]


def test_a_run_of_ranks_is_verified_with_its_ranks(model_dir: Path, answer: Answer) -> None:
    found = answer("verify", model_dir)
    assert (found["problems"], found["servers"], found["ranks"]) == ([], 0, 2)
    assert "segments, 2 ranks: 0 problems" in answer("verify", model_dir, as_json=False)


def test_the_only_part_of_a_moment_is_one(tmp_path: Path, answer: Answer) -> None:
    run_ranks(1, lambda mesh: RankRun(mesh, str(tmp_path)).run(2))
    assert "1 part of" in answer("checkpoint", "list", tmp_path, as_json=False)


def test_a_cut_whose_part_is_lost_is_a_problem(model_dir: Path, answer: Answer) -> None:
    part = model_dir / "ps" / "1" / "log" / f"{2:020d}.segment"
    data = part.read_bytes()
    part.unlink()
    try:
        problems = answer("verify", model_dir, code=3)["problems"]
    finally:
        part.write_bytes(data)
    assert any(str(part.parent) in problem["error"] for problem in problems)


def test_rows_of_a_run_are_shown_by_table(model_dir: Path, answer: Answer) -> None:
    rows = {name: len(table) for name, table in rows_at(7).items()}
    found = answer("inspect", model_dir)
    assert found["step"] == 8
    assert {name: table["rows"] for name, table in found["tables"].items()} == rows


def test_a_moment_is_restored_by_its_step(model_dir: Path) -> None:
    from monolith.state.restore import restore_tables

    for step in (7, 8):
        tables = new_tables()
        restore_tables(restore_point_at(model_dir, f"step={step}"), tables)
        assert rows_of(tables) == rows_at(step)
