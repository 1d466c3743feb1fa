"""The command line `monolith`: its verbs, its exit codes, and SIGUSR1."""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from inspect import getdoc  # a verb has the name inspect
from typing import Annotated, TextIO

import typer

from monolith.console import log_to_stderr
from monolith.errors import MonolithError
from monolith.exit_codes import exit_code_of

__all__ = ["add_siguser1_handler", "main"]

_EXIT_CODE_HELP = (
    "Exit codes: 0 success, 1 failure, 2 wrong usage, configuration or data, 3 damaged file, "
    "4 file refused by the operating system, 130 interrupted after saving. "
    "SIGUSR1 prints the stacks of all threads to stderr."
)


_VERBS = {
    "train": ("train", "Train a model, continuing from its model_dir."),
    "evaluate": ("trained_model", "Print the metrics of every head of a trained model."),
    "predict": ("trained_model", "Write the predictions of a trained model as JSON lines."),
    "export": ("trained_model", "Write a trained model as a folder that serves predictions."),
    "serve": ("serve:serve_models", "Answer requests with exported models."),
    "inspect": ("inspect", "Print the contents of a table, export, checkpoint or run."),
    "import-table": ("exchange", "Import tables from Parquet, PyTorch, TFRA or the original."),
    "export-table": ("exchange", "Export a table as Parquet, safetensors or a dump."),
    "launch": ("launch", "Start and supervise the processes of a job."),
    "ps": ("ps", "Run a parameter server."),
    "rebalance": ("ps", "Move buckets between running parameter servers."),
    "probe": ("ps", "Check the health of a parameter server."),
    "serve-shard": ("serve_shard", "Run an embedding shard of an export."),
    "dispatcher": ("data_service", "Run the dispatcher of a data service."),
    "data-worker": ("data_service", "Run a data worker of a data service."),
    "join": ("join", "Join impressions and actions from streams into examples."),
    "stream": ("stream", "Make, look into, read and write streams of records."),
    "control": ("control", "Stop, resume, save, end or look into a run that is going on."),
    "forget": ("forget", "Remove the rows of ids from a run, and print a receipt."),
    "checkpoint": ("checkpoint", "List, keep or remove the checkpoints of a run."),
    "log": ("log", "Read the change log of a run."),
    "page": ("page", "Serve one page for several replicas and runs."),
    "rollout": ("rollout", "Split the traffic of a server between versions."),
    "verify": ("verify:verify_run", "Check a model_dir for damaged or missing files."),
    "env": ("env", "Print what a bug report should contain."),
}
"""Of each verb: its module, with its function if that has another name, and the first sentence of its help. In the order of the
help.

Only the module of the verb in use is imported, and none for the list of verbs, to start quickly."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. The script `monolith` calls it.

    0 is success, 1 a failure such as a diverged training, 2 wrong usage, configuration or data, 3 a damaged file, 4 a file that
    the operating system refused, and 130 an interrupt.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    app = typer.Typer(
        name="monolith",
        help="Train, serve and inspect recommendation models with collisionless embedding tables.",
        epilog=_EXIT_CODE_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Plain text: rich would cut long option names at 80 columns.
        rich_markup_mode=None,
    )
    # With a callback it stays a program of verbs, even if only one is added.
    app.callback()(_options)
    if arguments and arguments[0] in _VERBS:
        _add(app, arguments[0])
    else:
        for name, (_, summary) in _VERBS.items():
            app.command(name, help=summary)(lambda: None)
    add_siguser1_handler()
    log_to_stderr()
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="monolith")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except MonolithError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command line speaks to a person
        return exit_code_of(error)
    return 0


def add_siguser1_handler(file: TextIO | None = None) -> None:
    """Print the stacks of all threads to `file`, by default stderr, on SIGUSR1, then call the handler that was set before.

    It works even while all threads run compiled code. Calling it again is harmless.
    """
    stream = file or sys.__stderr__
    if stream is None:  # a process without a terminal or log has nowhere to print to
        return
    previous = signal.getsignal(signal.SIGUSR1)
    # A handler set after an earlier call has replaced ours without faulthandler noticing, so register again.
    faulthandler.unregister(signal.SIGUSR1)
    if previous is not None:
        signal.signal(signal.SIGUSR1, previous)
    # Chaining to the default action would end the process.
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=callable(previous))


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
    module, _, function = _VERBS[name][0].partition(":")
    verb = getattr(importlib.import_module(f"monolith.cli.{module}"), function or name.replace("-", "_"))
    if isinstance(verb, typer.Typer):
        app.add_typer(verb)
    else:
        # What follows the script of a launch belongs to the script.
        app.command(name, help=_paragraphs(verb), context_settings={"allow_interspersed_args": name != "launch"})(verb)


def _paragraphs(verb: object) -> str:
    """Return the docstring of a verb with one line for each paragraph, for the help to wrap."""
    return "\n\n".join(" ".join(part.split()) for part in (getdoc(verb) or "").split("\n\n"))
