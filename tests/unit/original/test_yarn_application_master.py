"""Danger: a job that is over is never ended, because Primus got a message it does not understand, or none.

The application master is a real gRPC server in this process, on a Unix socket and on TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monolith.original import create_primus_save_point, maybe_finish_application, maybe_kill_application
from monolith.original.yarn import PrimusScheduler
from monolith.proto import primus_am_service_pb2 as primus
from primus_master import Master, Status, serving


@pytest.fixture(params=["unix", "tcp"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Master, dict[str, str]]]:
    """A master, and the environment that says where it is."""
    with serving(tmp_path / "master" if request.param == "unix" else None) as found:
        yield found


def fail() -> None:
    raise RuntimeError("the master is confused")


def test_kill_names_the_reason_and_leaves_twenty_seconds(served: tuple[Master, dict[str, str]]) -> None:
    master, environ = served
    assert maybe_kill_application("out of luck", environ=environ) is True
    [(name, request)] = master.asked
    assert name == "kill"
    assert (request.exit_code, request.diagnose) == (1, "out of luck")
    assert request.graceful_shutdown_timeout_ms.value == 20_000


def test_finish_tells_of_success(served: tuple[Master, dict[str, str]]) -> None:
    master, environ = served
    assert maybe_finish_application(environ=environ) is True
    [(name, request)] = master.asked
    assert name == "succeed"
    assert (request.exit_code, request.graceful_shutdown_timeout_ms.value) == (0, 20_000)


def test_the_master_is_told_how_the_job_ended(served: tuple[Master, dict[str, str]]) -> None:
    master, environ = served
    PrimusScheduler(environ).job_ended(None)
    PrimusScheduler(environ).job_ended(ValueError("bad data"))
    (first, _), (second, request) = master.asked
    assert (first, second, request.diagnose) == ("succeed", "kill", "ValueError: bad data")


def test_a_savepoint_is_waited_for(served: tuple[Master, dict[str, str]]) -> None:
    master, environ = served
    states = iter([Status.PENDING, Status.RUNNING, Status.RUNNING, Status.SUCCEEDED])
    master.answers["createSavepointStatus"] = lambda: Status(create_savepoint_state=next(states))
    naps: list[float] = []
    assert create_primus_save_point("/points/7", environ=environ, sleep=naps.append) is True
    assert naps == [5.0] * 3
    assert master.asked[0][1].savepoint_dir == "/points/7"
    assert [request.savepoint_restore_id for _, request in master.asked[1:]] == ["sp-1"] * 4


def test_a_failed_savepoint_is_not_one(served: tuple[Master, dict[str, str]], caplog: pytest.LogCaptureFixture) -> None:
    master, environ = served
    master.answers["createSavepointStatus"] = lambda: Status(create_savepoint_state=Status.FAILED, message="disk full")
    assert create_primus_save_point("/points/7", environ=environ, sleep=pytest.fail) is False
    assert "disk full" in caplog.text


def test_a_refused_savepoint_is_not_asked_about(
    served: tuple[Master, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    master, environ = served
    master.answers["createSavepoint"] = lambda: primus.CreateSavepointResponse(code=3, message="busy")
    assert create_primus_save_point("/points/7", environ=environ, sleep=pytest.fail) is False
    assert [name for name, _ in master.asked] == ["createSavepoint"]
    assert "busy" in caplog.text


def test_every_call_has_a_deadline_of_ten_seconds(served: tuple[Master, dict[str, str]]) -> None:
    master, environ = served
    maybe_kill_application("", environ=environ)
    maybe_finish_application(environ=environ)
    create_primus_save_point("", environ=environ)
    assert len(master.deadlines) == 4
    assert all(0 < remaining < 11 for remaining in master.deadlines)


CALLS: dict[str, Callable[[dict[str, str]], bool]] = {
    "kill": lambda environ: maybe_kill_application("why", environ=environ),
    "succeed": lambda environ: maybe_finish_application(environ=environ),
    "createSavepoint": lambda environ: create_primus_save_point("/points", environ=environ),
    "createSavepointStatus": lambda environ: create_primus_save_point("/points", environ=environ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_the_master_is_false_and_in_the_log(
    served: tuple[Master, dict[str, str]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    master, environ = served
    master.answers[name] = fail
    assert CALLS[name](environ) is False
    assert "the master is confused" in caplog.text


@pytest.mark.parametrize("name", CALLS)
def test_a_master_that_is_not_there_is_false(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PRIMUS_AM_RPC_HOST": "unix", "PRIMUS_AM_RPC_PORT": str(tmp_path / "nobody")}
    assert CALLS[name](environ) is False
    assert "UNAVAILABLE" in caplog.text


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("environ", [{}, {"PRIMUS_AM_RPC_HOST": "h"}, {"PRIMUS_AM_RPC_PORT": "1"}])
def test_without_a_master_nothing_is_called(name: str, environ: dict[str, str]) -> None:
    assert CALLS[name](environ) is False


def test_the_wire_is_that_of_primus() -> None:
    """Numbers and names of Primus's own service; they may never change here."""
    request = primus.KillRequest(exit_code=1, diagnose="x")
    request.graceful_shutdown_timeout_ms.value = 20_000
    assert request.SerializeToString().hex() == "0801120178" + "1a0408a09c01"
    fields = {
        message.name: [(field.number, field.name) for field in message.fields]
        for message in primus.DESCRIPTOR.message_types_by_name.values()
    }
    ending = [(1, "exit_code"), (2, "diagnose"), (3, "graceful_shutdown_timeout_ms")]
    assert fields == {
        "SucceedRequest": ending,
        "SucceedResponse": [],
        "KillRequest": ending,
        "KillResponse": [],
        "CreateSavepointRequest": [(1, "savepoint_dir")],
        "CreateSavepointResponse": [(1, "code"), (2, "message"), (3, "savepoint_id")],
        "CreateSavepointStatusRequest": [(1, "savepoint_restore_id")],
        "CreateSavepointStatusResponse": [(1, "code"), (2, "message"), (3, "create_savepoint_state")],
    }
    assert dict(Status.CreateSavepointState.items()) == {"PENDING": 0, "RUNNING": 1, "SUCCEEDED": 2, "FAILED": 3}
