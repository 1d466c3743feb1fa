"""`monolith launch`: start, supervise and stop all processes of a job."""

from __future__ import annotations

import json
import os
import queue
import secrets
import shlex
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monolith.cli.options import Json, size_in_bytes
from monolith.cluster.launch.local import LocalRoles, OnLine
from monolith.cluster.launch.ray import RayPlacement, RayRoles
from monolith.cluster.launch.roles import JobRoles, Role, RoleKind
from monolith.cluster.launch.supervisor import Event, EventKind, Outcome, RoleState, RoleStatus, Supervisor
from monolith.cluster.liveness import Liveness
from monolith.errors import ConfigError
from monolith.state.storage import is_remote
from monolith.transport.tokens import new_token, read_token

__all__ = ["JsonView", "LaunchView", "LinesView", "TableView", "event_text", "launch"]

_MANY_COLOURS = ("cyan", "green", "blue", "yellow", "bright_cyan", "bright_green", "bright_blue", "bright_yellow")
_COLOURS = {
    RoleKind.PS: ("magenta", "bright_magenta"),
    RoleKind.WORKER: _MANY_COLOURS,
    RoleKind.RANK: _MANY_COLOURS,
}
_STATE_COLOURS = {
    RoleState.RUNNING: "green",
    RoleState.ENDED: "dim",
    RoleState.FAILED: "bold red",
    RoleState.KILLED: "red",
}


class LaunchView(ABC):
    """Shows a job while it runs."""

    @abstractmethod
    def begin(self, job: JobRoles, logs: Path) -> None:
        """Called before the job starts."""

    @abstractmethod
    def event(self, event: Event) -> None:
        """Called for every event."""

    @abstractmethod
    def line(self, role: Role, text: str) -> None:
        """Called for every line that a role writes."""

    def over(self, outcome: Outcome) -> None:  # noqa: B027 - the exit code and the events report it
        """Called when the job has ended."""

    def refresh(self) -> None:  # noqa: B027 - most views show no time
        """Called at short intervals."""


class JsonView(LaunchView):
    """Events and lines for programs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, job: JobRoles, logs: Path) -> None:
        """Write the name and size of the job."""
        self._write(
            {"event": "launching", "uuid": job.uuid, **job.shape, "model_dir": job.model_dir, "log_dir": str(logs)}
        )

    def event(self, event: Event) -> None:
        """Write its known fields."""
        known = {
            name: value for name, value in vars(event).items() if value is not None and name not in ("kind", "role")
        }
        self._write({"event": event.kind.value, **_named(event.role), **known})

    def line(self, role: Role, text: str) -> None:
        """Write it as an event."""
        self._write({"event": "line", **_named(role), "text": text})

    def over(self, outcome: Outcome) -> None:
        """Write how it ended."""
        failed = None if outcome.failed is None else str(outcome.failed)
        self._write(
            {
                "event": "over",
                "ok": outcome.is_success,
                "failed": failed,
                "code": outcome.code,
                "stopped": outcome.stopped,
            }
        )

    def _write(self, fields: dict[str, object]) -> None:
        self._stream.write(json.dumps(fields) + "\n")
        self._stream.flush()


class LinesView(LaunchView):
    """Prints every line after the name of its role."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, job: JobRoles, logs: Path) -> None:
        """Print where the logs are."""
        shape = ", ".join(f"{count} {kind}" for kind, count in job.shape.items())
        self._print(None, f"{job.uuid}: {shape}, logs in {logs}", "dim")

    def event(self, event: Event) -> None:
        """Print it as a sentence."""
        self._print(event.role, event_text(event), "dim")

    def line(self, role: Role, text: str) -> None:
        """Print it."""
        self._print(role, text, "")

    def _print(self, role: Role | None, text: str, style: str) -> None:
        who = "launch" if role is None else str(role)
        prefix = (f"{who:>9} | ", "bold" if role is None else _colour(role))
        self._console.print(Text.assemble(prefix, (text, style)), soft_wrap=True)


