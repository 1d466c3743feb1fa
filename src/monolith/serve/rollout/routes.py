"""A rollout as the HTTP server shows it: labels, state, plan, promotion, rollback, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from pydantic import Field

from monolith.config import Config
from monolith.errors import (
    ConfigError,
    InvalidArgumentError,
    MessageTooLargeError,
    ModelNotFoundError,
    MonolithError,
    StorageError,
)
from monolith.optional_packages import import_extra
from monolith.serve.rollout.labels import parse_labels
from monolith.serve.rollout.plan import RolloutPlan
from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["MAX_LABEL_BYTES", "RollbackRequest", "RolloutCollector", "rollout_routes"]

MAX_LABEL_BYTES = 1 << 23
"""Longer bodies of labels are refused: parsed, they take many times as much memory."""
_STATUS: dict[type[MonolithError], HTTPStatus] = {
    MessageTooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    ModelNotFoundError: HTTPStatus.NOT_FOUND,
    ConfigError: HTTPStatus.BAD_REQUEST,
    InvalidArgumentError: HTTPStatus.BAD_REQUEST,
    StorageError: HTTPStatus.INSUFFICIENT_STORAGE,
}


class _ModelRequest(Config):
    model: str = Field(min_length=1)


class RollbackRequest(_ModelRequest):
    """The body of POST /rollout/rollback.

    Example:
        >>> RollbackRequest(model="clicks", to="10m-ago").reason
        'asked by an operator'
    """

    to: str | None = None
    """A moment of the run that the model follows. None: the stable version."""
    reason: str = "asked by an operator"


def rollout_routes(router: RolloutRouter) -> tuple[HttpRoute, ...]:
    """Return the routes for `ModelServer(extra_routes=...)`. All that change something need the token.

    - `GET /rollout`: plans, events, quality and counts.
    - `POST /rollout`: a `RolloutPlan` as JSON comes into force. `?again=true` allows a candidate that was rolled back before.
    - `POST /rollout/promote`: `{"model": "clicks"}`, the candidate becomes the stable version.
    - `POST /rollout/rollback`: a `RollbackRequest`.
    - `POST /labels`: labels as `parse_labels` takes them. Answers how many were joined, repeated, late, unknown and invalid.

    Example:
        >>> import tempfile
        >>> from monolith.serve.repository import ModelRepository
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     routes = rollout_routes(RolloutRouter(ModelRepository(), folder))
        >>> [(route.method, route.path) for route in routes if not route.needs_token]
        [('GET', '/rollout')]
    """

    def state(request: HttpRequest) -> Mapping[str, object]:
        return router.status()

    def set_plan(request: HttpRequest) -> Mapping[str, object]:
        plan = RolloutPlan.from_json(_text(request))
        router.set_plan(plan, again=_flag(request, "again"))
        return {"model": plan.model, "plan": plan.model_dump(mode="json")}

    def promote(request: HttpRequest) -> Mapping[str, object]:
        plan = router.promote(_ModelRequest.from_json(_text(request)).model)
        return {"model": plan.model, "plan": plan.model_dump(mode="json")}

    def roll_back(request: HttpRequest) -> Mapping[str, object]:
        wanted = RollbackRequest.from_json(_text(request))
        return {"model": wanted.model, "message": router.rollback(wanted.model, to=wanted.to, reason=wanted.reason)}

    def labels(request: HttpRequest) -> Mapping[str, object]:
        if len(request.body) > MAX_LABEL_BYTES:
            raise MessageTooLargeError(
                f"body: expected at most {MAX_LABEL_BYTES:,} bytes of labels, got {len(request.body):,}; send several requests"
            )
        return router.add_labels(parse_labels(request.body))

    return (
        _route("GET", "/rollout", state, needs_token=False),
        _route("POST", "/rollout", set_plan),
        _route("POST", "/rollout/promote", promote),
        _route("POST", "/rollout/rollback", roll_back),
        _route("POST", "/labels", labels),
    )


def _route(
    method: str, path: str, answer: Callable[[HttpRequest], Mapping[str, object]], *, needs_token: bool = True
) -> HttpRoute:
    async def handler(request: HttpRequest) -> HttpResponse:
        # All of them take locks, and most of them wait for the disk.
        return await asyncio.to_thread(_answer, answer, request)

    return HttpRoute(method=method, path=path, handler=handler, needs_token=needs_token)


def _answer(answer: Callable[[HttpRequest], Mapping[str, object]], request: HttpRequest) -> HttpResponse:
    try:
        return _json(HTTPStatus.OK, answer(request))
    except MonolithError as error:
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), HTTPStatus.CONFLICT)
        return _json(status, {"error": str(error)}, {"monolith-error": type(error).__name__})


def _json(status: HTTPStatus, content: Mapping[str, object], headers: Mapping[str, str] | None = None) -> HttpResponse:
    body = json.dumps(content, allow_nan=False).encode()
    return HttpResponse(status=int(status), headers={"content-type": "application/json", **(headers or {})}, body=body)


def _text(request: HttpRequest) -> str:
    try:
        return request.body.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"body: expected JSON in UTF-8: {error}") from None


def _flag(request: HttpRequest, name: str) -> bool:
    value = request.query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidArgumentError(f"{name}: expected true or false, got {value!r}")
    return value in ("true", "1")


class RolloutCollector:
    """The metrics of rollouts, for `ServingMetrics.collectors`.

    `monolith_rollout_events_total` has everything that is counted, by what, model and version: answers, shadows, dropped_shadows,
    failed_shadows, rollbacks, rewinds, missing_versions, and labels_joined, labels_late and so on. `monolith_rollout_share` is
    the share of requests of each version, and `monolith_rollout_quality` has the numbers of the window.
    """

    def __init__(self, router: RolloutRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Prometheus' client calls it for each scrape."""
        core = import_extra("prometheus_client.metrics_core", extra="serve", purpose="/metrics")
        events = core.CounterMetricFamily(
            "monolith_rollout_events", "What happened to versions and labels", labels=("what", "model", "version")
        )
        for key, number in self._router.counters().items():
            events.add_metric(key, number)
        share = core.GaugeMetricFamily(
            "monolith_rollout_share", "Share of requests that a version answers", labels=("model", "version")
        )
        for name, plan in self._router.current_plans().items():
            share.add_metric((name, str(plan.stable)), 1 - plan.share)
            if plan.candidate is not None:
                share.add_metric((name, str(plan.candidate)), plan.share)
        quality = core.GaugeMetricFamily(
            "monolith_rollout_quality", "Quality by labels in the window", labels=("model", "version", "number")
        )
        for model, versions in self._router.quality().items():
            for version, numbers in versions.items():
                for name, value in numbers.items():
                    if isinstance(value, int | float):
                        quality.add_metric((model, str(version), name), value)
        yield from (events, share, quality)
