"""Danger: a version that was rolled back answers again after a crash, because the rollback was only in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monolith.errors import CorruptFileError, StorageError
from monolith.serve.rollout.plan import QualityBounds, RolloutFile, RolloutPlan
from rollout_models import MODEL, ask, replica, router_of, serve_and_label

PLAN = RolloutPlan(model=MODEL, stable=7, candidate=8, share=0.5, bounds=QualityBounds(min_labels=200))
TESTS = Path(__file__).parents[3]


def test_a_plan_survives_a_restart(tmp_path: Path) -> None:
    first = router_of(tmp_path, replica(7), replica(8))
    first.set_plan(PLAN)
    before = [ask(first, str(number), 0.5) for number in range(100)]
    first.close()
    second = router_of(tmp_path, replica(7), replica(8))
    assert [ask(second, str(number), 0.5) for number in range(100)] == before
    assert second.status()["models"][MODEL]["plan"] == PLAN.model_dump(mode="json")


# A file of the first release. It must be read by all later ones, because a server that is updated in the middle of a rollout must
# not begin without it.
FIRST_RELEASE = """{"format_version": 1, "models": {"clicks": {
 "plan": {"model": "clicks", "stable": 7, "candidate": null, "share": 0.0, "split_by": "user_id", "shadows": [9],
  "shadow_share": 0.5, "bounds": {"max_log_loss_difference": 0.02, "max_calibration_error": 0.2, "min_auc_difference": -0.02,
   "max_invalid_share": 0.01, "max_log_loss": null, "min_auc": null, "min_labels": 500, "confidence": 3.0,
   "window_secs": 3600.0}, "rewind": null},
 "started": 1795017958.4, "previous": 6, "rejected": [8],
 "events": [{"time": 1795017958.4, "kind": "rollback", "version": 8, "automatic": true, "reason": "calibration 3.243"}]}}}"""


def test_a_state_of_the_first_release_is_read(tmp_path: Path) -> None:
    (tmp_path / RolloutFile.NAME).write_text(FIRST_RELEASE)
    router = router_of(tmp_path, replica(6), replica(7), replica(8), replica(9))
    assert ask(router, "a", 0.5) == 7
    assert router.key_column(MODEL) == "user_id"
    rollout = router.status()["models"][MODEL]
    assert (rollout["plan"]["bounds"]["min_labels"], rollout["rejected"], rollout["previous"]) == (500, [8], 6)


DYING = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from rollout_models import MODEL, replica, router_of, serve_and_label
from monolith.serve.rollout.plan import QualityBounds, RolloutPlan
router = router_of(Path({folder!r}), replica(7), replica(8, poisoned=True))
router.set_plan(RolloutPlan(model=MODEL, stable=7, candidate=8, share=0.5, bounds=QualityBounds(min_labels=200)))
if {automatic}:
    while router.status()["models"][MODEL]["plan"]["candidate"] is not None:
        serve_and_label(router, 100, seed=len(router.memory))
else:
    router.rollback(MODEL)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("automatic", [True, False])
def test_a_rollback_survives_kill_9(tmp_path: Path, automatic: bool) -> None:
    script = DYING.format(tests=str(TESTS), folder=str(tmp_path), automatic=automatic)
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    router = router_of(tmp_path, replica(7), replica(8))
    assert set(serve_and_label(router, 100)) == {7}
    rollout = router.status()["models"][MODEL]
    assert (rollout["plan"]["candidate"], rollout["rejected"]) == (None, [8])
    assert rollout["events"][-1]["automatic"] is automatic


def test_a_plan_that_cannot_be_written_is_not_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    router.set_plan(PLAN.replaced(share=0.0))
    _break_disk(monkeypatch)
    with pytest.raises(StorageError, match="No space left"):
        router.set_plan(PLAN.replaced(share=1.0))
    with pytest.raises(StorageError, match="No space left"):
        router.promote(MODEL)
    assert ask(router, "a", 0.5) == 7


def test_a_rollback_that_cannot_be_written_is_in_force_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True))
    router.set_plan(PLAN)
    with monkeypatch.context() as broken:
        _break_disk(broken)
        versions = serve_and_label(router, 1000)
        assert set(versions[-300:]) == {7}
        assert router.status()["saved"] is False
        assert "the rollout is not durable yet" in caplog.text
    router.add_labels([])
    assert router.status()["saved"] is True
    assert json.loads((tmp_path / RolloutFile.NAME).read_text())["models"][MODEL]["rejected"] == [8]


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    first = router_of(tmp_path, replica(7))
    with pytest.raises(StorageError, match="another server keeps its rollouts in this folder"):
        router_of(tmp_path, replica(7))
    first.close()
    router_of(tmp_path, replica(7)).close()


@pytest.mark.parametrize("content", ["", "{", '{"format_version": 2}', '{"models": {"clicks": {}}}', "\udcff"])
def test_a_damaged_state_is_not_taken_for_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / RolloutFile.NAME
    path.write_bytes(os.fsencode(content))
    for _ in range(2):
        with pytest.raises(CorruptFileError, match=r"(?s)rollout\.json.*remove it to begin without rollouts"):
            router_of(tmp_path, replica(7))
    path.unlink()
    router_of(tmp_path, replica(7)).close()


def test_a_plan_whose_versions_are_not_loaded_after_a_restart_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = router_of(tmp_path, replica(7), replica(8))
    first.set_plan(PLAN)
    first.close()
    second = router_of(tmp_path, replica(9))
    assert "version 7 of its rollout is not loaded" in caplog.text
    assert ask(second, "a", 0.5) == 9
    second._repository.add(replica(7))
    assert ask(second, "b", 0.5) == 7


def test_the_record_of_events_is_bounded(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8))
    for number in range(110):
        router.set_plan(PLAN.replaced(share=number / 110))
    events = router.status()["models"][MODEL]["events"]
    assert len(events) == 100
    assert events[-1]["reason"] == "stable 7, candidate 8 for 0.9909 of requests"


def _break_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("monolith.serve.rollout.plan.write_durably", full)
