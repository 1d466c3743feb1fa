"""Danger: ranks that are processes do not find each other, train apart, or do not end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rank_job
from monolith.state import restore_points
from rank_processes import ended, said, torchrun


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_script_trains_as_ranks_under_torchrun(ranks: int) -> None:
    found = torchrun(ranks)
    assert [one["rank"] for one in found] == list(range(ranks))
    assert {one["step"] for one in found} == {12 // ranks}
    assert len({one["dense"] for one in found}) == 1
    rows = found[0]["rows"]
    assert isinstance(rows, dict)
    assert all(count > 0 for count in rows.values())
    assert all(one["rows"] == rows for one in found), "every rank sees all rows"
    assert len({one["auc"] for one in found}) == 1, "the chief evaluates, and all know its result"
    assert {one["evaluated"] for one in found} == {64}
    assert {one["global_step"] for one in found} == {12 // ranks}
    assert [one["predicted"] for one in found] == [12, *[0] * (ranks - 1)], "only the chief predicts"


def weights_of(found: list[dict[str, object]]) -> list[float]:
    assert len({json.dumps(one["weights"]) for one in found}) == 1, "all ranks have the same weights"
    weights = found[0]["weights"]
    assert isinstance(weights, list)
    return [number for parameter in weights for number in parameter]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return weights_of(torchrun(2))


@pytest.mark.slow  # DistributedDataParallel, below, adds them by gloo as well
def test_dense_gradients_may_be_added_by_gloo(expected: list[float]) -> None:
    assert weights_of(torchrun(2, MONOLITH_DENSE_BACKEND="gloo")) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_dense_part_may_be_in_distributed_data_parallel(expected: list[float]) -> None:
    found = torchrun(2, RANK_JOB_DDP="1", MONOLITH_END_OF_DATA="stop")
    assert weights_of(found) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_distributed_data_parallel_cannot_drain() -> None:
    with pytest.raises(
        AssertionError, match="end_of_data: expected 'stop', because a part of the model is in Distributed"
    ):
        torchrun(2, RANK_JOB_DDP="1")


def test_a_rank_that_dies_in_the_backward_pass_of_torch_is_named(tmp_path: Path) -> None:
    """Torch itself only says that a connection was closed."""
    common = {
        "RANK_JOB_DDP": str(tmp_path / "meeting"),
        "RANK_JOB_DIES": "1",
        "MONOLITH_END_OF_DATA": "stop",
        "MONOLITH_MODEL_DIR": str(tmp_path / "model"),
        **{f"OMPI_COMM_WORLD_{name}SIZE": "2" for name in ("", "LOCAL_")},
    }

    def rank(number: int) -> subprocess.CompletedProcess[str]:
        own = {f"OMPI_COMM_WORLD_{name}RANK": str(number) for name in ("", "LOCAL_")}
        return ended([sys.executable, rank_job.__file__], **common, **own)

    with ThreadPoolExecutor(2) as threads:
        survivor, dead = threads.map(rank, range(2))
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode == 1
    last = survivor.stderr.strip().splitlines()[-1]
    assert last.startswith("monolith.errors.RankLostError: rank 1, process "), survivor.stderr[-3000:]


@pytest.mark.slow
def test_dropout_of_a_reproducible_run_does_not_depend_on_the_ranks() -> None:
    settings = {"RANK_JOB_DROPOUT": "1", "MONOLITH_MICRO_BATCHES": "4"}
    alone, two = said([sys.executable, rank_job.__file__], **settings), torchrun(2, **settings)
    assert alone[0]["step"] == two[0]["step"] == 3
    assert {one["dense"] for one in alone} == {one["dense"] for one in two}
    assert alone[0]["auc"] == two[0]["auc"]
    assert weights_of(torchrun(2, MONOLITH_MICRO_BATCHES="4")) != weights_of(two)


def test_rows_on_servers_and_dense_gradients_added_over_ranks(expected: list[float], tmp_path: Path) -> None:
    """Partial synchrony: the last process is a server. A run that has stopped continues."""
    settings = {
        "RANK_JOB_ONLY_TRAINS": "1",
        "MONOLITH_NUM_PS": "1",
        "MONOLITH_ENABLE_PARTIAL_SYNC_TRAINING": "true",
        "MONOLITH_MODEL_DIR": str(tmp_path / "model"),
        "MONOLITH_DISCOVERY_FOLDER": str(tmp_path / "discovery"),
    }
    found = [one for one in torchrun(3, **settings) if one["kind"] == "worker"]
    assert [one["step"] for one in found] == [6, 6], "two workers count a step once"
    # Each rank makes an optimizer step of its own on the rows: close to one step of both, and not the same.
    assert weights_of(found) == pytest.approx(expected, abs=0.02)
    assert restore_points(tmp_path / "model")[-1].step == 6
    again = [one for one in torchrun(3, **settings) if one["kind"] == "worker"]
    assert [one["step"] for one in again] == [6, 6], "all epochs are done"
    assert weights_of(again) == weights_of(found)


def test_ranks_over_gloo_train_to_the_same_bits() -> None:
    assert torchrun(2, MONOLITH_RANK_TRANSPORT="gloo") == torchrun(2)


def test_ranks_over_gloo_meet_at_a_store_of_rank_0(tmp_path: Path) -> None:
    options = ["launch", "--ranks", "2", "--model-dir", str(tmp_path / "run"), "--json", rank_job.__file__]
    done = ended([sys.executable, "-m", "monolith.cli", *options], MONOLITH_RANK_TRANSPORT="gloo")
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [json.loads(e["text"]) for e in events if e["event"] == "line" and e["text"].startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted((one["rank"], one["step"]) for one in found) == [(0, 6), (1, 6)]
    assert len({one["dense"] for one in found}) == 1