class TableView(LinesView, AbstractContextManager["TableView"]):
    """Prints the same lines, with a live table of all roles below them."""

    def __init__(self, console: Console, statuses: Sequence[RoleStatus], clock: Callable[[], float]) -> None:
        super().__init__(console)
        self._statuses, self._clock = statuses, clock
        self._last: dict[Role, str] = {}
        self._live = Live(console=console, get_renderable=self.table, auto_refresh=False)

    def __enter__(self) -> TableView:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def line(self, role: Role, text: str) -> None:
        """Print it, and keep it for the table."""
        self._last[role] = text
        super().line(role, text)

    def refresh(self) -> None:
        """Draw the table again."""
        self._live.refresh()

    def table(self) -> Table:
        """Return the current state of all roles."""
        table = Table(expand=True)
        for name in ("role", "pid", "state", "uptime", "restarts"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("role", "state") else "right")
        table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
        for status in self._statuses:
            table.add_row(*self._cells(status))
        return table

    def _cells(self, status: RoleStatus) -> list[Text]:
        alive = status.is_alive and status.process is not None
        return [
            Text(str(status.role), style=_colour(status.role)),
            Text(str(status.process.pid or "") if alive and status.process is not None else ""),
            Text(status.state.value, style=_STATE_COLOURS.get(status.state, "yellow")),
            Text(_duration(self._clock() - status.since) if alive else ""),
            Text(str(status.restarts or "")),
            Text(self._last.get(status.role, ""), style="dim"),
        ]


def event_text(event: Event) -> str:
    """Describe an event in a sentence.

    Example:
        >>> event_text(Event(kind=EventKind.FAILED, role=Role(RoleKind.WORKER, 0), code=-9))
        'failed: signal 9'
    """
    how = "" if event.code is None else f"exit code {event.code}"
    if event.code is not None and event.code < 0:
        how = f"signal {-event.code}"
    how = event.reason or how
    match event.kind:
        case EventKind.STARTED:
            return "started" if event.pid is None else f"started, pid {event.pid}"
        case EventKind.RESTARTING:
            failed = "failed: " if event.code is not None else ""
            return f"{failed}{how}; restarting in {event.delay:.3g} seconds, for the {_nth(event.restarts)} time"
        case EventKind.RESTARTED:
            return f"was lost and has been restarted, for the {_nth(event.restarts)} time"
        case EventKind.ENDED:
            return "ended" if not event.code else f"ended: {how}"
        case EventKind.FAILED:
            left = "" if event.ranks_left is None else f"; the job goes on with {event.ranks_left} ranks"
            return f"failed: {how}{left}"
        case EventKind.KILLED:
            return "killed: it did not end in time"
        case EventKind.STOPPING:
            return f"stopping: {event.reason}"


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _colour(role: Role) -> str:
    colours = _COLOURS[role.kind]
    return colours[role.index % len(colours)]


def _named(role: Role | None) -> dict[str, object]:
    return {} if role is None else {"role": str(role), "server_type": role.kind.value, "index": role.index}


Lines = queue.SimpleQueue[tuple[Role, str]]

LIVENESS_VARIABLE = "MONOLITH_LIVENESS"
"""The variable with the time limits of a job."""

Restarts = Annotated[
    int | None,
    typer.Option(
        help="Restarts of each role within --restart-window, by default 0, with --ranks 3. One more failure ends the job.",
        min=0,
    ),
]
RestartWindow = Annotated[
    float | None, typer.Option(help="Seconds after which a restart no longer counts, by default 3600.", min=0)
]
RoleGrace = Annotated[
    float | None, typer.Option(help="Seconds between asking a role to end and killing it, by default 120.", min=0)
]
Limits = Annotated[
    str | None,
    typer.Option(
        help="Time limits as JSON, such as '{\"hang_secs\": 60}': fields of Liveness. By default $MONOLITH_LIVENESS."
    ),
]
AcceptLoss = Annotated[
    bool,
    typer.Option(help="Continue from the newest checkpoint when a server has lost data, instead of failing."),
]

RESTARTS_OF_RANKS = 3
"""Restarts of each rank, unless `--restarts` says otherwise."""
_INTERRUPTED = 130
_PAUSE_SECS = 0.1


