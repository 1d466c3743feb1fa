"""Danger: examples are the first code a user copies. Each must run, stay short, and show what it says it shows."""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from torch import Tensor

from forked_processes import run_script
from monolith.features import Batch
from monolith.serve import Predictor, load
from monolith.state import restore_points
from monolith.train import StepResult
from monolith.train.hooks import ProgressReport

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str) -> str:
    done = run_script(EXAMPLES / example, *arguments, environ={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_at_most_150_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def test_the_plain_loop_learns_from_arriving_ids() -> None:
    lines = [line.split() for line in run("01_loop.py", "--steps", "40").splitlines()]
    rows = [int(line[2].replace(",", "")) for line in lines]
    assert len(rows) == 10
    assert rows == sorted(set(rows)), "every report has more rows than the one before"
    assert float(lines[-1][5]) > 0.6


def test_the_trainer_continues_and_its_export_agrees(tmp_path: Path) -> None:
    for steps in (20, 40):
        out = run("02_trainer.py", "--steps", "20", "--model-dir", str(tmp_path))
        assert f"step {steps}, on the next 40,960 events" in out
        assert "its predictions are equal" in out
    assert 0.5 < float(re.findall(r"gauc +([\d.]+)", out)[0]) < 1


def test_the_demo_beats_popularity_and_writes_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    out = run("03_demo.py", "--steps", "60", "--folder", str(tmp_path))
    assert "\x1b" not in out, "plain when it is not a terminal"
    auc, popularity, best = map(
        float, re.findall(r"AUC +([\d.]+) .*popularity ([\d.]+), best possible ([\d.]+)", out)[0]
    )
    assert popularity < auc < best
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"https?:|src=|href=|url\(|@import", page)
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert [len(drawing.findall("polyline")) for drawing in drawings] == [3, 1]
    assert f"{auc:.3f}" in page
    assert out.rstrip().endswith((tmp_path / "report.html").as_uri())


def test_the_demo_fails_when_its_export_predicts_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: ModuleType
) -> None:
    class Wrong:
        def __init__(self, predictor: Predictor) -> None:
            self._predictor = predictor

        def predict(self, batch: Batch) -> dict[str, Tensor]:
            return {name: value + 1e-4 for name, value in self._predictor.predict(batch).items()}

    assert demo.main(3, tmp_path)
    monkeypatch.setattr(demo, "load", lambda path: Wrong(load(path)))
    assert not demo.main(3, tmp_path)


