"""`monolith evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from monolith.cli.job import Job, load_job
from monolith.cli.options import Json, Sets, Target, Untrained
from monolith.cli.output import show
from monolith.cli.run_flags import run_flags

__all__ = ["evaluate"]


@run_flags
def evaluate(
    target: Target,
    sets: Sets = None,
    steps: Annotated[int | None, typer.Option(help="Batches to read; by default all.", min=0)] = None,
    as_json: Json = False,
    untrained: Untrained = False,
    *,
    flags: dict[str, object],
) -> None:
    """Print the metrics of every head, of the model as its model_dir has it."""
    job = Job(load_job(target, sets or (), flags))
    job.require_trained(untrained)
    metrics = job.estimator.evaluate(job.source("eval"), steps=steps)
    show(metrics, as_json=as_json, title=f"step {metrics['global_step']:,}")