def launch(
    target: Annotated[
        str,
        typer.Argument(
            help="What each worker or rank runs: a script, a YAML file for `monolith train`, or a module.",
            metavar="TARGET",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments. A leading -- is left out.", metavar="ARGUMENTS")
    ] = None,
    ps: Annotated[
        int | None, typer.Option("--ps", help="Parameter servers, by default 1, with --ranks none.", min=1)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers, by default 1. Worker 0 is the chief.", min=1)] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks of synchronous training, instead of workers. They hold the tables themselves. With --ps servers hold "
            "the tables, and the ranks exchange dense gradients.",
            min=1,
        ),
    ] = None,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            help="Continue with this many ranks if others fail for good, by default only with all of them.", min=1
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="TARGET is a module, as with python -m.")] = False,
    on: Annotated[str, typer.Option(help="local, ray (started here), or ray=ADDRESS of a cluster.")] = "local",
    model_dir: Annotated[
        str | None,
        typer.Option(help="Folder of the model and of the state of servers and ranks, which all processes can reach."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the logs of all roles, by default MODEL_DIR/logs or a new folder.")
    ] = None,
    restarts: Restarts = None,
    restart_window: RestartWindow = None,
    grace: RoleGrace = None,
    liveness: Limits = None,
    accept_loss: AcceptLoss = False,
    ps_args: Annotated[str, typer.Option(help="Further options of `monolith ps`, as one string.")] = "",
    ps_cpus: Annotated[float, typer.Option(help="With Ray: processors of a server.", min=0)] = 1,
    ps_memory: Annotated[str | None, typer.Option(help="With Ray: memory of a server, such as 8GiB.")] = None,
    worker_cpus: Annotated[float, typer.Option(help="With Ray: processors of a worker or rank.", min=0)] = 1,
    worker_gpus: Annotated[float, typer.Option(help="With Ray: GPUs of a worker or rank.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Start and supervise the processes of a job.

    A job has servers and workers, or the ranks of synchronous training. Servers are stopped when all workers have succeeded. A
    role that fails or hangs is restarted up to --restarts times, and the others continue with it. When a role fails for good, or
    on SIGINT and SIGTERM, the workers are stopped and then the servers. A second signal kills them at once. The exit code is 0 if
    every worker succeeded, 1 if a role failed, 130 if the job was interrupted.
    """
    where, _, address = on.partition("=")
    if where != "ray" and on != "local":
        raise ConfigError(f"--on: expected local, ray or ray=ADDRESS, got {on!r}")
    job = JobRoles(
        **_numbers(ps, workers, ranks, min_ranks),
        uuid=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        worker_args=tuple(_worker_args(target, arguments or [], module=module)),
        ps_args=_split(ps_args),
        token=_token(_split(ps_args)),
        # Absolute, because a role may have another working directory.
        model_dir=model_dir if model_dir is None or is_remote(model_dir) else str(Path(model_dir).resolve()),
        liveness=_liveness(
            liveness, ranks=ranks is not None, restarts=restarts, restart_window_secs=restart_window, grace_secs=grace
        ),
        accept_loss=accept_loss,
    )
    logs = _log_dir(log_dir, job.model_dir)
    placement = RayPlacement(
        ps_cpus=float(ps_cpus),
        ps_memory=None if ps_memory is None else size_in_bytes(ps_memory, "--ps-memory"),
        worker_cpus=float(worker_cpus),
        worker_gpus=float(worker_gpus),
    )
    lines: Lines = queue.SimpleQueue()
    with _roles(where, address, job, logs, placement, lambda role, line: lines.put((role, line))) as roles:
        events: list[Event] = []
        supervisor = Supervisor(
            job.roles,
            roles.start,
            job.liveness,
            min_ranks=job.min_ranks,
            clock=time.monotonic,
            report=events.append,
        )
        view, shown = _view(supervisor, as_json=as_json)
        # Ray prints messages about lost actors, and stdout is for our output alone.
        with shown, redirect_stdout(sys.stderr), _stopping_on_signals(supervisor.request_stop):
            view.begin(job, logs)
            outcome = _run(supervisor, view, events, lines)
    _say_how_it_ended(outcome, supervisor, logs)


def _roles(
    where: str, address: str, job: JobRoles, logs: Path, placement: RayPlacement, on_line: OnLine
) -> AbstractContextManager[LocalRoles | RayRoles]:
    if where == "ray":
        return RayRoles(job, logs, address=address or None, placement=placement, on_line=on_line)
    return LocalRoles(job, logs, on_line=on_line)


def _run(supervisor: Supervisor, view: LaunchView, events: list[Event], lines: Lines) -> Outcome:
    """Step until the job is over. No role is left running, whatever happens here."""
    try:
        over = False
        while not over:
            over = supervisor.step()
            # Lines first: the output of a role is shown before the event that it has ended.
            while not lines.empty():
                view.line(*lines.get())
            for event in events:
                view.event(event)
            events.clear()
            view.refresh()
            if not over:
                time.sleep(_PAUSE_SECS)
    finally:
        supervisor.kill_all()
    view.over(supervisor.outcome)
    return supervisor.outcome


def _view(supervisor: Supervisor, *, as_json: bool) -> tuple[LaunchView, AbstractContextManager[object]]:
    console = Console(file=sys.stdout, highlight=False)
    if as_json:
        return JsonView(sys.stdout), nullcontext()
    if console.is_terminal:
        table = TableView(console, supervisor.statuses, time.monotonic)
        return table, table
    return LinesView(console), nullcontext()


def _say_how_it_ended(outcome: Outcome, supervisor: Supervisor, logs: Path) -> None:
    if outcome.failed is not None:
        status = next(status for status in supervisor.statuses if status.role == outcome.failed)
        how = event_text(Event(kind=EventKind.FAILED, role=outcome.failed, code=outcome.code, reason=outcome.reason))
        lines = [] if status.process is None else status.process.last_lines
        end = "".join(f"    {line}\n" for line in lines)
        sys.stderr.write(f"error: {outcome.failed} {how}; the end of {logs / outcome.failed.file_name}.log:\n{end}")
        raise typer.Exit(1)
    if outcome.stopped is not None:
        raise typer.Exit(_INTERRUPTED)


@contextmanager
def _stopping_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        request_stop(f"received {signal.Signals(number).name}")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _worker_args(target: str, arguments: Sequence[str], *, module: bool) -> list[str]:
    if arguments[:1] == ["--"]:
        # Everything behind TARGET is its own, with or without the word that says so.
        arguments = arguments[1:]
    if module:
        return ["-m", target, *arguments]
    if not Path(target).is_file():
        raise ConfigError(f"TARGET: there is no file {target!r}; give --module for a module")
    if target.endswith((".yaml", ".yml")):
        return ["-m", "monolith.cli", "train", target, *arguments]
    return [target, *arguments]


def _numbers(ps: int | None, workers: int | None, ranks: int | None, min_ranks: int | None) -> dict[str, Any]:
    """Return the fields of `JobRoles` that say how many processes there are."""
    if ranks is None:
        if min_ranks is not None:
            raise ConfigError(f"--min-ranks: expected --ranks as well, got only --min-ranks {min_ranks}")
        return {"num_ps": ps or 1, "num_workers": workers or 1}
    if workers is not None:
        raise ConfigError(f"--workers: expected --workers or --ranks, got --workers {workers} and --ranks {ranks}")
    if min_ranks is not None and min_ranks > ranks:
        raise ConfigError(f"--min-ranks: expected at most --ranks {ranks}, got {min_ranks}")
    return {"num_ps": ps or 0, "num_ranks": ranks, "min_ranks": min_ranks}


def _liveness(text: str | None, *, ranks: bool, **flags: float | None) -> Liveness:
    """Return the limits of the option, or else of the environment, overridden by those with a flag of their own."""
    text = os.environ.get(LIVENESS_VARIABLE, "{}") if text is None else text
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f'--liveness: expected JSON such as {{"hang_secs": 60}}, got {text!r}')
    named = {name: value for name, value in flags.items() if value is not None}
    # All ranks stop when one is lost, so that no job of many would last without restarts.
    usual = {"restarts": RESTARTS_OF_RANKS} if ranks else {}
    return Liveness.from_json(json.dumps({**usual, **given, **named}))


def _split(ps_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(ps_args))
    except ValueError as error:
        raise ConfigError(f"--ps-args: expected options as a shell takes them, {error}; got {ps_args!r}") from None


def _token(ps_args: Sequence[str]) -> str:
    """Return the token of the job: the one that was given in the environment or to the servers, or a new one."""
    options = [option.partition("=") for option in ps_args]
    for place, (name, equals, value) in enumerate(options):
        if name == "--token-file" and (equals or place + 1 < len(ps_args)):
            return read_token(Path(value if equals else ps_args[place + 1])) or ""
    return read_token(None) or new_token()


def _log_dir(given: Path | None, model_dir: str | None) -> Path:
    if given is not None:
        return given
    if model_dir is None or is_remote(model_dir):
        return Path(tempfile.mkdtemp(prefix="monolith-launch-"))
    return Path(model_dir) / "logs"
