"""What `monolith launch` shows: a table of roles on a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monolith.cluster.launch.roles import Job, Role, RoleKind
from monolith.cluster.launch.supervisor import Event, EventKind, Outcome, RoleState, RoleStatus

__all__ = ["JsonView", "LaunchView", "LinesView", "TableView", "event_text"]

_MANY_COLOURS = ("cyan", "green", "blue", "yellow", "bright_cyan", "bright_green", "bright_blue", "bright_yellow")
_COLOURS = {
    RoleKind.PS: ("magenta", "bright_magenta"),
    RoleKind.WORKER: _MANY_COLOURS,
    RoleKind.RANK: _MANY_COLOURS,
    RoleKind.SHARD: ("magenta", "bright_magenta"),
    RoleKind.FRONT_END: _MANY_COLOURS,
    RoleKind.PART: _MANY_COLOURS,
    RoleKind.DRIVER: ("magenta", "bright_magenta"),
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
    def begin(self, job: Job, logs: Path) -> None:
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

    def begin(self, job: Job, logs: Path) -> None:
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

    def begin(self, job: Job, logs: Path) -> None:
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

    def event(self, event: Event) -> None:
        """Print it. The last line of a process is not that of the next one."""
        if event.role is not None and event.kind in (EventKind.STARTED, EventKind.RESTARTED):
            self._last.pop(event.role, None)
        super().event(event)

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
    return colours[(role.index + sum(role.name.encode())) % len(colours)]


def _named(role: Role | None) -> dict[str, object]:
    return {} if role is None else {"role": str(role), "server_type": role.kind.value, "index": role.index}
