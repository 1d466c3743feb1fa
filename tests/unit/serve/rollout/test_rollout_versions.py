"""Danger: a rollout whose versions are unloaded under it, or a server that keeps every version it ever tried in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monolith.errors import ModelNotFoundError
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.rollout.plan import RolloutPlan
from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.watch import VersionWatch
from rollout_models import MODEL, KnownPredictor, ask, repository_of


class Exports:
    """Versions 1 to 9 that can be loaded, and which of them are."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def load(self, model: str, version: int) -> Replica:
        if not 1 <= version <= 9:
            raise ModelNotFoundError(f"model {model!r}: has no version {version}; it has 1 to 9")
        self.open.add(version)
        predictor = KnownPredictor(version)
        return Replica(model, predictor, on_close=lambda: self.open.discard(version))  # type: ignore[arg-type]

    def router(self, folder: Path, *versions: int) -> RolloutRouter:
        repository = repository_of(*(self.load(MODEL, version) for version in versions))
        return RolloutRouter(repository, folder, open_version=self.load)


PLAN = RolloutPlan(model=MODEL, stable=5, candidate=6, share=0.5)


def test_versions_of_a_plan_are_loaded_and_others_removed(tmp_path: Path) -> None:
    exports = Exports()
    router = exports.router(tmp_path, 7)
    router.set_plan(PLAN)
    assert exports.open == {5, 6}
    assert {ask(router, str(number), 0.5) for number in range(50)} == {5, 6}
    router.set_plan(PLAN.replaced(shadows=(8,)))
    assert exports.open == {5, 6, 8}
    router.promote(MODEL)
    assert exports.open == {5, 6, 8}, "the version before stays, for a rollback"
    router.rollback(MODEL)
    assert exports.open == {5}


def test_a_plan_with_a_version_that_does_not_exist_loads_nothing(tmp_path: Path) -> None:
    exports = Exports()
    router = exports.router(tmp_path, 7)
    with pytest.raises(ModelNotFoundError, match="has no version 10"):
        router.set_plan(PLAN.replaced(candidate=10))
    assert exports.open == {7}
    assert ask(router, "a", 0.5) == 7


def test_a_restart_loads_the_versions_of_the_plan(tmp_path: Path) -> None:
    exports = Exports()
    router = exports.router(tmp_path, 7)
    router.set_plan(PLAN)
    router.promote(MODEL)
    router.close()
    exports = Exports()
    router = exports.router(tmp_path, 9)
    assert exports.open == {5, 6, 9}
    assert ask(router, "a", 0.5) == 6
    router.rollback(MODEL)
    assert ask(router, "b", 0.5) == 5


def test_a_version_that_is_gone_at_a_restart_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    router = Exports().router(tmp_path, 7)
    router.set_plan(PLAN)
    router.close()

    def gone(model: str, version: int) -> Replica:
        raise ModelNotFoundError(f"model {model!r}: has no version {version}")

    with caplog.at_level(logging.ERROR):
        router = RolloutRouter(repository_of(Exports().load(MODEL, 7)), tmp_path, open_version=gone)
    assert "version 5 of its rollout is not served: model 'clicks': has no version 5" in caplog.text
    assert ask(router, "a", 0.5) == 7


def test_newer_exports_wait_while_a_rollout_decides(tmp_path: Path) -> None:
    for version in ("5", "6", "9"):
        (tmp_path / "exports" / version).mkdir(parents=True)
        (tmp_path / "exports" / version / "manifest.json").write_text("{}")
    exports = Exports()
    router = exports.router(tmp_path / "state", 5)
    watch = VersionWatch(
        router._repository,
        tmp_path / "exports",
        current=5,
        open_version=lambda folder: exports.load(MODEL, int(folder.name)),
        poll_secs=3600,
        wanted=lambda: not router.plans(MODEL),
        swap=router.swap,
    )
    try:
        assert watch.look()
        assert exports.open == {9}
        router.set_plan(PLAN)
        watch._current = 5
        assert not watch.look()
        assert exports.open == {5, 6}
    finally:
        watch.close()


def test_a_version_that_was_being_loaded_when_a_rollout_began_is_closed(tmp_path: Path) -> None:
    exports = Exports()
    router = exports.router(tmp_path, 5)
    newer = exports.load(MODEL, 9)
    router.set_plan(PLAN)
    assert not router.swap(newer)
    assert exports.open == {5, 6}


def test_without_a_loader_versions_belong_to_the_caller(tmp_path: Path) -> None:
    exports = Exports()
    repository = ModelRepository()
    for version in (5, 6, 7):
        repository.add(exports.load(MODEL, version))
    RolloutRouter(repository, tmp_path).set_plan(PLAN)
    assert exports.open == {5, 6, 7}
