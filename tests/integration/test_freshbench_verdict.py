"""Danger: a benchmark claims that freshness is worth something where nothing is fresher, or never says that it is not.

Where time has no meaning, a model that is trained on more data is still better. That gain must not be called freshness.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def _flat(*means: float) -> np.ndarray:
    """AUCs [seeds, slices] with these means over the slices, one for each seed."""
    return np.array(means)[:, None] + np.array([-0.01, 0.0, 0.01])


def test_the_ordering_holds_on_a_stream_that_drifts_and_is_not_claimed_on_one_that_does_not() -> None:
    datasets = importlib.import_module("freshbench.datasets")
    measure = importlib.import_module("freshbench.measure")
    plan = measure.Plan(("monolith",), (1, 2, 10), seeds=3)
    drifting = measure.measure(partial(datasets.synthetic, events=12_000, drift_days=2.0, new_items=0.05), plan)
    assert drifting.results[0].verdict.outcome == "holds", drifting.markdown()
    assert drifting.passed
    still = measure.measure(partial(datasets.stationary, events=12_000), plan)
    fresh = still.results[0].verdict.claims[-1]
    assert fresh.text.startswith("this is freshness")
    assert fresh.outcome != "holds", still.markdown()
    assert still.passed


def test_each_claim_can_fail() -> None:
    verdict = importlib.import_module("freshbench.verdict")
    batch, coarse, fine = (_flat(low, low + 0.001, low + 0.0005) for low in (0.70, 0.72, 0.74))
    no_gain = {1: batch, 2: batch, 10: batch}

    def outcomes(by_time: dict[int, np.ndarray], shuffled: dict[int, np.ndarray]) -> list[str]:
        return [claim.outcome for claim in verdict.verdict(by_time, shuffled).claims]

    assert outcomes({1: batch, 2: coarse, 10: fine}, no_gain) == ["holds"] * 4
    assert outcomes(no_gain, no_gain) == ["not shown", "holds", "not shown", "not shown"]
    assert outcomes({1: coarse, 2: batch, 10: fine}, no_gain) == ["contradicted", "holds", "holds", "holds"]
    assert outcomes({1: batch, 2: fine, 10: coarse}, no_gain) == ["holds", "contradicted", "contradicted", "holds"]
    more_data = {1: batch, 2: coarse, 10: fine}
    assert outcomes(more_data, more_data)[-1] == "not shown"
    assert verdict.verdict({1: coarse, 2: batch, 10: fine}, no_gain).outcome == "contradicted"


def test_the_error_contains_both_seeds_and_time() -> None:
    verdict = importlib.import_module("freshbench.verdict")
    zero = np.zeros((4, 2))
    by_seed = np.array([[0.0, 0.0], [0.2, 0.2], [0.0, 0.0], [0.2, 0.2]])
    assert verdict.difference(by_seed, zero).error == pytest.approx(np.std([0, 0.2, 0, 0.2], ddof=1) / 2)
    by_slice = np.array([[0.0, 0.2]] * 4)
    assert verdict.difference(by_slice, zero).error == pytest.approx(0.1)
    alone = verdict.difference(np.ones((1, 1)), np.zeros((1, 1)))
    assert alone.error == np.inf
    assert not alone.is_shown


def test_one_command_writes_table_numbers_and_plot_and_its_exit_code_is_the_verdict(tmp_path: Path) -> None:
    options = ["--data", "synthetic", "--events", "3000", "--seeds", "2", "--syncs", "2,5", "--through", "feed"]
    command = [sys.executable, str(BENCHMARKS / "freshbench"), *options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads((tmp_path / "shards.json").read_text())
    (report,) = found["reports"]
    assert done.returncode == (0 if report["passed"] else 1), done.stdout + done.stderr
    assert report["passed"] == (report["systems"][0]["outcome"] == "holds")
    assert np.array(report["systems"][0]["slice_aucs"]["5"]).shape == (2, 10)
    assert (tmp_path / "shards.md").read_text() in done.stdout + "\n"
    assert (tmp_path / "shards.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "options", [["--data", "criteo"], ["--systems", "nothing"], ["--syncs", "1"], ["--movielens", "nowhere"]]
)
def test_bad_options_are_refused_before_anything_is_trained(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("freshbench.command")
    assert command.main(options) == 2
    assert "freshbench: " in capsys.readouterr().out
