"""All verbs under one program, and what an error becomes outside of it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from monolith.cli.signals import add_siguser1_handler
from monolith.console import log_to_stderr
from monolith.errors import (
    CheckpointMismatchError,
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    LogGapError,
    MonolithError,
    SchemaError,
    StorageError,
)

__all__ = ["run"]

_EXIT_CODES: dict[type[MonolithError], int] = {
    CheckpointMismatchError: 2,
    ConfigError: 2,
    InvalidArgumentError: 2,
    LogGapError: 2,
    SchemaError: 2,
    CorruptFileError: 3,
    StorageError: 4,
}
_EXIT_CODE_HELP = (
    "Exit codes: 0 done; 1 something broke; 2 wrong usage, configuration or data; 3 a damaged file; "
    "4 the operating system refused a file; 130 interrupted, and saved. "
    "SIGUSR1 prints the stacks of all threads to stderr."
)


_VERBS = (
    "train",
    "evaluate",
    "predict",
    "export",
    "inspect",
    "import-table",
    "export-table",
    "launch",
    "ps",
    "rebalance",
    "probe",
    "dispatcher",
    "data-worker",
    "checkpoint",
    "log",
    "verify",
    "env",
)
"""In the order of the help. Only the one that is asked for is imported: what others need takes longer than many a verb."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    app = typer.Typer(
        name="monolith",
        help="Recommendation models on ids that never collide.",
        epilog=_EXIT_CODE_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # With a callback it stays a program of verbs, however many are added.
    app.callback()(_options)
    for name in arguments[:1] if arguments and arguments[0] in _VERBS else _VERBS:
        _add(app, name)
    add_siguser1_handler()
    log_to_stderr()
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="monolith")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except MonolithError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command line speaks to a person
        return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)
    return 0


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"monolith {version('monolith-torch')}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


def _add(app: typer.Typer, name: str) -> None:
    attribute = name.replace("-", "_")
    verb = getattr(importlib.import_module(f"monolith.cli.{attribute}"), attribute)
    if isinstance(verb, typer.Typer):
        app.add_typer(verb)
    else:
        # What follows the script of a launch belongs to the script.
        app.command(help=_paragraphs(verb), context_settings={"allow_interspersed_args": name != "launch"})(verb)


def _paragraphs(verb: object) -> str:
    """The docstring of a verb with one line per paragraph: rich wraps them, and would keep our line breaks too."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(verb) or "").split("\n\n"))
