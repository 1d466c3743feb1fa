"""`Page`: what the operator's page of a serving replica shows, and the routes that serve it."""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from monolith.errors import InvalidArgumentError, ModelNotFoundError, MonolithError
from monolith.features import hash_strings
from monolith.log import LogReader, RowChange, history
from monolith.optional_packages import import_extra
from monolith.serve.metrics import LoadSample, ServingMetrics, VersionTotals
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from monolith.state.model_dir import SERVERS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from monolith.serve.replica import Replica

__all__ = ["Page", "RunCollector", "charts_installed", "json_response", "row_history", "static_routes"]

_STATIC = Path(__file__).parent / "static"
_CHARTS = "uplot/uPlot.iife.min.js"
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    # Fetched by the build, see deploy/charts. Without them the page draws simple lines.
    _CHARTS: (_CHARTS, "text/javascript; charset=utf-8"),
    "uplot/uPlot.min.css": ("uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "uplot/LICENSE": ("uplot/LICENSE", "text/plain; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_SAFE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MAX_CHANGES = 100
_INTEGER = re.compile(r"-?[0-9]+")


class Page:
    """The operator's page of one server: `/`, `/static/...`, `/status.json`, `/ids/{table}/{id}` and `/metrics`.

    An id that is not an integer is a text, whose id is that of `hash_strings`. A text of digits needs `?text=1`.

    Args:
        metrics: Observes the server.
        quality: Returns what is known of the quality of each version, such as its log loss, by model, version and name.
        rollback: Returns whether `POST /rollout/rollback` of a model would succeed, and what it would do or why not.
        history: Returns the changes of a row of a table, oldest first. None if no log is known, see `row_history`.
        runs: Returns what is known of the runs that are followed, see `Overview.runs`.
        now: Seconds since 1970.

    Example:
        >>> page = Page(ServingMetrics())
        >>> [route.path for route in page.routes()]
        ['/', '/static/{file:path}', '/status.json', '/ids/{table}/{id}', '/metrics']
        >>> page.status()["models"]
        []
    """

    def __init__(
        self,
        metrics: ServingMetrics,
        *,
        quality: Callable[[], Mapping[str, Mapping[int, Mapping[str, object]]]] = dict,
        rollback: Callable[[str], tuple[bool, str]] = lambda model: (False, "this server has no rollout"),
        history: Callable[[str, int], Iterable[RowChange]] | None = None,
        runs: Callable[[], list[dict[str, object]]] = list,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._metrics, self._quality, self._rollback, self._history = metrics, quality, rollback, history
        self._runs, self._now = runs, now
        # A log is read from its beginning: one lookup at a time is what a server can afford beside its work.
        self._history_lock = threading.Lock()

    def routes(self) -> tuple[HttpRoute, ...]:
        """Return the routes of the page, for `ModelServer(extra_routes=...)`."""

        async def status(request: HttpRequest) -> HttpResponse:
            since = _seconds(request.query.get("since", "0"))
            answer = await asyncio.to_thread(self.status, since)
            runs = await asyncio.to_thread(self._runs)
            return json_response(
                {"time": self._now(), "charts": charts_installed(), "replicas": [answer], "runs": runs}
            )

        async def row(request: HttpRequest) -> HttpResponse:
            return await asyncio.to_thread(self._row_response, request)

        async def metrics(request: HttpRequest) -> HttpResponse:
            accept = request.headers.get("accept", "")
            body, kind = await asyncio.to_thread(self._metrics.exposition, accept)
            return HttpResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"}, body=body)

        return (
            *static_routes(),
            HttpRoute(method="GET", path="/status.json", handler=status),
            HttpRoute(method="GET", path="/ids/{table}/{id}", handler=row),
            HttpRoute(method="GET", path="/metrics", handler=metrics),
        )

    def status(self, since: float = 0.0) -> dict[str, object]:
        """Return what the page shows of this server, with the samples of its load after the time `since`."""
        metrics = self._metrics
        samples = metrics.samples(since)
        newest = samples[-1:] or metrics.samples()[-1:]
        totals = metrics.totals()
        quality = self._quality()
        models: dict[str, list[dict[str, object]]] = {}
        for replica in metrics.replicas():
            known = totals.get((replica.name, replica.version))
            described = self._version(replica, known, quality)
            models.setdefault(replica.name, []).append(described)
        return {
            "address": "",
            "reachable": True,
            "time": self._now(),
            "uptime_seconds": self._now() - metrics.started,
            "models": [
                {
                    "name": name,
                    "default": metrics.default(name),
                    "rollback": dict(zip(("possible", "reason"), self._rollback(name), strict=True)),
                    "versions": versions,
                }
                for name, versions in models.items()
            ],
            "load": asdict(newest[0]) if newest else None,
            "in_flight": metrics.in_flight(),
            "requests": _requests(totals.values()),
            "unserved": _requests(known for (_, version), known in totals.items() if not version),
            "history": self._history is not None,
            "series": {field.name: [getattr(s, field.name) for s in samples] for field in fields(LoadSample)},
        }

    def _version(
        self,
        replica: Replica,
        totals: VersionTotals | None,
        quality: Mapping[str, Mapping[int, Mapping[str, object]]],
    ) -> dict[str, object]:
        lag = self._metrics.lag(replica)
        return {
            "version": replica.version,
            "default": self._metrics.default(replica.name) == replica.version,
            "lag": None if lag is None else {**asdict(lag), "positions": dict(lag.positions)},
            "freshness": self._metrics.freshness(replica.name, replica.version),
            "requests": _requests([] if totals is None else [totals]),
            "latency": {} if totals is None else dict(totals.latency),
            "tables": [
                {"name": name, "rows": stats.rows, "bytes": stats.bytes, "row_bytes": stats.row_bytes}
                for name, stats in self._metrics.tables(replica).items()
            ],
            "quality": dict(quality.get(replica.name, {}).get(replica.version, {})),
        }

    def row(self, table: str, id_: int, *, model: str | None = None, version: int | None = None) -> dict[str, object]:
        """Return the row of an id as it is served now, and how it came to be so.

        Args:
            table: Name of the table.
            id_: The id, an int64.
            model: Name of the model, by default the first that has the table.
            version: Version of the model, by default its default version.

        Raises:
            InvalidArgumentError: `id_` is not an int64, or no model that is served has the table.
        """
        if not -(2**63) <= id_ < 2**63:
            raise InvalidArgumentError(f"id: expected an int64, got {id_}")
        known: set[str] = set()
        for replica in self._metrics.replicas():
            wanted = self._metrics.default(replica.name) if version is None else version
            if model not in (None, replica.name) or replica.version != wanted:
                continue
            for store in replica.predictor.stores.values():
                known |= store.configs().keys()
                if table in store.configs():
                    entries = store.lookup_entry(table, np.array([id_], dtype=np.int64))
                    found, values = bool(entries.found[0]), entries.values[0].tolist()
                    return {
                        "table": table,
                        "id": str(id_),  # JavaScript has no int64
                        "model": replica.name,
                        "version": replica.version,
                        "found": found,
                        "values": values if found else None,
                        "norm": math.hypot(*values) if found else None,
                        "event_time": int(entries.times[0]) or None if found else None,
                        **self._changes(replica, table, id_),
                    }
        raise InvalidArgumentError(
            f"table: there is no {table!r} here; there is {', '.join(sorted(known)) or 'no table of this model'}"
        )

    def _changes(self, replica: Replica, table: str, id_: int) -> dict[str, object]:
        if self._history is None:
            return {"changes": None, "learnt": None, "note": "This server knows no change log, so there is no history."}
        if not self._history_lock.acquire(blocking=False):
            return {"changes": None, "learnt": None, "note": "Another lookup is reading the log. Try again."}
        learnt, count = None, 0
        newest: deque[RowChange] = deque(maxlen=_MAX_CHANGES)  # a row may have changed in every segment of a long log
        try:
            for change in self._history(table, id_):
                count += 1
                newest.append(change)
                learnt = change if learnt is None and not change.erased else learnt
        except MonolithError as error:
            return {"changes": None, "learnt": None, "note": f"The log cannot be read: {error}"}
        finally:
            self._history_lock.release()
        return {
            "changes": [self._change(replica, change) for change in newest],
            "learnt": None if learnt is None else self._change(replica, learnt),
            "note": f"The last {_MAX_CHANGES} of {count} changes." if count > _MAX_CHANGES else "",
        }

    def _change(self, replica: Replica, change: RowChange) -> dict[str, object]:
        # Numbers of several writers cannot be compared with one of a row whose writer is not known.
        lag = self._metrics.lag(replica)
        served = None
        if lag is not None and len(lag.positions) <= 1:
            served = self._metrics.served_since(replica.name, replica.version, change.sequence)
        return {
            "sequence": change.sequence,
            "step": change.step,
            "time": change.time,
            "erased": change.erased,
            "event_time": change.event_time,
            "norm": change.norm,
            "values": change.values,
            "served": None if served is None else served[0],
            "served_earlier": served is not None and served[1],
        }

    def _row_response(self, request: HttpRequest) -> HttpResponse:
        parts, query = request.path_parameters, request.query
        try:
            version = int(query["version"]) if query.get("version") else None
            text = {"text": parts["id"]} if query.get("text") or not _INTEGER.fullmatch(parts["id"]) else {}
            id_ = int(hash_strings([parts["id"]])[0]) if text else int(parts["id"])
            row = text | self.row(parts["table"], id_, model=query.get("model") or None, version=version)
        except (InvalidArgumentError, ModelNotFoundError) as error:
            return json_response({"error": str(error)}, status=404)
        except ValueError:
            wrong = "id" if _INTEGER.fullmatch(query.get("version") or "0") else "version"
            given = parts["id"] if wrong == "id" else query["version"]
            return json_response({"error": f"{wrong}: expected an integer, got {given[:64]!r}"}, status=400)
        except MonolithError as error:
            return json_response({"error": str(error)}, status=503)
        return json_response(row)


def row_history(model_dir: str | Path) -> Callable[[str, int], Iterable[RowChange]]:
    """Return a function from a table and an id to the changes of its row, from all logs below a local model_dir.

    Example:
        >>> changes = row_history("runs/clicks")  # doctest: +SKIP
        >>> [change.step for change in changes("user", 7)]  # doctest: +SKIP
        [100, 250]
    """
    root = Path(model_dir)

    def changes(table: str, id_: int) -> Iterator[RowChange]:
        folders = [root / "log", *sorted(root.glob(f"{SERVERS}/*/log"))]
        logs = (history(LogReader(folder), id_, table=table) for folder in folders if folder.is_dir())
        return heapq.merge(*logs, key=lambda change: (change.time, change.sequence))

    return changes


def charts_installed() -> bool:
    """Whether the build found the chart library. Without it the page draws simple lines."""
    return (_STATIC / _CHARTS).is_file()


def static_routes() -> tuple[HttpRoute, ...]:
    """Return the routes of the files that browsers load. They hold no data, and a browser has no token when it loads them.

    Example:
        >>> [route.path for route in static_routes()]
        ['/', '/static/{file:path}']
    """

    async def static(request: HttpRequest) -> HttpResponse:
        name, kind = _FILES.get(request.path_parameters.get("file", ""), ("", ""))
        path = _STATIC / name
        if not name or not path.is_file():
            return json_response({"error": "there is no such file"}, status=404)
        headers = {**_SAFE_HEADERS, "Content-Type": kind, "Cache-Control": "no-cache"}
        return HttpResponse(headers=headers, body=path.read_bytes())

    return (
        HttpRoute(method="GET", path="/", handler=static, is_public=True),
        HttpRoute(method="GET", path="/static/{file:path}", handler=static, is_public=True),
    )


def json_response(answer: Mapping[str, object], *, status: int = 200) -> HttpResponse:
    """Return `answer` as JSON, with null for numbers that are not finite.

    Example:
        >>> json_response({"lag": float("nan")}).body
        b'{"lag": null}'
    """
    headers = {**_SAFE_HEADERS, "Content-Type": "application/json", "Cache-Control": "no-store"}
    return HttpResponse(status=status, headers=headers, body=json.dumps(_finite(answer), allow_nan=False).encode())


class RunCollector:
    """The metrics of runs that are followed, for `ServingMetrics.collectors`: their step, and how far they are behind a stream.

    Args:
        runs: As of `Page`.

    Example:
        >>> run = {"path": "runs/clicks", "live": {"answers": True, "step": 7, "lag_records": 900, "lag_seconds": 1.5}}
        >>> [(family.name, family.samples[0].value) for family in RunCollector(lambda: [run]).collect()][:3]
        [('monolith_training_answers', 1.0), ('monolith_training_step', 7.0), ('monolith_training_lag_records', 900.0)]
    """

    def __init__(self, runs: Callable[[], list[dict[str, object]]]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Prometheus' client calls it for each scrape."""
        core = import_extra("prometheus_client.metrics_core", extra="serve", purpose="/metrics")
        runs = [(str(run["path"]), live) for run in self._runs() if isinstance(live := run["live"], Mapping)]
        for name, text in {
            "answers": "Whether a run that goes on says how far it is. Without an answer it has no other metric",
            "step": "Global step of a run",
            "lag_records": "Records of its stream that a run has not read yet",
            "lag_seconds": "Age of the newest record that a run has read, of the partition most behind, 0 if all are read",
        }.items():
            family = core.GaugeMetricFamily(f"monolith_training_{name}", text, labels=("run",))
            for path, live in runs:
                if live.get(name) is not None:
                    family.add_metric((path,), float(live[name]))
            yield family


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def _requests(totals: Iterable[VersionTotals]) -> dict[str, int]:
    answer = {"total": 0, "rows": 0, "ok": 0, "invalid": 0, "overloaded": 0, "deadline": 0, "error": 0}
    for known in totals:
        answer["total"] += known.requests
        answer["rows"] += known.rows
        for status, count in known.statuses.items():
            answer[status] = answer.get(status, 0) + count
    return answer
