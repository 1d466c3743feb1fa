"""`monolith train`: training, ended in order by an interrupt."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer
from pydantic import JsonValue
from rich.console import Console

from monolith.cli.job import JobConfig, ModelJob, load_job, run_flags
from monolith.cli.options import Json, Sets, Target
from monolith.errors import ConfigError, RunInterruptedError
from monolith.train.hooks.progress import ProgressHook, json_lines, rich_lines

__all__ = ["stop_on_interrupt", "train"]

Steps = Annotated[int | None, typer.Option(help="Steps to make in this run.", min=0)]
MaxSteps = Annotated[int | None, typer.Option(help="Global step to stop at.", min=0)]


@run_flags()
def train(
    target: Target,
    sets: Sets = None,
    steps: Steps = None,
    max_steps: MaxSteps = None,
    then: Annotated[
        str | None, typer.Option(help="Stream to train when the data ends, such as stream:runs/clicks/events.")
    ] = None,
    then_from: Annotated[
        str | None,
        typer.Option(
            help="Where that stream begins: after-history, start, end, or a time such as 2026-01-31T12:00:00Z. "
            "[default: after-history]"
        ),
    ] = None,
    as_json: Json = False,
    *,
    flags: dict[str, object],
) -> None:
    """Train a model, continuing from its model_dir.

    Training ends when the steps are made or the data ends. A run that has finished is trained further only if there is more
    to do: more steps, more epochs, or other data (--no-resume-data). Progress is printed to the terminal, or with --json as
    one line per interval to stdout. An interrupt ends the run after the current step and saves. With --then the run goes on
    with a stream when the data ends, and then has no end. Started again, it continues where it was, also in the stream.
    """
    config = _with_stream(load_job(target, sets or (), flags), then, then_from)
    job = ModelJob(config)
    console = Console(highlight=False)
    write = json_lines(sys.stdout) if as_json else rich_lines(console)
    trainer = job.estimator.trainer
    limits = (config.steps, config.max_steps) if steps is None and max_steps is None else (steps, max_steps)
    progress = ProgressHook(write, every_steps=config.run.log_step_count_steps)
    with stop_on_interrupt(trainer.interrupt) as interrupted:
        try:
            job.estimator.train(job.source("train"), steps=limits[0], max_steps=limits[1], hooks=[progress])
        except RunInterruptedError:
            # After a signal the exit code reports it. A run that something else interrupted has failed.
            if not interrupted:
                raise
    if as_json:
        end = {
            "event": "end",
            "step": trainer.step,
            "steps_made": trainer.steps_made,
            "reason": trainer.stop_reason,
            "model_dir": job.estimator.config.model_dir,
        }
        console.print(json.dumps(end), markup=False, soft_wrap=True)
    else:
        _print_end(console, job, interrupted=bool(interrupted))
    if interrupted:
        raise typer.Exit(130)


def _with_stream(config: JobConfig, then: str | None, then_from: str | None) -> JobConfig:
    """Return `config` with the stream that the flags name, which keeps the settings of the file."""
    if then is not None:
        settings: dict[str, JsonValue] = dict(config.then) if isinstance(config.then, dict) else {}
        config = config.model_copy(update={"then": {**settings, "stream": then}})
    if then_from is not None:
        if config.then is None:
            raise ConfigError("--then-from: there is no stream; give --then, or then: in the file")
        config = config.model_copy(update={"then_from": int(then_from) if then_from.isdecimal() else then_from})
    return config


@contextmanager
def stop_on_interrupt(request_stop: Callable[[str], None]) -> Iterator[list[str]]:
    """Let the first SIGINT or SIGTERM request a stop after the current step. A second one has its usual effect.

    Yields a list that holds the name of the signal once one was received.
    """
    received: list[str] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        request_stop(f"received {received[0]}")
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in previous:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        restore()


def _print_end(console: Console, job: ModelJob, *, interrupted: bool) -> None:
    trainer, model_dir = job.estimator.trainer, job.estimator.config.model_dir
    if not trainer.steps_made and not interrupted:
        return  # the trainer has logged that there is nothing to do, and how to change that
    saved = f", saved in {model_dir}" if model_dir else ", not saved: there is no model_dir"
    if not (job.estimator.runner.is_local or job.estimator.runner.is_chief):
        saved = ", and worker 0 saves"
    console.print(f"ended at step {trainer.step:,}: {trainer.stop_reason}{saved}", soft_wrap=True)
