"""`monolith checkpoint list`, `keep` and `remove`: the checkpoints of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError
from monolith.state.index import (
    MonolithCheckpointState,
    get_monolith_checkpoint_state,
    read_checkpoint_state,
    with_exempt,
    write_monolith_checkpoint_state,
)
from monolith.state.model_dir import ModelDir
from monolith.state.paths import base_name
from monolith.state.restore_points import RestorePoint, restore_points
from monolith.state.retention import drop_checkpoint
from monolith.state.storage import LocalFolder

__all__ = ["checkpoint"]

ModelDirArgument = Annotated[str, typer.Argument(help="The model_dir of a run, a path or URL.", metavar="MODEL_DIR")]
CheckpointName = Annotated[
    str, typer.Argument(help="Name of the checkpoint, such as model.ckpt-3000.", metavar="CHECKPOINT")
]

checkpoint = typer.Typer(name="checkpoint", help="List, keep or remove the checkpoints of a run.", no_args_is_help=True)


@checkpoint.command("list")
def list_checkpoints(model_dir: ModelDirArgument, as_json: Json = False) -> None:
    """List the states that a run can be restored to.

    Oldest first. --restore-to of `monolith train` chooses one.
    """
    home = ModelDir(model_dir)
    if isinstance(home.folder, LocalFolder) and home.folder.path.is_file():
        raise InvalidArgumentError(f"{model_dir}: expected the model_dir of a saved run, got a file")
    exempt = {base_name(path) for path in _exempt(home).exempt_model_checkpoint_paths}
    index = read_checkpoint_state(home)
    newest = None if index is None else index.model_checkpoint_path
    points = [_described(point, exempt, newest) for point in restore_points(home)]
    if not points:
        raise InvalidArgumentError(f"{model_dir}: expected the model_dir of a saved run; it has nothing to restore")
    if as_json:
        show({"model_dir": model_dir, "restore_points": points}, as_json=True)
        return
    table = Table(title=model_dir, title_justify="left")
    for name in ("checkpoint", "step", "sequence", "time (UTC)", "note"):
        table.add_column(name)
    for point in points:
        moment = datetime.fromtimestamp(float(str(point["time"])), UTC)
        note = ", ".join(name for name in ("newest", "kept") if point[name])
        if point["parts"]:
            of = "servers or ranks" if point["checkpoint"] else "ranks"
            parts = "1 part" if point["parts"] == 1 else f"{point['parts']} parts"
            note = f"{note}, {parts} of {of}".removeprefix(", ")
        table.add_row(
            str(point["checkpoint"] or "(log)"),
            f"{point['step']:,}",
            str(point["sequence"]),
            f"{moment:%Y-%m-%d %H:%M:%S}",
            note,
        )
    Console(highlight=False).print(table)


@checkpoint.command()
def keep(model_dir: ModelDirArgument, name: CheckpointName) -> None:
    """Keep a checkpoint for good, so that training never removes it."""
    home = ModelDir(model_dir)
    write_monolith_checkpoint_state(home, with_exempt(_exempt(home), _path(home, name)))


@checkpoint.command()
def remove(model_dir: ModelDirArgument, name: CheckpointName) -> None:
    """Remove a checkpoint, unless it is the newest, kept, or in use."""
    home = ModelDir(model_dir)
    path = _path(home, name)
    if base_name(path) in {base_name(kept) for kept in _exempt(home).exempt_model_checkpoint_paths}:
        raise InvalidArgumentError(f"{name}: is kept for good; remove it from {model_dir}/monolith_checkpoint first")
    drop_checkpoint(path, home)


def _exempt(home: ModelDir) -> MonolithCheckpointState:
    return get_monolith_checkpoint_state(home) or MonolithCheckpointState()


def _described(point: RestorePoint, exempt: set[str], newest: str | None) -> dict[str, object]:
    name = None if point.checkpoint is None else base_name(point.checkpoint)
    return {
        "checkpoint": name,
        "step": point.step,
        "sequence": point.sequence,
        "time": point.time,
        "newest": newest is not None and name == base_name(newest),
        "kept": name in exempt,
        "parts": point.parts,
    }


def _path(home: ModelDir, name: str) -> str:
    paths = [point.checkpoint for point in restore_points(home) if point.checkpoint is not None]
    for path in paths:
        if base_name(path) == base_name(name):
            return path
    known = ", ".join(map(base_name, paths)) or "none"
    raise InvalidArgumentError(f"{name}: {home.path} has no such checkpoint; it has {known}")
