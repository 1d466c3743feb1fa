"""Danger: a runner whose flags are read and not followed, or whose evaluation skips a checkpoint or never ends."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import tpu_tasks
from monolith.errors import ConfigError
from monolith.original.tasks import TaskParams, TrainParams
from monolith.original.tpu_runner import TPUFlags, TPURunner, run_with_flags
from monolith.state.index import read_checkpoint_state
from monolith.train.evaluation import checkpoints_iterator
from tpu_tasks import Clicks, ranking_params


def params(**train: object) -> TaskParams:
    made = Clicks.params()
    return made.model_copy(update={"train": TrainParams(**{**dict(made.train), **train})})  # type: ignore[arg-type]


def steps_saved(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints_iterator(str(folder))]


def test_a_task_trains_until_its_data_ends_and_is_saved_there(tmp_path: Path) -> None:
    runner = TPURunner(params(), TPUFlags(model_dir=str(tmp_path)))
    assert runner.run() == 11
    assert runner.task_param.accelerator == "tpu"
    assert steps_saved(tmp_path) == [11]


def test_a_task_ends_at_its_last_step_and_a_second_run_continues(tmp_path: Path) -> None:
    flags = TPUFlags(model_dir=str(tmp_path))
    assert TPURunner(params(max_steps=4), flags).run() == 4
    assert TPURunner(params(max_steps=6), flags).run() == 6
    assert TPURunner(params(max_steps=None, steps=1), flags).run() == 7


def test_every_batch_has_the_same_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clicks, "shapes", shapes := set[int]())
    TPURunner(params(), TPUFlags()).run()
    assert shapes == {8}
    shapes.clear()
    TPURunner(params(per_replica_batch_size=9), TPUFlags()).run()
    assert shapes == {9}


def test_data_that_repeats_goes_on_until_the_last_step() -> None:
    assert TPURunner(params(repeat=True, max_steps=25), TPUFlags()).run() == 25


def test_the_task_overrides_the_steps_between_two_checkpoints() -> None:
    assert TPURunner(params(), TPUFlags(save_checkpoints_steps=7)).save_checkpoints_steps == 7
    assert TPURunner(params(save_checkpoints_steps=3), TPUFlags(save_checkpoints_steps=7)).save_checkpoints_steps == 3


@pytest.mark.parametrize(("every", "loop", "expected"), [(5, 1, 5), (5, 3, 6), (6, 3, 6), (1, 10000, 10000)])
def test_the_host_saves_and_reports_between_two_loops(every: int, loop: int, expected: int) -> None:
    runner = TPURunner(params(), TPUFlags(save_checkpoints_steps=every, iterations_per_loop=loop))
    config = runner.create_tpu_estimator(Clicks(params()).create_model_fn(), None, None)[0].config
    assert config.save_checkpoints_steps == expected
    assert config.log_step_count_steps == config.save_summary_steps == loop


def test_checkpoints_are_written_at_multiples_of_a_loop(tmp_path: Path) -> None:
    flags = TPUFlags(model_dir=str(tmp_path), save_checkpoints_steps=2, iterations_per_loop=3)
    TPURunner(params(), flags).run()
    steps = steps_saved(tmp_path)
    assert len(steps) > 1
    # A save that comes due while another one is being written waits for it.
    assert min(b - a for a, b in zip([0, *steps[:-2]], steps[:-1], strict=True)) >= 3


def test_without_a_period_only_the_end_is_saved() -> None:
    runner = TPURunner(params(), TPUFlags())
    assert runner.create_tpu_estimator(Clicks(params()).create_model_fn(), None, None)[0].config.save_every == {}


def test_the_flag_overrides_the_last_day(tmp_path: Path) -> None:
    days = ("20220901", "20220902", "20220903")
    task = ranking_params(tmp_path, days=days)
    task = task.model_copy(update={"train": task.train.model_copy(update={"end_date": "20220903"})})
    assert TPURunner(task, TPUFlags(host_call_every_n_steps=0)).run() == 8  # 60 rows in batches of 8
    flags = TPUFlags(host_call_every_n_steps=0, overwrite_end_date="20220902")
    runner = TPURunner(task, flags)
    assert runner.task_param.train.end_date == "20220902"
    assert runner.run() == 5
    with pytest.raises(ConfigError, match=r"TrainParams.end_date"):
        TPURunner(task, TPUFlags(overwrite_end_date="2022-09-02"))


def test_the_processor_test_saves_nothing_and_has_its_own_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clicks, "shapes", shapes := set[int]())
    flags = TPUFlags(cpu_test=True, model_dir=str(tmp_path / "model"), device="no such device")
    assert TPURunner(params(max_steps=3), flags).run() == 3
    assert shapes == {128}
    assert not (tmp_path / "model").exists()
    with pytest.raises(ConfigError, match=r"cpu_test: expected mode train, got eval"):
        TPURunner(params(), TPUFlags(cpu_test=True, mode="eval")).run()


def test_the_estimator_of_the_processor_test_is_one_replica_on_the_processor() -> None:
    estimator, replicas = TPURunner(params(), TPUFlags()).create_tpu_estimator_on_cpu(
        Clicks(params()).create_model_fn(), None, None
    )
    assert (estimator.config.device, estimator.config.model_dir, replicas) == ("cpu", None, 1)


def test_evaluation_walks_all_checkpoints_and_ends_at_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = TPUFlags(model_dir=str(tmp_path))
    for max_steps in (2, 4, 6):
        TPURunner(params(max_steps=max_steps), flags).run()
    with caplog.at_level(logging.INFO):
        assert TPURunner(params(max_steps=6), flags.model_copy(update={"mode": "eval"})).run() == 6
    # 17 examples are two batches of 8.
    assert "batches of 8 rows: 2 steps" in caplog.text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "eval"))
    events.Reload()
    points = sorted((point.step, point.value) for point in events.Scalars("click/examples"))
    assert points == [(2, 16), (4, 16), (6, 16)]
    assert read_checkpoint_state(str(tmp_path)) is not None


def test_both_at_once_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="train_and_eval is not supported"):
        TPURunner(params(), TPUFlags(mode="train_and_eval")).run()


def test_what_cannot_be_followed_is_refused_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"'grpc://10.0.0.1:8470' is a remote TPU"):
        TPURunner(params(), TPUFlags(tpu="grpc://10.0.0.1:8470")).run()
    with caplog.at_level(logging.WARNING):
        TPURunner(params(max_steps=1), TPUFlags(tpu_zone="us-central1-b", partition_strategy="div")).run()
    assert "--tpu_zone=us-central1-b is ignored" in caplog.text
    assert "--partition_strategy=div is ignored" in caplog.text
    with pytest.raises(ConfigError, match=r"TPUFlags.partition_strategy"):
        TPUFlags(partition_strategy="hash")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train.per_replica_batch_size: the task does not say"):
        TPURunner(params(per_replica_batch_size=None), TPUFlags()).run()
    with pytest.raises(ConfigError, match=r"TPUFlags.model_dir: there is none"):
        TPURunner(params(), TPUFlags(mode="eval")).run()


def test_flags_are_read_as_the_original_writes_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        given = ["--task=tpu_tasks.Clicks", f"--model_dir={tmp_path}", "--iterations_per_loop=2", "--nocpu_test"]
        assert (
            run_with_flags([*given, "--enable_stopping_signals", "--pipeline_execution=false", "--mode", "train"]) == 0
        )
    assert steps_saved(tmp_path) == [11]
    assert "iterations_per_loop: 2" in caplog.text
    assert "enable_stopping_signals: True" in caplog.text
    assert "task_param: " in caplog.text
    with pytest.raises(ConfigError, match=r"--task: 'tpu_tasks.Nothing'"):
        run_with_flags(["--task=tpu_tasks.Nothing"])
    with pytest.raises(ConfigError, match=r"--task: expected module.Class"):
        run_with_flags([])


def test_the_module_is_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "monolith.original.tpu_runner", "--cpu_test"]
    folder = str(Path(tpu_tasks.__file__).parent)
    good = subprocess.run(
        [*command, "--task=tpu_tasks.Clicks"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert good.returncode == 0, good.stderr
    bad = subprocess.run([*command, "--mode=sing"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1
    assert bad.stderr.startswith("tpu_runner: TPUFlags.mode: ")
