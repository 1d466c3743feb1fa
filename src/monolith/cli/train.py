"""`monolith train`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from monolith.cli.job import Job, load_job
from monolith.cli.options import Json, Sets, Target
from monolith.cli.run_flags import run_flags
from monolith.cli.signals import stop_on_interrupt
from monolith.errors import RunInterruptedError
from monolith.train.hooks.progress import ProgressHook, json_lines, rich_lines

__all__ = ["train"]

Steps = Annotated[int | None, typer.Option(help="Steps to make in this run.", min=0)]
MaxSteps = Annotated[int | None, typer.Option(help="Global step to stop at.", min=0)]


@run_flags
def train(
    target: Target,
    sets: Sets = None,
    steps: Steps = None,
    max_steps: MaxSteps = None,
    as_json: Json = False,
    *,
    flags: dict[str, object],
) -> None:
    """Train a model, from where its model_dir stopped, until the steps are made or the data has ended.

    A run that has finished is not trained further unless there is more to do: more steps, more epochs, or other data
    (--no-resume-data). Progress goes to the terminal, with --json as one line per interval to stdout. An interrupt ends the
    run after the current step and saves.
    """
    config = load_job(target, sets or (), flags)
    job = Job(config)
    console = Console(highlight=False)
    write = json_lines(sys.stdout) if as_json else rich_lines(console)
    trainer = job.estimator.trainer
    limits = (config.steps, config.max_steps) if steps is None and max_steps is None else (steps, max_steps)
    progress = ProgressHook(write, every_steps=config.run.log_step_count_steps)
    with stop_on_interrupt(trainer.interrupt) as interrupted:
        try:
            job.estimator.train(job.source("train"), steps=limits[0], max_steps=limits[1], hooks=[progress])
        except RunInterruptedError:
            # After a signal the exit code says it. Whoever else has interrupted the run did not finish it either.
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


def _print_end(console: Console, job: Job, *, interrupted: bool) -> None:
    trainer, model_dir = job.estimator.trainer, job.estimator.config.model_dir
    if not trainer.steps_made and not interrupted:
        return  # the trainer has logged that there is nothing to do, and what to do about it
    saved = f", saved in {model_dir}" if model_dir else ", not saved: there is no model_dir"
    if not (job.estimator.runner.is_local or job.estimator.runner.is_chief):
        saved = ", and worker 0 saves"
    console.print(f"ended at step {trainer.step:,}: {trainer.stop_reason}{saved}", soft_wrap=True)
