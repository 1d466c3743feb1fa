"""Danger: one dead replica hides the others, the token goes where it should not, or another site reads the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from monolith import EmbeddingTable
from monolith.errors import ConfigError
from monolith.log import ChangeLog
from monolith.serve.metrics import ServingMetrics
from monolith.serve.page import Overview, Page, PageServer
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from monolith.testing import sgd_table_config
from page_replicas import Clock, SetLag, answer, change, replica, repository


def fetched(url: str, host: str | None = None) -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(Request(url, headers={} if host is None else {"Host": host}), timeout=30) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_replicas_are_shown_together_and_a_dead_one_apart() -> None:
    clock = Clock(1000.0)
    metrics = ServingMetrics(repository(replica(follower=SetLag())), clock=clock, now=clock)
    metrics.answered(answer())
    clock.now += 1
    metrics.tick()
    page = Page(metrics, rollback=lambda model: (True, ""), history=lambda table, id_: [change(3)])
    with PageServer(page.routes()) as one:
        with PageServer(page.routes()) as dying:
            dead = dying.address
        overview = Overview([f"{one.address}/", dead], timeout=30)
        with PageServer(overview.routes()) as server:
            _, told = fetched(f"{server.address}/status.json?since=0")
            alive, gone = told["replicas"]
            assert alive["address"] == one.address
            assert alive["requests"]["total"] == 1
            assert alive["series"]["time"] == [1001.0]
            assert alive["models"][0]["rollback"]["possible"] is False, "a page without a token changes nothing"
            assert (gone["address"], gone["reachable"]) == (dead, False)
            assert "refused" in gone["error"]
            assert fetched(f"{server.address}/status.json?since=1001")[1]["replicas"][0]["series"]["time"] == []
            query = f"?replica={one.address}&model=clicks&version=3"
            status, row = fetched(f"{server.address}/ids/user/7{query}")
            assert (status, row["norm"], len(row["changes"])) == (200, 5.0, 1)
            assert fetched(f"{server.address}/ids/user/7{query}&text=1")[1]["text"] == "7"
            assert fetched(f"{server.address}/ids/user/{'9' * 5000}{query}")[0] == 400
            assert fetched(f"{server.address}/ids/user/7?replica={dead}")[0] == 502
            assert fetched(f"{server.address}/ids/user/7?replica=http://127.0.0.1:1/x")[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"replicas": 7}',
        b'{"replicas": []}',
        b'{"replicas": [7]}',
        b'{"replicas": [{}]}',
        b'{"replicas": [{"models": 7}]}',
    ],
)
def test_an_answer_that_is_no_replica_is_a_dead_replica(body: bytes) -> None:
    async def odd(request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=body)

    with PageServer([HttpRoute(method="GET", path="/status.json", handler=odd)]) as server:
        (told,) = Overview([server.address], timeout=30).status()["replicas"]  # type: ignore[misc]
        assert told["reachable"] is False


def recording(seen: list[str], answer_: Callable[[], HttpResponse]) -> HttpRoute:
    async def record(request: HttpRequest) -> HttpResponse:
        seen.append(request.headers.get("authorization", ""))
        return answer_()

    return HttpRoute(method="GET", path="/status.json", handler=record)


def test_the_token_is_sent_and_follows_no_redirect() -> None:
    seen: list[str] = []
    elsewhere: list[str] = []
    with PageServer([recording(elsewhere, HttpResponse)]) as thief:
        moved = HttpResponse(status=302, headers={"Location": f"{thief.address}/status.json"}, body=b"{}")
        with PageServer([recording(seen, lambda: moved)]) as server:
            (told,) = Overview([server.address], token="s" * 20, timeout=30).status()["replicas"]  # type: ignore[misc]
    assert told["error"] == "ValueError: HTTP 302: "
    assert seen == [f"Bearer {'s' * 20}"]
    assert elsewhere == []


def test_the_token_is_not_sent_unencrypted_to_another_machine() -> None:
    with pytest.raises(ConfigError, match="unencrypted"):
        Overview(["http://192.0.2.1:8000"], token="s" * 20)
    Overview(["https://192.0.2.1:8000"], token="s" * 20)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "http://", "ftp://host/"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a URL such as http://127\.0\.0\.1:8000"):
        Overview([url])


def test_a_site_whose_name_points_here_reads_nothing() -> None:
    with PageServer(Overview([]).routes()) as server:
        assert fetched(f"{server.address}/status.json")[0] == 200
        assert fetched(f"{server.address}/status.json", host="localhost:80")[0] == 200
        assert fetched(f"{server.address}/status.json", host="evil.example")[0] == 403


def test_it_listens_on_this_machine_only() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        PageServer([], host="0.0.0.0")


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with PageServer([]) as server, pytest.raises(ConfigError, match="cannot listen on"):
        PageServer([], port=int(server.address.rpartition(":")[2]))


def test_a_run_tells_its_step_and_the_size_of_its_log(tmp_path: Path) -> None:
    user = EmbeddingTable(sgd_table_config(1, name="user"))
    with ChangeLog(tmp_path / "run" / "log", [user]) as log:
        for step in (5, 9):
            user.assign([7], np.full((1, 1), float(step), np.float32))
            log.commit(step=step)
    (tmp_path / "empty").mkdir()
    runs = [tmp_path / name for name in ("run", "empty", "nothing")]
    run, empty, nothing = Overview([], runs).status()["runs"]  # type: ignore[misc]
    assert (run["step"], run["checkpoint"], run["log"]["segments"], run["log"]["sequence"]) == (9, None, 2, 2)
    assert run["log"]["bytes"] == sum(file.stat().st_size for file in (tmp_path / "run" / "log").iterdir())
    assert empty["log"]["segments"] == 0
    assert "error" not in empty
    assert nothing["error"] == "there is no such folder"


def test_a_run_on_a_stream_says_how_far_it_is_behind(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lag = {"state": "training", "lag_records": 120, "lag_seconds": 0.3, "bad_records": 2}
    (run,) = Overview([], [tmp_path / "run"], live=lambda path: lag if path.name == "run" else None).status()["runs"]  # type: ignore[misc]
    assert run["live"] == lag
