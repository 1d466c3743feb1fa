"""`monolith export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monolith.cli.job import Job, load_job
from monolith.cli.options import Json, Sets, Target, Untrained
from monolith.cli.output import show
from monolith.cli.run_flags import run_flags

__all__ = ["export"]


@run_flags
def export(
    target: Target,
    sets: Sets = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the versions; by default that of the run.")] = None,
    as_json: Json = False,
    untrained: Untrained = False,
    *,
    flags: dict[str, object],
) -> None:
    """Write the model, as its model_dir has it, as a folder that predicts without the model's code."""
    job = Job(load_job(target, sets or (), flags))
    job.require_trained(untrained)
    source = job.source("predict")
    example = None if source is None else next(iter(source), None)
    folder = job.estimator.export_saved_model(output, example=example)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    show({"folder": str(folder), "step": job.estimator.global_step, "bytes": size}, as_json=as_json)
