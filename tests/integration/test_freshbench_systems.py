"""Danger: a system is compared that saw the future, that answers from the wrong copy, or that was trained on other data."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SYSTEMS = ("monolith", "monolith-feed", "torch-reload", "torch-retrain", "vowpal-wabbit", "river")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(autouse=True)
def freshbench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # adapters may append the folder of their packages
    return importlib.import_module("freshbench")


def module(name: str) -> Any:  # noqa: ANN401 - a module that is found at run time
    return importlib.import_module(f"freshbench.{name}")


def made(name: str) -> Any:  # noqa: ANN401 - a class that is found at run time
    try:
        return module("adapters").factory(name)
    except ImportError as error:
        pytest.skip(str(error))


def simple(size: int, seed: int = 0) -> Any:  # noqa: ANN401 - an Examples
    """Labels that only the id of the user decides."""
    random = np.random.default_rng(seed)
    users = random.integers(0, 20, size)
    lists = module("examples").IdLists(random.integers(0, 5, 2 * size), np.arange(0, 2 * size + 1, 2))
    ids = {"user": users, "item": random.integers(0, 10, size), "tags": lists}
    labels = (users % 2).astype(np.float32)
    return module("examples").Examples(ids, random.random((size, 2), np.float32), labels, np.arange(size))


class Recorder:
    """Writes down what it is asked to do."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def fit(self, examples: Any) -> None:  # noqa: ANN401 - an Examples
        assert len(examples.labels) == len(examples)
        self.seen.append(("fit", int(examples.times[0]), int(examples.times[-1])))

    def serving(self) -> Recorder:
        return self

    def sync(self) -> None:
        self.seen.append(("sync", 0, 0))

    def predict(self, examples: Any) -> np.ndarray:  # noqa: ANN401 - an Examples
        assert len(examples.labels) == 0
        self.seen.append(("predict", int(examples.times[0]), int(examples.times[-1])))
        return np.zeros(len(examples))

    def close(self) -> None:
        self.seen.append(("close", 0, 0))


def test_each_event_is_answered_before_it_is_trained_and_each_shard_begins_with_a_sync() -> None:
    systems: list[Recorder] = []

    def make(schema: object, seed: int) -> Recorder:
        systems.append(Recorder())
        return systems[-1]

    examples = simple(70)
    data = module("examples").DataSet("simple", module("examples").of_schema(examples), examples, batch_size=25)
    module("simulation").simulate(make, data, 0, [2])
    assert systems[-1].seen == [
        ("fit", 0, 24),
        ("fit", 25, 49),
        ("sync", 0, 0),
        ("predict", 50, 59),
        ("fit", 50, 59),
        ("sync", 0, 0),
        ("predict", 60, 69),
        ("fit", 60, 69),
        ("close", 0, 0),
    ]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_learns_and_answers_what_it_had_learnt_at_the_last_sync(name: str) -> None:
    examples = simple(3000)
    system = made(name)(module("examples").of_schema(examples), 0)
    try:
        asked = simple(500, seed=1)
        half = examples.between(0, 1500)
        for batch in half.batches(50):
            system.fit(batch)
        serving = system.serving()
        serving.sync()
        before = serving.predict(asked.without_labels())
        assert module("simulation").aucs(asked.labels, before, 1)[0] > 0.9
        for batch in examples.between(1500, 3000).batches(50):
            system.fit(batch)
        assert (serving.predict(asked.without_labels()) == before).all()
        serving.sync()
        after = serving.predict(asked.without_labels())
        assert (after != before).any()
        assert module("simulation").aucs(asked.labels, after, 1)[0] > 0.9
    finally:
        system.close()


def test_what_goes_through_the_feed_is_what_a_plain_copy_has() -> None:
    data = module("datasets").synthetic(0, 3000)
    run = module("simulation").simulate
    copied, followed = (run(made(name), data, 0, [1, 2, 5]) for name in ("monolith", "monolith-feed"))
    module("measure").require_equal(copied, followed)
    followed.scores[5][5] += 1e-6
    with pytest.raises(ValueError, match=r"1 of .* scores with 5 syncs"):
        module("measure").require_equal(copied, followed)


def test_ranks_and_ties_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(0)
    scores, labels = random.integers(-5, 5, 300) * 7.0, random.integers(0, 2, 300).astype(np.float32)
    found = module("simulation").aucs(labels, scores, 3)
    wanted = [roc_auc_score(labels[n : n + 100], scores[n : n + 100]) for n in (0, 100, 200)]
    assert found == pytest.approx(np.array(wanted), abs=1e-9)
    with pytest.raises(ValueError, match="finite"):
        module("simulation").aucs(labels, np.where(scores == 0, np.nan, scores), 1)


def test_a_sync_that_is_too_expensive_is_left_out() -> None:
    examples = simple(140)
    data = module("examples").DataSet("simple", module("examples").of_schema(examples), examples, batch_size=25)
    found = module("simulation").simulate(made("torch-retrain"), data, 0, [1, 2, 20])
    assert list(found.scores) == [1, 2]


def test_the_adapter_in_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (BENCHMARKS.parent / "docs" / "freshbench.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "freshbench_documented.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = module("datasets").synthetic(0, 4000)
    run = module("simulation").simulate(made("freshbench_documented:Popularity"), data, 0, [1, 10])
    assert run.auc(10, 1)[0] > 0.5
    assert (run.scores[10] != run.scores[1]).any()


def test_a_plain_copy_loses_the_rows_that_training_has_lost() -> None:
    examples = simple(300)
    system = made("monolith")(module("examples").of_schema(examples), 0)
    try:
        system.fit(examples)
        serving = system.serving()
        serving.sync()
        system.tables()["user"].erase([3])
        serving.sync()
        served = module("adapters.monolith_system").served_tables(serving._predictor)
        assert 3 not in served["user"]
        assert {name: len(table) for name, table in served.items()} == {"user": 19, "item": 10, "tags": 5}
    finally:
        system.close()
