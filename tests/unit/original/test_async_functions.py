"""Danger: the update of a step is lost, made twice, or made in another order because it was put off."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.features.batch import Batch
from monolith.original import AsyncFunctionManager
from monolith.original.checkpoint_state import SaveHelper
from monolith.train import RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook


class Counter:
    def __init__(self) -> None:
        self.value = 0.0
        self.log: list[object] = []

    def add(self, amount: float = 1.0, *, times: int = 1) -> None:
        self.value += amount * times
        self.log.append(amount)


def test_after_two_steps_one_update_has_been_made() -> None:
    x, pipeline = Counter(), AsyncFunctionManager()
    pipeline.add_async_function(x.add, (1.0,))
    assert x.value == 0.0
    pipeline.add_async_function(x.add, (1.0,))
    assert x.value == 1.0


def test_synchronous_is_at_once() -> None:
    x = Counter()
    AsyncFunctionManager(is_async=False).add_async_function(x.add, (1.0,))
    assert x.value == 1.0
    AsyncFunctionManager().add_async_function(x.add, is_async=False)
    assert x.value == 2.0


def test_a_function_without_arguments_works() -> None:
    x, pipeline = Counter(), AsyncFunctionManager()
    for _ in range(2):
        pipeline.add_async_function(x.add)
    assert x.value == 1.0


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_n_calls_make_n_updates_after_the_drain_in_order(threaded: bool, n: int) -> None:
    x, pipeline = Counter(), AsyncFunctionManager(threaded=threaded)
    for step in range(n):
        pipeline.add_async_function(x.add, (step,), {"times": 2})
        if not threaded:
            assert x.log == list(range(step))
    pipeline.drain()
    assert x.log == list(range(n))
    assert x.value == 2 * sum(range(n))
    pipeline.drain()
    assert x.log == list(range(n))


def test_queues_are_late_each_by_itself() -> None:
    x, pipeline = Counter(), AsyncFunctionManager()
    for step in range(2):
        pipeline.add_async_function(x.add, (step,), queue_name="sparse")
        pipeline.add_async_function(x.add, (10 + step,), queue_name="dense")
    assert x.log == [0, 10]
    pipeline.drain()
    assert x.log == [0, 10, 1, 11]


def test_a_synchronous_call_comes_after_what_its_queue_has_waiting() -> None:
    x = Counter()
    with AsyncFunctionManager(threaded=True) as pipeline:
        pipeline.add_async_function(x.add, (1,))
        pipeline.add_async_function(x.add, (2,))
        pipeline.add_async_function(x.add, (3,), is_async=False)
        assert x.log == [1, 2, 3]


def test_threaded_work_runs_beside_the_caller_and_is_awaited_by_the_next_call() -> None:
    started, go_on, log = threading.Event(), threading.Event(), []

    def update(step: int) -> None:
        started.set()
        assert go_on.wait(60)
        log.append((step, threading.current_thread() is threading.main_thread()))

    with AsyncFunctionManager(threaded=True) as pipeline:
        pipeline.add_async_function(update, (0,))
        pipeline.add_async_function(update, (1,))
        assert started.wait(60)
        assert log == []
        go_on.set()
        pipeline.add_async_function(update, (2,))
        assert (0, False) in log
    assert log == [(0, False), (1, False), (2, False)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("monolith-late")]


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_of_a_late_call_is_raised(threaded: bool) -> None:
    def fail() -> None:
        raise RuntimeError("no such table")

    pipeline = AsyncFunctionManager(threaded=threaded)
    pipeline.add_async_function(fail)
    with pytest.raises(RuntimeError, match="no such table"):
        pipeline.drain()


def test_after_an_error_in_the_step_its_update_is_dropped() -> None:
    x = Counter()

    def step_fails() -> None:
        with AsyncFunctionManager() as pipeline:
            pipeline.add_async_function(x.add)
            raise KeyError

    with pytest.raises(KeyError):
        step_fails()
    assert x.value == 0.0


class Counted(nn.Module):
    """Has a number that a hook changes one step late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = batch["x"]
        return logits


class CountLate(Hook):
    def __init__(self, pipeline: AsyncFunctionManager, fail_at: int | None = None) -> None:
        self.pipeline, self.fail_at = pipeline, fail_at

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.pipeline.add_async_function(trainer.model.seen.add_, (1,))
        if result.step == self.fail_at:
            raise KeyError


def counted_run(model_dir: Path, pipeline: AsyncFunctionManager, **options: int) -> Counted:
    model = Counted()
    config = RunConfig(model_dir=str(model_dir), save_checkpoints_steps=2)
    hooks = [CountLate(pipeline, **options), *pipeline.hooks]
    Trainer(model, config=config, hooks=hooks).fit([{"x": torch.ones(1), "label": torch.ones(1)}] * 5)
    return model


@pytest.mark.parametrize("threaded", [False, True])
def test_a_trainer_drains_the_manager_whose_hooks_it_was_given(tmp_path: Path, threaded: bool) -> None:
    assert counted_run(tmp_path, AsyncFunctionManager(threaded=threaded)).seen.item() == 5
    steps = SaveHelper(tmp_path / "model.ckpt").get_existing_checkpoint_steps()
    assert {2, 5} <= steps
    for step in steps:
        saved = Trainer(Counted(), config=RunConfig(model_dir=str(tmp_path), restore_ckpt=f"model.ckpt-{step}"))
        assert saved.restore()
        assert saved.model.seen.item() == step


def test_a_run_that_failed_drops_what_waits_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = AsyncFunctionManager()
    with pytest.raises(KeyError):
        counted_run(tmp_path, pipeline, fail_at=3)
    assert "1 calls that waited for the next step are dropped" in caplog.text
    pipeline.drain()


def test_a_call_that_never_ran_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = AsyncFunctionManager()
    pipeline.add_async_function(list, queue_name="dense")
    del pipeline
    gc.collect()
    assert "a call that waited in 'dense' never ran" in caplog.text