def test_the_popularity_ranking_never_sees_the_clicks_it_is_scored_on(demo: ModuleType) -> None:
    comparison = demo.Comparison(4, Console(file=io.StringIO()))
    columns = {"item_id": torch.tensor([1, 2, 1, 2]), "label": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    batch = {**columns, "click_probability": torch.tensor([0.9, 0.1, 0.9, 0.1])}
    seen = []
    for step in (1, 2):
        result = StepResult(step=step, loss=torch.tensor(0.0), grad_norm=None, logits={}, batch=batch, examples=4)
        comparison.after_step(None, result)
        comparison.write(progress(step))
        seen.append(comparison.points[-1].popularity)
    assert seen == [0.5, 1.0], "nothing is known of an item before its first event, everything after it"


def progress(step: int) -> ProgressReport:
    sizes = {"rows": 2, "table_bytes": 0, "memory_bytes": 0}
    return ProgressReport(step=step, examples=4, examples_per_second=1.0, loss=0.0, auc={"click": 0.5}, **sizes)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    yield importlib.import_module("03_demo")
    torch.set_num_threads(threads)


def test_killed_runs_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    out = run("04_crash.py", "--steps", "30", "--kills", "1", "--folder", str(tmp_path))
    ((died, kept),) = re.findall(r"signal 9 at step (\d+); kept: step (\d+)", out)
    assert 0 <= int(kept) < int(died)
    assert "step 30: " in out
    assert "rows and the dense weights are equal to the last bit" in out


def test_the_same_script_trains_alone_and_as_a_cluster(tmp_path: Path) -> None:
    alone = run("05_cluster.py", "--steps", "10", "--model-dir", str(tmp_path / "alone"))
    assert "alone: ends at step 10" in alone
    launch = ("-m", "monolith.cli", "launch", "--ps", "1", "--workers", "2", "--model-dir", str(tmp_path / "cluster"))
    command = [sys.executable, *launch, str(EXAMPLES / "05_cluster.py"), "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # Each worker learns of the other's steps one step late, so a few more may be made than asked for.
    assert 40 <= int(re.findall(r"worker 0: ends at step (\d+)", done.stdout)[0]) <= 46
    assert re.search(r"worker 1: ends at step", done.stdout)
    saved = restore_points(tmp_path / "cluster")
    assert saved[-1].step >= 40


def test_the_same_script_trains_as_ranks(tmp_path: Path) -> None:
    launch = ("-m", "monolith.cli", "launch", "--ranks", "2", "--model-dir", str(tmp_path))
    command = [sys.executable, *launch, str(EXAMPLES / "05_cluster.py"), "--", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"worker \d: ends at step (\d+)", done.stdout) == ["10", "10"]
    assert restore_points(tmp_path)[-1].step == 10


def test_ffm_learns_and_its_export_agrees() -> None:
    out = run("ffm.py", "--steps", "10")
    before, after = map(float, re.findall(r"loss ([\d.]+) before, ([\d.]+) after", out)[0])
    assert after < 0.1 * before
    by_model, by_export = re.findall(r"(0\.\d+) by", out)
    assert by_model == by_export


RATINGS = [
    (user, item, 5 if (user + item) % 2 else 2, 1000 + 7 * user + item)
    for user in range(1, 13)
    for item in range(1, 21)
]


def ratings_file(kind: str, folder: Path) -> Path:
    if kind == "ratings.parquet":
        names = ["user_id", "item_id", "rating", "timestamp"]
        pq.write_table(pa.table(dict(zip(names, zip(*RATINGS, strict=True), strict=True))), folder / kind)
        return folder / kind
    separator = {"u.data": "\t", "ratings.dat": "::", "ratings.csv": ","}[kind]
    lines = [separator.join(map(str, row)) for row in reversed(RATINGS)]
    header = ["userId,movieId,rating,timestamp"] if kind == "ratings.csv" else []
    (folder / kind).write_text("\n".join([*header, *lines]) + "\n")
    return folder / kind


def test_movielens_from_a_ratings_file_to_recommendations(tmp_path: Path) -> None:
    out = run(
        "07_movielens.py", str(ratings_file("u.data", tmp_path)), "--folder", str(tmp_path / "out"), "--user", "3"
    )
    assert "216 ratings to train, 24 later ones to evaluate" in out
    assert re.search(r"AUC 0\.\d{4}, within a user", out)
    assert "for user 3, who has liked [12, 14, 16, 18, 20] lately" in out
    trained, tested = (pq.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("train", "test"))
    assert max(trained["timestamp"].to_pylist()) <= min(tested["timestamp"].to_pylist())
    assert load(tmp_path / "out" / "run" / "exported_models").predict(
        {"user_id": [3], "item_id": [12], "liked": [[2, 4]]}
    )["like"].shape == (1,)


@pytest.mark.parametrize("kind", ["ratings.dat", "ratings.csv", "ratings.parquet"])
def test_movielens_reads_every_published_format_alike(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    movielens = importlib.import_module("07_movielens")
    ratings = movielens.read_ratings([ratings_file(kind, tmp_path)])
    by_time = ratings.sort_by([("timestamp", "ascending"), ("user_id", "ascending")])
    assert (
        by_time.to_pylist()
        == movielens.read_ratings([ratings_file("u.data", tmp_path)])
        .sort_by([("timestamp", "ascending"), ("user_id", "ascending")])
        .to_pylist()
    )
    assert ratings["timestamp"].to_pylist() == sorted(row[3] for row in RATINGS)
    examples, liked = movielens.with_history(ratings)
    assert examples["liked"][0].as_py() == []
    assert liked[1] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]


def test_movielens_refuses_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "ratings.xls").write_text("")
    done = run_script(EXAMPLES / "07_movielens.py", str(tmp_path / "ratings.xls"))
    assert done.returncode == 1
    assert "expected .parquet, .csv (with a header), .dat or .data, got .xls" in done.stderr
