"""Danger: a run that saves too often, not at all, a step it is not at, or dies of a disk that failed once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from torch import nn

from monolith.errors import InvalidArgumentError, SaveInterruptedError, StorageError
from monolith.train import StepResult, Trainer
from monolith.train.hooks import CheckpointSaverListener, Hook, NoFirstSaveCheckpointSaverHook

BATCH = {"x": torch.ones(1), "label": torch.ones(1)}


class Ledger:
    """What has been saved, of all savers of a run."""

    def __init__(self) -> None:
        self.full: list[int] = []
        self.dense: list[int] = []


class Saver:
    """A saver that writes into a ledger, and fails when told."""

    def __init__(
        self,
        ledger: Ledger,
        mode: Literal["full", "dense_only"] = "full",
        write: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.ledger, self.mode, self.write = ledger, mode, write
        self.begun: list[int] = []
        self.hurried: list[int] = []
        self.is_hurried = threading.Event()
        self.preparation: Future[None] | None = None

    def is_saved(self, trainer: Trainer) -> bool:
        own = self.ledger.full if self.mode == "full" else [*self.ledger.dense, *self.ledger.full]
        return trainer.step in own

    def prepare(self) -> Future[None] | None:
        return self.preparation

    def begin(self, trainer: Trainer) -> Any:  # noqa: ANN401
        if self.preparation is not None:
            self.preparation.result()
            self.preparation = None
        step = trainer.step
        self.begun.append(step)

        class Pending:
            def finish(pending) -> str:  # noqa: N805
                self.write(step)
                (self.ledger.full if self.mode == "full" else self.ledger.dense).append(step)
                return f"model.ckpt-{step}"

            def hurry(pending) -> None:  # noqa: N805
                self.hurried.append(step)
                self.is_hurried.set()

        return Pending()


class Diary(CheckpointSaverListener):
    """Writes down what is called."""

    def __init__(self, name: str, lines: list[str], fails_at: str | None = None) -> None:
        self.name, self.lines, self.fails_at = name, lines, fails_at

    def _note(self, moment: str, step: int) -> None:
        self.lines.append(f"{self.name}.{moment} {step}")
        if moment == self.fails_at:
            raise StorageError(f"{self.name} cannot {moment}")

    def begin(self, trainer: Trainer) -> None:
        self._note("begin", trainer.step)

    def before_save(self, trainer: Trainer, step: int) -> None:
        self._note("before_save", step)

    def after_cut(self, trainer: Trainer, step: int) -> None:
        self._note("after_cut", step)

    def after_save(self, trainer: Trainer, step: int) -> None:
        self._note("after_save", step)

    def end(self, trainer: Trainer, step: int) -> None:
        self._note("end", step)


class Constant(nn.Module):
    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = batch["x"]
        return logits


def run(steps: int, *hooks: Hook) -> Trainer:
    trainer = Trainer(Constant(), hooks=hooks)
    trainer.fit([BATCH] * steps, max_steps=steps)
    return trainer


def test_no_first_save_and_one_at_the_end() -> None:
    ledger = Ledger()
    run(1, NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=1000))
    assert ledger.full == [1]
    first = Ledger()
    run(1, NoFirstSaveCheckpointSaverHook(Saver(first), save_steps=1000, no_first_save=False))
    assert first.full == [0, 1]


def test_every_so_many_steps_and_never_twice_at_one() -> None:
    ledger = Ledger()
    run(6, NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=2, background=False))
    assert ledger.full == [2, 4, 6]


def test_every_so_many_seconds() -> None:
    now = [0.0]

    class Tick(Hook):
        def before_step(self, trainer: Trainer) -> None:
            now[0] += 4

    ledger = Ledger()
    hook = NoFirstSaveCheckpointSaverHook(Saver(ledger), save_secs=10, background=False, clock=lambda: now[0])
    run(7, hook, Tick())
    assert ledger.full == [3, 6, 7]


def test_without_a_period_only_at_the_end() -> None:
    ledger = Ledger()
    run(5, NoFirstSaveCheckpointSaverHook(Saver(ledger)))
    assert ledger.full == [5]


def test_a_disabled_timer_leaves_the_end() -> None:
    ledger = Ledger()
    hook = NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=1)
    assert hook.timer is not None
    hook.timer.disable()
    run(3, hook)
    assert ledger.full == [3]


def test_order_of_listeners() -> None:
    lines: list[str] = []
    hook = NoFirstSaveCheckpointSaverHook(
        Saver(Ledger(), write=lambda step: lines.append(f"write {step}")),
        listeners=[Diary("a", lines), Diary("b", lines)],
        guard_listeners=[Diary("g", lines), Diary("h", lines)],
    )
    run(1, hook)
    # Writing runs on a thread of its own, but nothing here depends on when.
    writing = lines.pop(lines.index("write 1"))
    assert writing == "write 1"
    assert lines == [
        *("g.begin 0", "h.begin 0", "a.begin 0", "b.begin 0"),
        *("g.before_save 1", "h.before_save 1", "a.before_save 1", "b.before_save 1"),
        *("a.after_cut 1", "b.after_cut 1", "h.after_cut 1", "g.after_cut 1"),
        *("a.after_save 1", "b.after_save 1", "h.after_save 1", "g.after_save 1"),
        *("a.end 1", "b.end 1"),
    ]


@pytest.mark.parametrize("failing", ["before_save", "after_save"])
def test_guards_are_called_when_a_save_fails_for_good(failing: str) -> None:
    lines: list[str] = []
    hook = NoFirstSaveCheckpointSaverHook(
        Saver(Ledger()),
        listeners=[Diary("a", lines, fails_at=failing)],
        guard_listeners=[Diary("g", lines)],
        no_first_save=False,
        ignore_save_errors=True,
    )
    run(0, hook)
    # Twice tried at the start; the state was saved by then, or is tried again at the end.
    assert lines.count(f"a.{failing} 0") >= 2
    assert lines.count("g.before_save 0") == lines.count("g.after_save 0") >= 1


def test_a_guard_that_fails_stops_nothing() -> None:
    ledger = Ledger()
    lines: list[str] = []
    guards = [Diary("g", lines, fails_at="before_save"), Diary("h", lines, fails_at="after_save")]
    run(1, NoFirstSaveCheckpointSaverHook(Saver(ledger), guard_listeners=guards))
    assert ledger.full == [1]
    assert "g.after_save 1" in lines


def fails(*errors: Exception) -> Callable[[int], None]:
    left = list(errors)

    def write(step: int) -> None:
        if left:
            raise left.pop(0)

    return write


FULL, RESTARTED = StorageError("disk full"), SaveInterruptedError("the server was started again")


def test_a_failed_save_is_tried_again_once() -> None:
    ledger = Ledger()
    saver = Saver(ledger, write=fails(FULL))
    run(1, NoFirstSaveCheckpointSaverHook(saver))
    assert (saver.begun, ledger.full) == ([1, 1], [1])
    with pytest.raises(StorageError, match="disk full"):
        run(1, NoFirstSaveCheckpointSaverHook(Saver(Ledger(), write=fails(FULL, FULL))))
    ignored = Saver(Ledger(), write=fails(FULL, FULL))
    run(1, NoFirstSaveCheckpointSaverHook(ignored, ignore_save_errors=True))
    assert ignored.ledger.full == []


def test_servers_that_are_started_again_do_not_count_as_failures_but_not_for_ever() -> None:
    ledger = Ledger()
    saver = Saver(ledger, write=fails(RESTARTED, FULL, RESTARTED, RESTARTED))
    run(1, NoFirstSaveCheckpointSaverHook(saver))
    assert (saver.begun, ledger.full) == ([1] * 5, [1])
    with pytest.raises(StorageError, match="disk full"):
        run(1, NoFirstSaveCheckpointSaverHook(Saver(Ledger(), write=fails(FULL, RESTARTED, FULL))))
    dies_of_saving = Saver(Ledger(), write=fails(*[RESTARTED] * 100))
    with pytest.raises(SaveInterruptedError, match="started again"):
        run(1, NoFirstSaveCheckpointSaverHook(dies_of_saving))
    assert dies_of_saving.begun == [1] * 10


def test_other_errors_are_not_tried_again() -> None:
    lines: list[str] = []

    def broken(step: int) -> None:
        raise KeyError("a bug")

    saver = Saver(Ledger(), write=broken)
    hook = NoFirstSaveCheckpointSaverHook(saver, guard_listeners=[Diary("g", lines)], ignore_save_errors=True)
    with pytest.raises(KeyError, match="a bug"):
        run(1, hook)
    assert saver.begun == [1]
    assert lines[-1] == "g.after_save 1"


def test_training_goes_on_while_a_save_is_written() -> None:
    ledger, stepped = Ledger(), threading.Event()

    def wait_for_a_later_step(step: int) -> None:
        if step == 2:
            assert stepped.wait(60)

    class Later(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.step == 5:
                stepped.set()

    lines: list[str] = []
    hook = NoFirstSaveCheckpointSaverHook(
        Saver(ledger, write=wait_for_a_later_step), save_steps=2, listeners=[Diary("a", lines)]
    )
    run(9, hook, Later())
    assert ledger.full[0] == 2
    assert ledger.full[-1] == 9
    # Never two at a time: what was due meanwhile waited.
    saves = [line for line in lines if "before_save" in line or "after_save" in line]
    assert [line.split(".")[1].split()[0] for line in saves] == ["before_save", "after_save"] * (len(saves) // 2)


def test_a_save_is_hurried_by_those_who_wait_for_it() -> None:
    class Watch(Hook):
        def __init__(self, saver: Saver) -> None:
            self.saver, self.seen = saver, []

        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            self.seen.append(list(self.saver.hurried))

    def write_until_hurried(step: int) -> None:
        assert saver.is_hurried.wait(60)

    saver = Saver(Ledger(), write=write_until_hurried)
    watch = Watch(saver)
    run(3, watch, NoFirstSaveCheckpointSaverHook(saver, save_steps=1))
    assert watch.seen == [[], [], []], "training does not wait"
    assert saver.hurried == [1, 3], "the end waits for the save under way, then for its own"


def test_a_save_waits_for_its_preparation_and_training_does_not() -> None:
    ledger = Ledger()
    saver = Saver(ledger)
    preparation: Future[None] = Future()
    saver.preparation = preparation

    class Ready(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.step == 5:
                preparation.set_result(None)

    run(9, Ready(), NoFirstSaveCheckpointSaverHook(saver, save_steps=3))
    assert ledger.full[0] == 5


def test_a_failed_preparation_is_a_failed_try() -> None:
    saver = Saver(Ledger())
    saver.preparation = Future()
    saver.preparation.set_exception(StorageError("disk full"))

    hook = NoFirstSaveCheckpointSaverHook(saver, save_steps=1, listeners=[Diary("a", [])])
    with pytest.raises(StorageError, match="disk full"):
        run(1, hook)


def test_dense_only_saves_are_left_out_where_there_is_a_full_one() -> None:
    ledger = Ledger()
    full = NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=4, background=False)
    dense = NoFirstSaveCheckpointSaverHook(Saver(ledger, mode="dense_only"), save_steps=2, background=False)
    run(9, full, dense)
    assert ledger.full == [4, 8, 9]
    assert ledger.dense == [2, 6]  # and none at the end


def test_trigger_save_in_a_hook() -> None:
    ledger = Ledger()
    hook = NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=1000)
    seen: list[list[int]] = []

    class AtOne(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.step == 1:
                hook.trigger_save(trainer)
                seen.append(list(ledger.full))

    run(3, hook, AtOne())
    assert seen == [[1]]
    assert ledger.full == [1, 3]


def test_trigger_save_resets_the_timer() -> None:
    ledger = Ledger()
    hook = NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=3, background=False)

    class AtTwo(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.step == 2:
                hook.trigger_save(trainer)

    run(6, hook, AtTwo())
    assert ledger.full == [2, 5, 6]


def test_trigger_save_from_another_thread_waits_for_the_end_of_a_step() -> None:
    ledger = Ledger()
    hook = NoFirstSaveCheckpointSaverHook(Saver(ledger), ignore_save_errors=True)
    outcome: list[object] = []

    class AskElsewhere(Hook):
        thread: threading.Thread

        def before_step(self, trainer: Trainer) -> None:
            if trainer.step == 2:
                self.thread = threading.Thread(target=self._ask, args=(trainer,), daemon=True)
                self.thread.start()
                while not hook._requests:
                    assert self.thread.is_alive()

        def _ask(self, trainer: Trainer) -> None:
            hook.trigger_save(trainer, timeout=60)
            outcome.append(list(ledger.full))

    ask = AskElsewhere()
    run(6, ask, hook)
    ask.thread.join(60)
    assert outcome[0][0] == 3  # type: ignore[index]


def ask_elsewhere(hook: NoFirstSaveCheckpointSaverHook, **options: Any) -> Future[str | None]:  # noqa: ANN401
    """Run three steps, during one of which another thread asks for a save; its answer."""
    answer: Future[str | None] = Future()

    def ask(trainer: Trainer) -> None:
        try:
            answer.set_result(hook.trigger_save(trainer, timeout=60, **options))
        except Exception as error:
            answer.set_exception(error)

    class Ask(Hook):
        def before_step(self, trainer: Trainer) -> None:
            if trainer.step == 1:
                thread = threading.Thread(target=ask, args=(trainer,), daemon=True)
                thread.start()
                while not hook._requests:
                    assert thread.is_alive()

    with suppress(RuntimeError):
        run(3, Ask(), hook)
    return answer


def test_a_triggered_save_that_fails_may_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    hook = NoFirstSaveCheckpointSaverHook(Saver(Ledger(), write=fails(FULL, FULL)))
    trainer = Trainer(Constant())
    assert hook.trigger_save(trainer, ignore_save_errors=True) is None
    assert "disk full" in caplog.text
    assert hook.trigger_save(trainer, ignore_save_errors=True) == "model.ckpt-0"


def test_one_that_another_thread_asked_for_may_be_ignored_too(caplog: pytest.LogCaptureFixture) -> None:
    hook = NoFirstSaveCheckpointSaverHook(Saver(Ledger(), write=fails(FULL, FULL)))
    assert ask_elsewhere(hook, ignore_save_errors=True).result(60) is None
    assert "disk full" in caplog.text


def test_another_thread_hears_of_any_error() -> None:
    hook = NoFirstSaveCheckpointSaverHook(Saver(Ledger(), write=fails(RuntimeError("not of a disk"))))
    with pytest.raises(RuntimeError, match="not of a disk"):
        ask_elsewhere(hook).result(60)


def test_errors_of_a_triggered_save_are_raised_whatever_the_hook_does_about_its_own() -> None:
    hook = NoFirstSaveCheckpointSaverHook(Saver(Ledger(), write=fails(FULL, FULL)), ignore_save_errors=True)
    trainer = Trainer(Constant())
    with pytest.raises(StorageError, match="disk full"):
        hook.trigger_save(trainer)
    hook.trigger_save(trainer)


def test_a_broken_run_finishes_its_save_and_starts_none() -> None:
    ledger = Ledger()
    lines: list[str] = []

    class Break(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.step == 3:
                raise RuntimeError("broken")

    hook = NoFirstSaveCheckpointSaverHook(Saver(ledger), save_steps=2, guard_listeners=[Diary("g", lines)])
    with pytest.raises(RuntimeError, match="broken"):
        run(9, hook, Break())
    assert ledger.full == [2]
    assert lines[-1] == "g.after_save 2"


def test_metrics_are_logged_under_the_prefix_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONOLITH_METRIC_PREFIX", "shop.ranking")
    with caplog.at_level("DEBUG"):
        run(1, NoFirstSaveCheckpointSaverHook(Saver(Ledger())))
    assert "shop.ranking.save_checkpoint {'mode': 'full'} = 1" in caplog.text


def test_metrics() -> None:
    now = [0.0]

    def write(step: int) -> None:
        now[0] += 2.5

    told: list[tuple[str, float, Mapping[str, str]]] = []
    for mode in ("full", "dense_only"):
        saver = Saver(Ledger(), mode, write)  # type: ignore[arg-type]
        hook = NoFirstSaveCheckpointSaverHook(
            saver, save_steps=1, background=False, clock=lambda: now[0], on_metric=lambda *args: told.append(args)
        )
        run(1, hook)
    assert told == [
        ("save_checkpoint", 1, {"mode": "full"}),
        ("save_checkpoint_time", 2.5, {"mode": "full"}),
        ("save_checkpoint", 1, {"mode": "dense_only"}),
        ("save_checkpoint_time", 2.5, {"mode": "dense_only"}),
    ]


def test_both_periods_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="every_secs"):
        NoFirstSaveCheckpointSaverHook(Saver(Ledger()), save_secs=1, save_steps=1)
