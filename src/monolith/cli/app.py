"""All verbs under one program, and what an error becomes outside of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from monolith.cli.checkpoint import checkpoint
from monolith.cli.data_worker import data_worker
from monolith.cli.dispatcher import dispatcher
from monolith.cli.env import env
from monolith.cli.evaluate import evaluate
from monolith.cli.export import export
from monolith.cli.export_table import export_table
from monolith.cli.import_table import import_table
from monolith.cli.inspect import inspect
from monolith.cli.launch import launch
from monolith.cli.log import log
from monolith.cli.predict import predict
from monolith.cli.probe import probe
from monolith.cli.ps import ps
from monolith.cli.rebalance import rebalance
from monolith.cli.signals import add_siguser1_handler
from monolith.cli.train import train
from monolith.errors import (
    CheckpointMismatchError,
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    LogGapError,
    MonolithError,
    StorageError,
)

__all__ = ["run"]

_EXIT_CODES: dict[type[MonolithError], int] = {
    CheckpointMismatchError: 2,
    ConfigError: 2,
    InvalidArgumentError: 2,
    LogGapError: 2,
    CorruptFileError: 3,
    StorageError: 4,
}
_EXIT_CODE_HELP = (
    "Exit codes: 0 done; 1 something broke; 2 wrong usage, configuration or data; 3 a damaged file; "
    "4 the operating system refused a file; 130 interrupted, and saved. "
    "SIGUSR1 prints the stacks of all threads to stderr."
)


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
    for verb in (
        train,
        evaluate,
        predict,
        export,
        inspect,
        import_table,
        export_table,
        ps,
        rebalance,
        probe,
        dispatcher,
        data_worker,
        env,
    ):
        app.command()(verb)
    # What follows the script belongs to the script.
    app.command(context_settings={"allow_interspersed_args": False})(launch)
    app.add_typer(checkpoint)
    app.add_typer(log)
    add_siguser1_handler()
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="monolith")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except MonolithError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command line speaks to a person
        return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)
    return 0
