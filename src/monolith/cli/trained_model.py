"""`monolith evaluate`, `predict` and `export`: verbs on a model that was trained."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from monolith.cli.job import RESTORE_FIELDS, JobConfig, ModelJob, load_job, run_flags
from monolith.cli.options import Json, Sets, Target, Untrained
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch
from monolith.train import Estimator, RunConfig
from monolith.train.evaluation import evaluate_checkpoints

__all__ = ["evaluate", "export", "predict"]


@run_flags(*RESTORE_FIELDS)
def evaluate(
    target: Target,
    sets: Sets = None,
    steps: Annotated[int | None, typer.Option(help="Batches to read, by default all.", min=0)] = None,
    each_checkpoint: Annotated[
        bool, typer.Option("--each-checkpoint", help="Evaluate every checkpoint, oldest first.")
    ] = False,
    wait_secs: Annotated[
        float, typer.Option(help="With --each-checkpoint: seconds to wait for each further one.", min=0)
    ] = 0.0,
    as_json: Json = False,
    untrained: Untrained = False,
    *,
    flags: dict[str, object],
) -> None:
    """Print the metrics of every head of a trained model.

    With --each-checkpoint those of every checkpoint, until one has reached max_steps or no new one comes.
    """
    config = load_job(target, sets or (), flags)
    if each_checkpoint:
        _evaluate_each(config, steps, wait_secs, as_json)
        return
    job = ModelJob(config)
    job.require_trained(untrained)
    metrics = job.estimator.evaluate(job.source("eval"), steps=steps)
    show(metrics, as_json=as_json, title=f"step {metrics['global_step']:,}")


def _evaluate_each(config: JobConfig, steps: int | None, wait_secs: float, as_json: bool) -> None:
    job = ModelJob(config)

    def made(run: RunConfig) -> Estimator:
        return ModelJob(config.model_copy(update={"run": run})).estimator

    some = False
    for metrics in evaluate_checkpoints(
        made, config.run, lambda: job.source("eval"), steps=steps, max_steps=config.max_steps, timeout_secs=wait_secs
    ):
        some = True
        show(metrics, as_json=as_json, title=f"step {metrics['global_step']:,}")
    if not some:
        job.require_trained(untrained=False)


@run_flags(*RESTORE_FIELDS, "export_dir_base")
def export(
    target: Target,
    sets: Sets = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the exported versions, by default that of the run.")
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write the dense part as program.onnx. The tables stay outside of it.")
    ] = False,
    as_json: Json = False,
    untrained: Untrained = False,
    *,
    flags: dict[str, object],
) -> None:
    """Write a trained model as a folder that serves predictions.

    The folder does not need the model's code.
    """
    job = ModelJob(load_job(target, sets or (), flags))
    job.require_trained(untrained)
    source = job.source("predict")
    example = None if source is None else next(iter(source), None)
    folder = job.estimator.export_saved_model(output, example=example, onnx=onnx)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    show({"folder": str(folder), "step": job.estimator.global_step, "bytes": size}, as_json=as_json)


@run_flags(*RESTORE_FIELDS)
def predict(
    target: Target,
    sets: Sets = None,
    export: Annotated[Path | None, typer.Option(help="Use this export instead of the model.")] = None,
    keys: Annotated[str | None, typer.Option(help="Heads and dense columns to write, separated by commas.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples to predict, by default all.", min=0)] = None,
    untrained: Untrained = False,
    *,
    flags: dict[str, object],
) -> None:
    """Write the predictions of a trained model as JSON lines.

    Each line on stdout is an example with its predictions by head, and with the columns of --keys.
    """
    job = ModelJob(load_job(target, sets or (), flags))
    if export is None:
        job.require_trained(untrained)
    wanted = None if keys is None else keys.split(",")
    if export is None:
        rows: Iterable[Mapping[str, Tensor]] = job.estimator.predict(job.source("predict"), predict_keys=wanted)
    else:
        rows = _by_export(export, job.estimator.data("predict", job.source("predict")), wanted)
    some = limit == 0
    for row in itertools.islice(rows, limit):
        some = True
        sys.stdout.write(json.dumps({name: value.tolist() for name, value in row.items()}) + "\n")
    if not some:
        raise InvalidArgumentError("source: the data to predict for has no rows; check its paths and filters")


def _by_export(folder: Path, source: Iterable[Batch], wanted: list[str] | None) -> Iterator[dict[str, Tensor]]:
    from monolith.serve.predictor import load

    predictor = load(folder)
    for batch in source:
        found = {**batch, **predictor.predict(batch)}
        names = [output.name for output in predictor.signature.outputs] if wanted is None else wanted
        chosen = {name: value for name in names if isinstance(value := found.get(name), Tensor)}
        missing = [name for name in names if name not in chosen]
        if missing:
            raise InvalidArgumentError(f"--keys: there is no head or dense column {missing[0]!r}")
        for values in zip(*chosen.values(), strict=True):
            yield dict(zip(chosen, values, strict=True))
