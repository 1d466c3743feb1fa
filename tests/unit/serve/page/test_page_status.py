"""Danger: an operator decides by a page whose numbers are not those of the server, or that breaks on a number like NaN."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from monolith.serve.metrics import ServingMetrics
from monolith.serve.page import Page
from monolith.serve.server.http import HttpRequest, HttpResponse
from page_replicas import QUALITY, Clock, SetLag, answer, replica, repository


def get(page: Page, path: str, query: Mapping[str, str] | None = None) -> HttpResponse:
    route = next(route for route in page.routes() if route.match(path) is not None)
    request = HttpRequest(method="GET", path=path, query=query or {}, path_parameters=route.match(path) or {})
    return asyncio.run(route.handler(request))


def status(page: Page, **query: str) -> dict[str, Any]:
    response = get(page, "/status.json", query)
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Cache-Control"] == "no-store"
    return json.loads(response.body)["replicas"][0]


def test_it_tells_what_the_server_does() -> None:
    clock = Clock(1000.0)
    follower = SetLag(seconds=0.25, positions={"run": 7})
    metrics = ServingMetrics(
        repository(replica(version=41), replica(version=42, follower=follower)),
        clock=clock,
        now=clock,
        in_flight=lambda: 2,
    )
    page = Page(
        metrics,
        quality=lambda: QUALITY,
        rollback=lambda model: (model == "clicks", "to version 41"),
        now=clock,
    )
    for version in (41, 42, 42):
        metrics.answered(answer(version=version, rows=5, seconds=0.002))
    metrics.answered(answer(model="made up", version=0, status="invalid"))
    clock.now += 1
    metrics.tick()
    told = status(page)
    assert told["reachable"]
    assert told["uptime_seconds"] == 1
    assert told["in_flight"] == 2
    assert told["requests"] == {
        "total": 4, "rows": 15, "ok": 3, "invalid": 1, "overloaded": 0, "deadline": 0, "error": 0
    }  # fmt: skip
    assert told["unserved"]["total"] == 1
    assert told["load"]["requests_per_second"] == 4
    (model,) = told["models"]
    assert (model["name"], model["default"]) == ("clicks", 42)
    assert model["rollback"] == {"possible": True, "reason": "to version 41"}
    old, new = model["versions"]
    assert (old["default"], new["default"]) == (False, True)
    assert old["lag"] is None
    assert new["lag"]["seconds"] == 0.25
    assert new["lag"]["positions"] == {"run": 7}
    assert new["freshness"]["max"] == 0.25
    assert new["requests"]["total"] == 2
    assert new["latency"]["p99"] == 0.002
    assert new["quality"] == QUALITY["clicks"][42]
    (table,) = new["tables"]
    assert (table["name"], table["rows"]) == ("user", 1)
    assert table["bytes"] > 0


def test_only_samples_that_the_page_does_not_have_are_sent() -> None:
    clock = Clock(1000.0)
    metrics = ServingMetrics(clock=clock, now=clock)
    page = Page(metrics, now=clock)
    for _ in range(5):
        clock.now += 1
        metrics.tick()
    assert status(page)["series"]["time"] == [1001, 1002, 1003, 1004, 1005]
    assert status(page, since="1003")["series"]["time"] == [1004, 1005]
    assert status(page, since="1005")["series"]["time"] == []
    assert status(page, since="1005")["load"]["time"] == 1005
    for nonsense in ("", "x", "nan", "inf"):
        assert len(status(page, since=nonsense)["series"]["time"]) == 5


def test_numbers_that_json_does_not_know_become_null() -> None:
    quality = {"clicks": {3: {"auc": float("nan"), "log_loss": float("inf")}}}
    page = Page(ServingMetrics(repository(replica(follower=SetLag(seconds=float("inf"))))), quality=lambda: quality)
    version = status(page)["models"][0]["versions"][0]
    assert version["quality"] == {"auc": None, "log_loss": None}
    assert version["lag"]["seconds"] is None


def test_without_a_rollout_a_rollback_is_not_possible() -> None:
    told = status(Page(ServingMetrics(repository(replica()))))
    assert told["models"][0]["rollback"] == {"possible": False, "reason": "this server has no rollout"}
    assert told["history"] is False


def test_metrics_are_served_as_prometheus_reads_them() -> None:
    response = get(Page(ServingMetrics(repository(replica()))), "/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert b'monolith_serving_table_rows{model="clicks",table="user",version="3"} 1.0' in response.body
