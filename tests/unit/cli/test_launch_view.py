"""Danger: a role that seems to run and does not, or a program that cannot read what a person can."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from monolith.cli.launch_view import JsonView, LinesView, TableView, event_text
from monolith.cluster.launch import Event, EventKind, JobRoles, Outcome, Role, RoleKind, RoleState, RoleStatus
from monolith.testing.roles import ScriptedProcess

PS0, WORKER1, RANK1 = Role(RoleKind.PS, 0), Role(RoleKind.WORKER, 1), Role(RoleKind.RANK, 1)


def test_programs_get_one_object_a_line() -> None:
    stream = io.StringIO()
    view = JsonView(stream)
    view.begin(JobRoles(num_ps=2, num_workers=3, uuid="job-1", worker_args=("train.py",)), Path("logs"))
    view.event(Event(kind=EventKind.STARTED, role=PS0, pid=7))
    view.line(WORKER1, 'he said "x"')
    view.event(Event(kind=EventKind.STOPPING, reason="worker 1 failed"))
    view.over(Outcome(failed=WORKER1, code=3))
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"event": "launching", "uuid": "job-1", "ps": 2, "workers": 3, "model_dir": None, "log_dir": "logs"},
        {"event": "started", "role": "ps 0", "server_type": "ps", "index": 0, "pid": 7, "restarts": 0},
        {"event": "line", "role": "worker 1", "server_type": "worker", "index": 1, "text": 'he said "x"'},
        {"event": "stopping", "restarts": 0, "reason": "worker 1 failed"},
        {"event": "over", "ok": False, "failed": "worker 1", "code": 3, "stopped": None},
    ]


@pytest.mark.parametrize(("servers", "shape"), [(0, {"ranks": 2}), (1, {"ps": 1, "ranks": 2})])
def test_ranks_are_counted_as_such(servers: int, shape: dict[str, int]) -> None:
    job = JobRoles(num_ps=servers, num_ranks=2, uuid="job-1", worker_args=("train.py",))
    stream = io.StringIO()
    JsonView(stream).begin(job, Path("logs"))
    event = {"event": "launching", "uuid": "job-1", **shape, "model_dir": None, "log_dir": "logs"}
    assert json.loads(stream.getvalue()) == event
    lines = io.StringIO()
    LinesView(Console(file=lines, highlight=False)).begin(job, Path("logs"))
    assert lines.getvalue().endswith(f"job-1: {'1 ps, ' if servers else ''}2 ranks, logs in logs\n")


def test_without_a_terminal_lines_have_the_name_of_their_role_and_nothing_else() -> None:
    stream = io.StringIO()
    view = LinesView(Console(file=stream, highlight=False, width=40))
    view.line(WORKER1, "[bold]loss[/bold] " + "x" * 60)
    assert stream.getvalue() == f" worker 1 | [bold]loss[/bold] {'x' * 60}\n"


def test_the_table_is_of_this_moment() -> None:
    statuses = (
        RoleStatus(PS0, state=RoleState.RUNNING, process=ScriptedProcess(pid=4242), since=100.0),
        RoleStatus(WORKER1, state=RoleState.FAILED, process=ScriptedProcess(pid=4343), since=0.0, restarts=2),
    )
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=False)
    view = TableView(console, statuses, clock=lambda: 100.0 + 3725)
    view.line(WORKER1, "no more memory")
    console.print(view.table())
    server, worker = (line.split("│") for line in stream.getvalue().splitlines() if line.startswith("│"))
    assert [cell.strip() for cell in server[1:-1]] == ["ps 0", "4242", "running", "1:02:05", "", ""]
    assert [cell.strip() for cell in worker[1:-1]] == ["worker 1", "", "failed", "", "2", "no more memory"]


@pytest.mark.parametrize("kind", [EventKind.STARTED, EventKind.RESTARTED])
def test_a_new_process_does_not_show_the_last_line_of_the_one_before(kind: EventKind) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    view = TableView(console, [RoleStatus(PS0)], clock=lambda: 0.0)
    view.line(PS0, "listening on 127.0.0.1:7100")
    view.event(Event(kind=EventKind.RESTARTING, role=PS0, code=-9, restarts=1, delay=1.0))
    assert "listening" in last_line(view), "the dead process may have said why"
    view.event(Event(kind=kind, role=PS0, pid=8, restarts=1))
    assert last_line(view) == ""


def last_line(view: TableView) -> str:
    return str(next(iter(view.table().columns[-1].cells)))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event(kind=EventKind.STARTED, role=PS0, pid=7), "started, pid 7"),
        (
            Event(kind=EventKind.FAILED, role=RANK1, code=-9, ranks_left=3),
            "failed: signal 9; the job goes on with 3 ranks",
        ),
        (
            Event(kind=EventKind.RESTARTING, role=RANK1, restarts=1, delay=1.0, reason="rank 0 cannot end without it"),
            "rank 0 cannot end without it; restarting in 1 seconds, for the first time",
        ),
        (
            Event(kind=EventKind.RESTARTING, role=PS0, code=-9, restarts=2, delay=2.0),
            "failed: signal 9; restarting in 2 seconds, for the second time",
        ),
        (
            Event(kind=EventKind.RESTARTED, role=PS0, restarts=5),
            "was lost and has been restarted, for the 5th time",
        ),
        (Event(kind=EventKind.ENDED, role=PS0, code=0), "ended"),
        (Event(kind=EventKind.ENDED, role=PS0, code=130), "ended: exit code 130"),
        (Event(kind=EventKind.FAILED, role=PS0, code=3), "failed: exit code 3"),
        (Event(kind=EventKind.FAILED, role=PS0, code=0, reason="it hung"), "failed: it hung"),
        (Event(kind=EventKind.KILLED, role=PS0), "killed: it did not end in time"),
        (Event(kind=EventKind.STOPPING, reason="received SIGINT"), "stopping: received SIGINT"),
    ],
)
def test_events_in_words(event: Event, text: str) -> None:
    assert event_text(event) == text
