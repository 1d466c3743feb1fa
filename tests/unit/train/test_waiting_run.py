"""Danger: while no record comes, time stands still: a run cannot be stopped or asked, and saves nothing of what it did."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from monolith.data.sources.source import StreamLag
from monolith.errors import ConfigError
from monolith.state.restore_points import restore_points
from monolith.train import Trainer
from monolith.train.control import Controller
from monolith.train.hooks import Hook, LoggingHook, ProgressHook, ProgressReport
from monolith.train.hooks.hook import Moments
from monolith.train.waiting import Pause
from waiting_run import SECONDS, Run, counts_of, running
from waiting_source import WaitingSource, until


def test_a_run_that_waits_ends_when_it_is_interrupted_and_loses_nothing(tmp_path: Path) -> None:
    source = WaitingSource()
    source.append(1, 2, 3)
    with running(source, model_dir=str(tmp_path)) as run:
        run.trained(2)
        until(source.waiting.is_set)
        run.trainer.interrupt("received SIGTERM")
        assert run.ended() == "received SIGTERM"
    source.append(4)
    with running(source, model_dir=str(tmp_path)) as later:
        later.trained(3)
    assert counts_of(later.trainer, range(6)) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_checkpoints_are_written_by_time_while_nothing_comes(tmp_path: Path) -> None:
    source = WaitingSource()
    source.append(1, 2)
    with running(source, model_dir=str(tmp_path), save_checkpoints_secs=0.05):
        until(lambda: [point.step for point in restore_points(str(tmp_path))] == [1])


def test_a_run_goes_back_to_any_moment_and_reads_on_from_there(tmp_path: Path) -> None:
    source, folder = WaitingSource(batch_size=1), str(tmp_path)
    with running(source, model_dir=folder, log_flush_secs=0.02, save_checkpoints_steps=1):
        source.append(1)
        until(lambda: restore_points(folder))
    with running(source, model_dir=folder, log_flush_secs=0.02, save_checkpoints_secs=0) as run:
        for step in range(2, 6):
            source.append(step)
            run.trained(step)
            until(lambda now=step: now in {point.step for point in restore_points(folder)})
    with running(source, model_dir=folder, restore_to="step=3") as back:
        back.trained(5)
        assert counts_of(back.trainer, range(7)) == dict.fromkeys(range(1, 6), 1)
    assert back.trainer.steps_made == 2


@pytest.mark.parametrize("delayed", [False, True])
def test_operators_are_answered_and_see_all_that_was_trained(delayed: bool) -> None:
    source = WaitingSource()
    run = Run(source, enable_embedding_postpush=delayed)
    controller = Controller(run.trainer)
    run.trainer.hooks = (controller,)
    run.thread.start()
    source.append(7, 7)
    run.trained(1)
    rows = controller.features(["id"], [7], timeout=SECONDS)["id"]
    assert rows.entries.values.item() == -2
    controller.stop(timeout=SECONDS)
    source.append(7)
    controller.resume(timeout=SECONDS)
    run.trained(2)
    controller.end_run(timeout=SECONDS)
    assert run.ended() == "an operator has ended the run"
    controller.close()


def test_updates_that_wait_for_the_next_step_are_applied_when_there_is_none() -> None:
    source, seen = WaitingSource(), []

    class Look(Hook):
        def while_waiting(self, trainer: Trainer) -> None:
            seen.append((trainer.step, counts_of(trainer, [5])))

    with running(source, hooks=[Look()], enable_embedding_postpush=True):
        source.append(5)
        until(lambda: (1, {5: 1}) in seen)
    assert (1, {}) not in seen


def test_the_end_of_a_bounded_stream_ends_the_run_and_a_later_one_continues(tmp_path: Path) -> None:
    source = WaitingSource(ends=True)
    source.append(1, 2, 3)
    first = Run(source, model_dir=str(tmp_path))
    first.thread.start()
    assert first.ended() == "the data ended"
    source.append(4, 5)
    for _ in range(2):  # the second finds nothing, which is no error
        later = Run(source, model_dir=str(tmp_path), epochs=None)
        later.thread.start()
        assert later.ended() == "the data ended"
    assert counts_of(later.trainer, range(7)) == dict.fromkeys(range(1, 6), 1)


def test_steps_end_a_run_without_end() -> None:
    source = WaitingSource()
    source.append(*range(10))
    run = Run(source)
    run.limits = {"max_steps": 3}
    run.thread.start()
    assert run.ended() == "step 3 is reached"
    assert sum(counts_of(run.trainer, range(10)).values()) == 6


def test_more_than_one_pass_is_refused() -> None:
    run = Run(WaitingSource(), epochs=2)
    with pytest.raises(ConfigError, match="WaitingSource, which waits for records and is read once, got 2"):
        run.trainer.fit(run.source)


def test_other_workers_may_reach_the_last_step_meanwhile() -> None:
    run = Run(WaitingSource())
    pause = Pause(run.trainer, hooks=(), last=9)
    pause.tick()
    assert run.trainer.stop_reason is None
    run.trainer.step = 9
    pause.tick()
    assert run.trainer.stop_reason == "step 9 is reached"


def test_only_hooks_that_do_something_are_called() -> None:
    class Look(Hook):
        def while_waiting(self, trainer: Trainer) -> None: ...

    look, other = Look(), Hook()
    moments = Moments.of([other, look])
    assert (moments.before_step, moments.after_step, moments.while_waiting) == ([], [], [look])


def test_a_person_reads_that_nothing_comes(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    pause = Pause(Run(WaitingSource()).trainer, hooks=(), last=None, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "monolith"):
        for now[0] in (0.0, 10.0, 29.9, 30.0, 30.1, 59.9, 60.0, 90.0, 120.0):
            pause.tick()
        pause.over()
        now[0] = 121.0
        pause.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the first records, at step 0",
        "no records have come for 30 s, after step 0",
        "no records have come for 60 s, after step 0",
        "no records have come for 120 s, after step 0",
        "waiting for the first records, at step 0",
    ]


class Lagging(WaitingSource):
    def lag(self) -> StreamLag:
        return StreamLag(records=120, seconds=0.3, bad=2)


def test_a_slow_stream_is_reported_by_time_with_its_lag(caplog: pytest.LogCaptureFixture) -> None:
    source, reports, now = Lagging(), list[ProgressReport](), [0.0]
    hooks = [ProgressHook(reports.append, clock=lambda: now[0]), LoggingHook(clock=lambda: now[0])]
    with caplog.at_level(logging.INFO, "monolith"), running(source, hooks=hooks) as run:
        source.append(1)
        run.trained(1)
        until(source.waiting.is_set)
        assert not reports
        now[0] = 11.0
        until(lambda: reports)
    assert (reports[0].step, reports[0].lag, len(reports)) == (1, source.lag(), 1)
    assert "lag 120 records, 0.3 s, 2 bad" in caplog.text
    assert run.trainer.lag() == source.lag()


def test_a_run_over_files_has_no_lag_and_no_ticks() -> None:
    ticks = threading.Event()

    class Look(Hook):
        def while_waiting(self, trainer: Trainer) -> None:
            ticks.set()

    run = Run(WaitingSource(), hooks=[Look()])
    run.trainer.fit([{"id": [1], "label": [0.0]}])
    assert run.trainer.lag() is None
    assert not ticks.is_set()


def test_a_history_is_not_called_records_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    class History:
        phase = "history"

    with caplog.at_level(logging.INFO, "monolith"):
        Pause(Run(WaitingSource()).trainer, hooks=(), last=None, source=History()).tick()
    assert caplog.messages == ["waiting for the first batches of the history, at step 0"]
