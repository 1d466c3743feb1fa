"""Danger: a bad version that keeps its traffic although labels show that it is bad, or a good one that loses it by chance."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from monolith.errors import InvalidArgumentError, LogGapError
from monolith.serve.replica import Replica
from monolith.serve.rollout.labels import ServedLabel
from monolith.serve.rollout.plan import QualityBounds, RolloutPlan
from rollout_models import MODEL, Clock, ask, clicks, replica, router_of, serve_and_label

BOUNDS = QualityBounds(min_labels=200)
PLAN = RolloutPlan(model=MODEL, stable=7, candidate=8, share=0.5, bounds=BOUNDS)


def test_a_poisoned_candidate_is_rolled_back_and_requests_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True))
    router.set_plan(PLAN)
    with caplog.at_level(logging.WARNING):
        versions = serve_and_label(router, 3000)
    assert len(versions) == 3000
    assert 200 <= versions.count(8) < 300, "it was rolled back as soon as there were labels enough"
    assert set(versions[1000:]) == {7}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(
        "model 'clicks': version 8 is rolled back, version 7 answers all requests: head 'click': calibration"
    )
    rollout = router.status()["models"][MODEL]
    assert (rollout["plan"]["candidate"], rollout["plan"]["share"], rollout["rejected"]) == (None, 0.0, [8])
    assert (rollout["events"][-1]["kind"], rollout["events"][-1]["automatic"]) == ("rollback", True)
    assert "mean label" in rollout["events"][-1]["reason"]
    assert router.counters()["rollbacks", MODEL, "8"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_good_candidate_is_not_rolled_back(tmp_path: Path, seed: int) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(PLAN)
    versions = serve_and_label(router, 3000, seed=seed)
    assert 1300 < versions.count(8) < 1700
    assert router.status()["models"][MODEL]["plan"]["candidate"] == 8
    assert router.quality()[MODEL][8]["labels"] == versions.count(8)
    assert router.quality()[MODEL][7]["calibration"] == pytest.approx(1, abs=0.2)


def test_too_few_labels_are_no_verdict(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True))
    router.set_plan(PLAN.replaced(bounds=QualityBounds(min_labels=2000)))
    versions = serve_and_label(router, 3000)
    assert versions.count(8) > 1300
    assert router.status()["models"][MODEL]["plan"]["candidate"] == 8


def test_answers_before_the_plan_do_not_count_for_a_verdict(tmp_path: Path) -> None:
    clock = Clock()
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True), clock=clock)
    router.set_plan(PLAN)
    p, labels = clicks(1000)
    for number in range(1000):
        ask(router, str(number), p[number])
    clock.at += 1
    router.set_plan(PLAN.replaced(share=0.4))
    router.add_labels(ServedLabel(request_id=str(number), label=labels[number]) for number in range(1000))
    assert router.status()["models"][MODEL]["plan"]["candidate"] == 8
    assert router.quality()[MODEL][8]["labels"] == 0
    assert router.quality()[MODEL][8]["total_labels"] > 400


def test_a_poisoned_shadow_is_judged_but_changes_no_traffic(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True))
    router.set_plan(RolloutPlan(model=MODEL, stable=7, shadows=(8,), bounds=BOUNDS))
    assert set(serve_and_label(router, 1000)) == {7}
    quality = router.quality()[MODEL]
    assert quality[7]["labels"] == quality[8]["labels"] == 1000
    assert float(str(quality[8]["auc"])) < 0.5 < float(str(quality[7]["auc"]))


def test_one_bad_head_of_several_is_enough(tmp_path: Path) -> None:
    heads = ("click", "buy")
    router = router_of(tmp_path, replica(7, heads=heads), replica(8, poisoned=True, heads=heads))
    router.set_plan(PLAN)
    p, labels = clicks(1500)
    for number in range(1500):
        ask(router, str(number), p[number])
    router.add_labels(ServedLabel(request_id=str(number), label=labels[number], head="buy") for number in range(1500))
    reason = router.status()["models"][MODEL]["events"][-1]["reason"]
    assert reason.startswith("head 'buy': calibration")
    assert router.quality()[MODEL][8]["total_labels"] > 600  # only one head has labels


def test_requests_of_many_threads_survive_a_rollback(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True))
    router.set_plan(PLAN)
    failures: list[Exception] = []

    def work(thread: int) -> None:
        try:
            serve_and_label(router, 500, seed=thread)
        except Exception as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    events = router.status()["models"][MODEL]["events"]
    assert [event["kind"] for event in events] == ["plan", "rollback"], "once, although several threads saw it"
    assert router.status()["labels"]["labels_joined"] == 2000


def test_a_verdict_about_a_plan_does_not_undo_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of(tmp_path, replica(7), replica(8), replica(9))
    router.set_plan(PLAN)
    newer = PLAN.replaced(candidate=9)

    def late(*_: object, **__: object) -> str:
        router.set_plan(newer)
        return "the verdict about version 8"

    monkeypatch.setattr(router._board, "verdict", late)
    serve_and_label(router, 1)
    assert router.current_plans()[MODEL] == newer
    assert router.status()["models"][MODEL]["rejected"] == []


class Target:
    """Goes back when asked: `replica` predicts again as it did before it was poisoned."""

    def __init__(self, replica: Replica | None = None, *, error: Exception | None = None) -> None:
        self.moments: list[str] = []
        self.replica, self.error = replica, error

    def rollback_to(self, moment: str) -> str:
        self.moments.append(moment)
        if self.error is not None:
            raise self.error
        if self.replica is not None:
            self.replica.predictor.poisoned = False  # type: ignore[attr-defined]
        return "restored sequence 41"


REWIND = RolloutPlan(model=MODEL, stable=7, bounds=BOUNDS, rewind="10m-ago")


def test_a_poisoned_push_into_the_stable_version_goes_back_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, stable = Clock(5000.0), replica(7)
    target = Target(stable)
    router = router_of(tmp_path, stable, targets={MODEL: target}, clock=clock)
    router.set_plan(REWIND)
    serve_and_label(router, 1000, seed=1)
    assert target.moments == []
    stable.predictor.poisoned = True  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        serve_and_label(router, 2000, seed=2)
    assert target.moments == [f"time={1e9 + 5000 - 600:.3f}"]
    assert "went back to time=1000004400.000: restored sequence 41" in caplog.text
    event = router.status()["models"][MODEL]["events"][-1]
    assert (event["kind"], event["automatic"]) == ("rewind", True)


def test_going_back_in_time_that_fails_is_told_and_not_repeated_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(error=LogGapError("the log begins at sequence 50"))
    router = router_of(tmp_path, replica(7, poisoned=True), targets={MODEL: target})
    router.set_plan(REWIND)
    serve_and_label(router, 200)
    assert len(target.moments) == 1
    assert "could not go back to 10m-ago: the log begins at sequence 50" in caplog.text
    assert router.counters()["failed_rewinds", MODEL, "7"] == 1


def test_an_operator_goes_back_in_time(tmp_path: Path) -> None:
    target = Target()
    router = router_of(tmp_path, replica(7), targets={MODEL: target})
    possible, reason = router.rollback_possible(MODEL)
    assert possible
    assert reason.endswith("name a moment of the run that it follows, such as 10m-ago")
    assert router.rollback(MODEL, to="sequence=41") == "restored sequence 41"
    assert target.moments == ["sequence=41"]
    with pytest.raises(InvalidArgumentError, match="moment: expected 10m-ago"):
        router.rollback(MODEL, to="yesterday")


def test_a_model_that_follows_no_run_cannot_go_back_in_time(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7))
    with pytest.raises(InvalidArgumentError, match="does not follow a run"):
        router.rollback(MODEL, to="10m-ago")
    with pytest.raises(InvalidArgumentError, match="does not follow a run"):
        router.set_plan(REWIND)
