"""Danger: an experiment compares the wrong things: other collision rates, or ids that were never hashed."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def collisions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("collisions")


@pytest.mark.parametrize(
    ("ids", "lost", "left"), [(162_541, 0.0773, 149_970), (59_047, 0.0286, 57_361)], ids=["users", "movies"]
)
def test_tables_of_the_computed_size_lose_what_the_paper_lost(
    collisions: ModuleType, ids: int, lost: float, left: int
) -> None:
    rows = collisions.rows_for(ids, lost)
    thrown = np.random.default_rng(0).integers(rows, size=ids)
    assert len(np.unique(thrown)) == pytest.approx(left, rel=0.002)
    assert len(np.unique(collisions.hashed(np.arange(ids), rows, 0))) == pytest.approx(left, rel=0.002)


def test_an_id_always_has_the_same_place_and_another_with_another_salt(collisions: ModuleType) -> None:
    ids = np.array([2**62, -5, 7, 2**62])
    first, again, salted = (collisions.hashed(ids, 1000, salt) for salt in (0, 0, 1))
    assert first[0] == first[3]
    assert (first == again).all()
    assert (first != salted).any()
    assert ((first >= 0) & (first < 1000)).all()


def test_hashing_costs_what_only_single_ids_know(collisions: ModuleType) -> None:
    users = np.random.default_rng(0).integers(1000, size=40_000)
    liking = np.random.default_rng(1).random(1000) < 0.5
    events = collisions.Events(users, np.zeros_like(users), liking[users].astype(np.float32))
    free = collisions.run(events, None, seed=0, epochs=1)
    hashed = collisions.run(events, (0.75, 0.5), seed=0, epochs=1)
    assert free.lost == (0, 0)
    assert hashed.lost[0] == pytest.approx(0.75, abs=0.03)
    assert free.aucs[-1] > 0.99
    assert hashed.aucs[-1] < 0.9


def test_files_with_labels_or_ratings_count_as_one(collisions: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "train.parquet", tmp_path / "ratings.dat"
    pa.parquet.write_table(pa.table({"user": [1, 2], "item": [5, 6], "label": pa.array([1.0, 0.0])}), first)
    second.write_text("3::7::4::100\n4::8::3::200\n")
    events = collisions.movielens([first, second])
    assert events.users.tolist() == [1, 2, 3, 4]
    assert events.items.tolist() == [5, 6, 7, 8]
    assert events.labels.tolist() == [1, 0, 1, 0], "a rating of 3.5 or more is a positive"


def test_a_file_without_labels_is_refused(collisions: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "some.parquet"
    pa.parquet.write_table(pa.table({"user": [1], "item": [5]}), file)
    with pytest.raises(ValueError, match=r"some\.parquet: has neither a column label nor rating"):
        collisions.movielens([file])


def test_one_command_compares_all_cases_on_a_ratings_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = random.integers(1, 200, 5000), random.integers(1, 50, 5000), random.integers(1, 11, 5000) / 2
    rows = "".join(f"{user},{movie},{rating},0\n" for user, movie, rating in zip(*columns, strict=True))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + rows)
    options = ["--movielens", "ratings.csv", "--epochs", "1", "--seeds", "2", "--plot", "plot.svg"]
    command = [sys.executable, str(BENCHMARKS / "collisions.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "MovieLens, 5,000 events, 1 epochs, 2 seeds" in done.stdout
    table = re.findall(r"^\| (collisionless|hashed, [^|]*?) \|.*\| (0\.\d{4}) \|", done.stdout, re.MULTILINE)
    assert len(table) == 4
    assert ("drawn in plot.svg" in done.stdout) == (tmp_path / "plot.svg").exists()
