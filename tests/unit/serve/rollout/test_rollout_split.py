"""Danger: requests that fail or reach the wrong version while a rollout divides them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monolith.errors import InvalidArgumentError, ModelNotFoundError
from monolith.serve.rollout.plan import RolloutPlan
from rollout_models import MODEL, ask, replica, router_of

PLAN = RolloutPlan(model=MODEL, stable=7, candidate=8, share=0.3)


def test_without_a_plan_the_default_version_answers(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    assert ask(router, "a", 0.5) == 8
    assert router.key_column(MODEL) is None


def test_keys_are_divided_as_the_plan_says(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(PLAN)
    for user in map(str, range(500)):
        assert router.route(MODEL, None, user).primary.version == PLAN.version_of(user)


def test_a_request_that_names_a_version_gets_it(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8), replica(9))
    router.set_plan(PLAN.replaced(shadows=(9,)))
    route = router.route(MODEL, 8, "a")
    assert (route.primary.version, route.shadows) == (8, ())
    with pytest.raises(ModelNotFoundError):
        router.route(MODEL, 5, "a")
    with pytest.raises(ModelNotFoundError):
        router.route("other", None, "a")


def test_requests_without_a_key_are_divided_too(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(PLAN)
    versions = [router.route(MODEL, None, "").primary.version for _ in range(2000)]
    assert 400 < versions.count(8) < 800


def test_a_version_that_is_unloaded_is_replaced_by_the_stable_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(tmp_path, replica(6), replica(7), replica(8))
    router.set_plan(PLAN.replaced(share=1.0))
    assert ask(router, "a", 0.5) == 8
    router._repository.remove(MODEL, 8)
    with caplog.at_level(logging.WARNING):
        assert ask(router, "b", 0.5) == 7
    assert "has no version 8" in caplog.text
    assert router.counters()["missing_versions", MODEL, "8"] == 1
    router._repository.remove(MODEL, 7)
    assert ask(router, "c", 0.5) == 6


def test_the_stable_version_is_the_default_one(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(PLAN)
    assert router._repository.default(MODEL) == 7
    router.promote(MODEL)
    assert router._repository.default(MODEL) == 8


def test_a_plan_with_a_version_that_is_not_loaded_is_refused(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7))
    with pytest.raises(ModelNotFoundError, match="has no version 8"):
        router.set_plan(PLAN)
    assert router.status()["models"] == {}


def test_shadows_predict_and_are_compared(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True), replica(9))
    router.set_plan(RolloutPlan(model=MODEL, stable=7, shadows=(8, 9)))
    assert {ask(router, str(number), 0.25) for number in range(10)} == {7}
    quality = router.status()["models"][MODEL]["quality"]
    assert quality["8"]["shadow"]["predictions"] == 10
    assert quality["8"]["shadow"]["mean_absolute_difference"] == pytest.approx(0.5)
    assert quality["9"]["shadow"]["max_absolute_difference"] == 0.0
    assert router.counters()["shadows", MODEL, "9"] == 10
    assert router.status()["models"][MODEL]["answers"] == {"7": 10}


def test_a_shadow_that_is_unloaded_does_not_disturb(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(RolloutPlan(model=MODEL, stable=7, shadows=(8,)))
    router._repository.remove(MODEL, 8)
    assert ask(router, "a", 0.5) == 7


def test_promotion_and_its_rollback(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    with pytest.raises(InvalidArgumentError, match="has no plan"):
        router.promote(MODEL)
    router.set_plan(PLAN)
    assert router.rollback_possible() == (True, "version 7 answers all requests, version 8 none")
    router.promote(MODEL)
    assert {ask(router, str(number), 0.5) for number in range(20)} == {8}
    with pytest.raises(InvalidArgumentError, match="no candidate to promote"):
        router.promote(MODEL)
    assert router.rollback(MODEL) == f"model {MODEL!r}: version 7 answers all requests"
    assert {ask(router, str(number), 0.5) for number in range(20, 40)} == {7}
    with pytest.raises(InvalidArgumentError, match="nothing was promoted before it"):
        router.rollback(MODEL)
    assert router.rollback_possible()[0] is False
    assert [event["kind"] for event in router.status()["models"][MODEL]["events"]] == ["plan", "promote", "rollback"]


def test_a_version_that_was_rolled_back_is_not_tried_again_by_accident(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(PLAN)
    router.rollback(MODEL)
    assert {ask(router, str(number), 0.5) for number in range(20)} == {7}
    with pytest.raises(InvalidArgumentError, match="version 8 of 'clicks' was rolled back before"):
        router.set_plan(PLAN)
    router.set_plan(PLAN, again=True)
    assert router.status()["models"][MODEL]["rejected"] == []
