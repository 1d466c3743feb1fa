"""`monolith predict`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from monolith.cli.job import Job, load_job
from monolith.cli.options import Sets, Target, Untrained
from monolith.cli.run_flags import run_flags
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch
from monolith.serve.predictor import load

__all__ = ["predict"]


@run_flags
def predict(
    target: Target,
    sets: Sets = None,
    export: Annotated[Path | None, typer.Option(help="Predict by this export instead of the model.")] = None,
    keys: Annotated[str | None, typer.Option(help="Heads and dense columns to write, separated by commas.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples to predict; by default all.", min=0)] = None,
    untrained: Untrained = False,
    *,
    flags: dict[str, object],
) -> None:
    """Write one JSON object per example to stdout: predictions by head, and the columns asked for."""
    job = Job(load_job(target, sets or (), flags))
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
