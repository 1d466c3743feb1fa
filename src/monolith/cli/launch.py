"""`monolith launch`: start, supervise and stop all processes of a job."""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from monolith.cli.launch_view import JsonView, LaunchView, LinesView, TableView, event_text
from monolith.cli.options import Json, read_yaml, size_in_bytes
from monolith.cluster.launch.local import ChildProcess, LocalRoles, OnLine
from monolith.cluster.launch.parts import PartsJob
from monolith.cluster.launch.ray import RayPlacement, RayRoles
from monolith.cluster.launch.roles import Job, JobRoles, Role, RoleKind, ServeRoles
from monolith.cluster.launch.supervisor import Event, EventKind, Outcome, Supervisor
from monolith.cluster.liveness import Liveness
from monolith.errors import ConfigError
from monolith.exit_codes import WRONG_USAGE
from monolith.transport.tokens import new_token, read_token
from monolith.urls import is_remote

__all__ = ["launch"]

Lines = queue.SimpleQueue[tuple[Role, str]]

LIVENESS_VARIABLE = "MONOLITH_LIVENESS"
"""The variable with the time limits of a job."""

Restarts = Annotated[
    int | None,
    typer.Option(
        help="Restarts of each role within --restart-window, by default 0, with --ranks or --serve 3. Another failure ends it.",
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
"""Restarts of each rank, shard and front end, unless `--restarts` says otherwise."""
_INTERRUPTED = 130
_PAUSE_SECS = 0.1


def launch(
    target: Annotated[
        str | None,
        typer.Argument(
            help="What each worker or rank runs: a script, a YAML file for `monolith train`, or a module. Or a YAML file with "
            "the parts of an online loop.",
            metavar="TARGET",
        ),
    ] = None,
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
    serve: Annotated[
        Path | None,
        typer.Option(
            help="Serve this export instead of training: embedding shards that hold the rows, and front ends that answer."
        ),
    ] = None,
    shards: Annotated[int, typer.Option(help="With --serve: shards that hold the rows together.", min=1)] = 1,
    replicas: Annotated[int, typer.Option(help="With --serve: processes for each shard.", min=1)] = 1,
    front_ends: Annotated[int, typer.Option(help="With --serve: processes that answer requests.", min=0)] = 1,
    http_port: Annotated[
        int,
        typer.Option(help="With --serve: HTTP port of the first front end. 0: free ones.", min=0, max=65535),
    ] = 8000,
    grpc_port: Annotated[
        int,
        typer.Option(help="With --serve: gRPC port of the first front end. 0: free ones.", min=0, max=65535),
    ] = 9000,
    shard_args: Annotated[
        str, typer.Option(help="With --serve: further options of `monolith serve-shard`, as one string.")
    ] = "",
    serve_args: Annotated[
        str, typer.Option(help="With --serve: further options of `monolith serve`, as one string.")
    ] = "",
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

    With --serve there is no TARGET. The shards and front ends of an export run until SIGINT or SIGTERM. Front ends end first.

    A YAML file with `parts` is an online loop: its commands, such as a joiner, a trainer and a replica, run together until SIGINT
    or SIGTERM, or until a part that `ends` has succeeded.
    """
    where, _, address = on.partition("=")
    if where != "ray" and on != "local":
        raise ConfigError(f"--on: expected local, ray or ray=ADDRESS, got {on!r}")
    uuid = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    parts = _parts_in(target)
    limits = _liveness(
        liveness,
        ranks=ranks is not None or serve is not None or parts is not None,
        restarts=restarts,
        restart_window_secs=restart_window,
        grace_secs=grace,
    )
    job: JobRoles | ServeRoles | PartsJob
    if parts is not None:
        if arguments or serve is not None or any(given is not None for given in (ps, workers, ranks, model_dir)):
            raise ConfigError(
                f"{target}: has the parts of an online loop; expected no arguments and no --ps, --workers, --ranks, --model-dir "
                "or --serve: the file says what runs"
            )
        job = PartsJob.from_tree(parts, uuid=uuid, liveness=limits)
    elif serve is not None:
        if target is not None or any(given is not None for given in (ps, workers, ranks)):
            raise ConfigError(
                "--serve: expected no TARGET and no --ps, --workers or --ranks; a launch trains or serves"
            )
        job = ServeRoles(
            export=str(serve.resolve()),
            shards=shards,
            replicas=replicas,
            front_ends=front_ends,
            http_port=http_port,
            grpc_port=grpc_port,
            uuid=uuid,
            shard_args=_split(shard_args, "--shard-args"),
            serve_args=_split(serve_args, "--serve-args"),
            token=_token(_split(shard_args, "--shard-args")),
            liveness=limits,
        )
    else:
        job = JobRoles(
            **_numbers(ps, workers, ranks, min_ranks),
            uuid=uuid,
            worker_args=tuple(_worker_args(target, arguments or [], module=module)),
            ps_args=_split(ps_args, "--ps-args"),
            token=_token(_split(ps_args, "--ps-args")),
            # Absolute, because a role may have another working directory.
            model_dir=model_dir if model_dir is None or is_remote(model_dir) else str(Path(model_dir).resolve()),
            liveness=limits,
            accept_loss=accept_loss,
        )
    logs = _log_dir(log_dir, None if serve is not None else job.model_dir)
    is_due = job.is_due if isinstance(job, PartsJob) else _always
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
            min_ranks=job.min_ranks if isinstance(job, JobRoles) else None,
            clock=time.monotonic,
            is_due=is_due,
            report=events.append,
        )
        view, shown = _view(supervisor, as_json=as_json)
        # Ray prints messages about lost actors, and stdout is for our output alone.
        with shown, redirect_stdout(sys.stderr), _stopping_on_signals(supervisor.request_stop):
            view.begin(job, logs)
            if isinstance(job, PartsJob):
                _prepare(job, logs, view, supervisor)
            outcome = _run(supervisor, view, events, lines)
    _say_how_it_ended(outcome, supervisor, logs)


def _roles(
    where: str, address: str, job: Job, logs: Path, placement: RayPlacement, on_line: OnLine
) -> AbstractContextManager[LocalRoles | RayRoles]:
    if where == "ray":
        return RayRoles(job, logs, address=address or None, placement=placement, on_line=on_line)
    return LocalRoles(job, logs, on_line=on_line)


def _always(role: Role) -> bool:
    return True


def _parts_in(target: str | None) -> dict[str, Any] | None:
    """Return the fields of a YAML file that has the parts of an online loop. None for any other target."""
    if target is None or not target.endswith((".yaml", ".yml")) or not Path(target).is_file():
        return None
    has_parts = re.search(rb"^parts\s*:", Path(target).read_bytes(), re.MULTILINE)
    return read_yaml(target) if has_parts else None


def _prepare(job: PartsJob, logs: Path, view: LaunchView, supervisor: Supervisor) -> None:
    """Run the steps that prepare an online loop on this machine. A stop that is requested meanwhile ends them."""

    def stopped() -> bool:
        return supervisor.outcome.stopped is not None

    for number, step in enumerate(job.prepare):
        arguments = job.prepare_args(step)
        if arguments is None or stopped():
            continue
        role, lines = Role(RoleKind.PART, number, name="prepare"), queue.SimpleQueue[str]()
        log = logs / f"{role.file_name}.log"
        child = ChildProcess([sys.executable, *arguments], log=log, environment=job.variables, on_line=lines.put)
        view.event(Event(kind=EventKind.STARTED, role=role, pid=child.pid))
        asked = False
        while child.wait(_PAUSE_SECS) is None:
            if stopped() and not asked:
                asked = True
                child.ask_to_end()
            _show(view, role, lines)
        _show(view, role, lines)
        code = child.poll()
        if code and not asked:
            end = "".join(f"    {line}\n" for line in child.last_lines)
            sys.stderr.write(f"error: {step.run}: exit code {code}; the end of {log}:\n{end}")
            raise typer.Exit(1)


def _show(view: LaunchView, role: Role, lines: queue.SimpleQueue[str]) -> None:
    while not lines.empty():
        view.line(role, lines.get())
    view.refresh()


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
        log = logs / f"{outcome.failed.file_name}.log"
        lines = [] if status.process is None else status.process.last_lines
        if outcome.code == WRONG_USAGE:
            lines = lines[-1:]  # which is the message
        end = "".join(f"    {line}\n" for line in lines)
        sys.stderr.write(f"error: {outcome.failed} {how}; the end of {log}:\n{end}")
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


def _worker_args(target: str | None, arguments: Sequence[str], *, module: bool) -> list[str]:
    if target is None:
        raise ConfigError("TARGET: expected a script, a YAML file or a module to train, or --serve EXPORT")
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


def _split(text: str, option: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option}: expected options as a shell takes them, {error}; got {text!r}") from None


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
