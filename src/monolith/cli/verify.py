"""`monolith verify`: check every file of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.state.inspect import verify

__all__ = ["verify_run"]


def verify_run(
    path: Annotated[
        str, typer.Argument(help="The model_dir of a run, a checkpoint, or the folder of a log.", metavar="RUN")
    ],
    as_json: Json = False,
) -> None:
    """Check a model_dir for damaged or missing files.

    Manifests, states, tables, snapshots and segments are checked against their checksums, the log must be complete, and the
    folders of parameter servers and ranks below ps/ are checked too. Nothing is changed. The exit code is 3 if there is a
    problem.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status("verifying ...") as status:
        found = verify(path, progress=lambda what: status.update(f"verifying {what}"))
    if as_json:
        show(asdict(found), as_json=True)
    else:
        _print(Console(highlight=False, soft_wrap=True), asdict(found))
    if found.problems:
        raise typer.Exit(3)


def _print(console: Console, found: dict[str, Any]) -> None:
    for problem in found["problems"]:
        console.print(f"problem: {problem['error']}", markup=False)
    for path in found["unfinished"]:
        console.print(f"unfinished and not needed: {path}", markup=False)
    named = ("checkpoints", "snapshots", "segments", *(name for name in ("servers", "ranks") if found[name]))
    counts = ", ".join(_counted(int(found[name]), name) for name in named)
    console.print(f"{counts}: {_counted(len(found['problems']), 'problems')}")


def _counted(number: int, names: str) -> str:
    return f"{number:,} {names.removesuffix('s') if number == 1 else names}"
