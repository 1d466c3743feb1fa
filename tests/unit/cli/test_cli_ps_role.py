"""Danger: a server of a job cannot be found or saves nothing, or takes an index that is not its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from monolith.cli import main
from monolith.cluster import HostServiceDiscovery
from monolith.ps import ParameterServer
from monolith.table import get_num_threads, set_num_threads

Serve = Callable[..., tuple[ParameterServer, dict[int, str]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Runs `monolith ps` up to where it would wait; gives the server, and who is announced at that moment."""

    def serve(*arguments: str, **variables: str) -> tuple[ParameterServer, dict[int, str]]:
        found: list[tuple[ParameterServer, dict[int, str]]] = []

        def stop_here(server: ParameterServer, *, announced: Any = None, **options: object) -> NoReturn:  # noqa: ANN401
            if announced is not None:
                announced.__enter__()
            found.append((server, HostServiceDiscovery(tmp_path / "discovery").query("ps")))
            if announced is not None:
                announced.__exit__(None, None, None)
            server.close()
            raise SystemExit(0)

        monkeypatch.setattr("monolith.cli.ps.serve_until_asked", stop_here)
        for name, value in variables.items():
            monkeypatch.setenv(f"MONOLITH_{name}", value)
        assert main(["ps", *arguments]) == 0
        return found[0]

    return serve


def job(tmp_path: Path, server_type: str) -> dict[str, str]:
    return {
        "SERVER_TYPE": server_type,
        "INDEX": "1",
        "NUM_PS": "2",
        "NUM_WORKERS": "2",
        "MODEL_DIR": str(tmp_path / "model"),
        "DISCOVERY_FOLDER": str(tmp_path / "discovery"),
    }


def test_by_itself_it_is_nobodys_and_keeps_nothing(serve: Serve) -> None:
    server, announced = serve("--max-streams", "3")
    assert announced == {}
    assert (server.config.folder, server.config.host, server.config.max_streams) == (None, "127.0.0.1", 3)


def test_the_threads_of_a_request_can_be_limited(serve: Serve) -> None:
    before = get_num_threads()
    try:
        serve("--threads", "7")
        assert get_num_threads() == 7
    finally:
        set_num_threads(before)
    assert main(["ps", "--threads", "0"]) == 2


def test_in_a_job_the_others_find_it_for_as_long_as_it_serves_and_it_has_a_folder(serve: Serve, tmp_path: Path) -> None:
    server, announced = serve(**job(tmp_path, "ps"))
    assert announced == {1: server.address}
    assert server.config.folder == tmp_path / "model" / "ps" / "1"
    assert HostServiceDiscovery(tmp_path / "discovery").query("ps") == {}


def test_one_that_a_worker_starts_for_itself_takes_no_place_in_the_job(serve: Serve, tmp_path: Path) -> None:
    server, announced = serve(**job(tmp_path, "worker"))
    assert announced == {}
    assert server.config.folder is None


def test_flags_win_over_the_run_and_the_run_over_defaults(serve: Serve, tmp_path: Path) -> None:
    variables = {**job(tmp_path, "ps"), "SERVER": '{"max_streams": 7, "max_message_bytes": 8192}'}
    server, _ = serve("--max-streams", "9", "--folder", str(tmp_path / "other"), **variables)
    assert (server.config.max_streams, server.config.max_message_bytes) == (9, 8192)
    assert server.config.folder == tmp_path / "other"


@pytest.mark.parametrize(
    ("options", "secs"), [((), 0.0), (("--log-flush-secs", "1.5"), 1.5), (("--log-flush-secs", "off"), None)]
)
def test_its_log_is_on_unless_told_otherwise(
    serve: Serve, tmp_path: Path, options: tuple[str, ...], secs: float | None
) -> None:
    server, _ = serve("--folder", str(tmp_path / "kept"), *options)
    assert server.config.log_flush_secs == secs


@pytest.mark.parametrize(
    ("text", "said"), [("soon", "--log-flush-secs: expected seconds or 'off', got 'soon'"), ("-1", "log_flush_secs")]
)
def test_a_wrong_interval_of_the_log_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--log-flush-secs", text]) == 2
    assert said in capsys.readouterr().err
