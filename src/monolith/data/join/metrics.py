"""What a joiner reports: a line of progress, Prometheus metrics and JSON over HTTP (`progress_line`, `MetricsServer`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import orjson

from monolith.data.join.joiner import JoinStatus
from monolith.errors import StorageError

__all__ = ["COUNTERS", "MetricsServer", "progress_line", "prometheus_text", "status_json"]

COUNTERS = {
    "impressions": "Impressions that could be parsed",
    "actions": "Actions that could be parsed",
    "positives": "Examples emitted with an action that makes them positive",
    "negatives": "Examples emitted without one",
    "corrections": "Examples emitted again because of a late action",
    "sampled_out": "Negatives that were not kept",
    "repeated_examples": "Examples that the output had already after a restart",
    "duplicate_impressions": "Impressions whose key was there already",
    "duplicate_actions": "Actions of a type that the impression had already",
    "early_actions": "Actions that came before their impression",
    "late_impressions": "Impressions that came after their window had closed",
    "late_actions": "Actions in the window that came after their example",
    "outside_actions": "Actions before or after the window of their impression",
    "unmatched_actions": "Actions whose impression never came",
    "other_actions": "Actions of a type that no label names",
    "expired_impressions": "Impressions that came too late to be known from repeated ones",
}
"""The counters of a joiner, with what they count. Refused records are counted as `bad_` and a name of `BAD_RECORDS`."""

_GAUGES = {
    "open_windows": "Keys in memory",
    "memory_bytes": "Memory that they take",
    "lag_records": "Records that are not read yet",
    "units": "Units of this process",
}
_TIMEOUT_SECS = 5.0


def status_json(status: JoinStatus, *, now: float | None = None) -> dict[str, Any]:
    """Return a status as a JSON object, with 0 for what has not happened.

    Example:
        >>> status = JoinStatus(units=1, counts={}, open_windows=0, memory_bytes=0, lag_records=0, watermark=4_000)
        >>> status_json(status, now=9.0)["watermark_lag_secs"]
        5.0
    """
    now = time.time() if now is None else now
    bad = {name: count for name, count in sorted(status.counts.items()) if name.startswith("bad_")}
    return {
        **{name: getattr(status, name) for name in _GAUGES},
        "watermark": status.watermark,
        "watermark_lag_secs": round(now - status.watermark / 1000, 3) if status.watermark else None,
        "bad_records": sum(bad.values()),
        **{name: status.counts.get(name, 0) for name in COUNTERS},
        **bad,
    }


def prometheus_text(status: JoinStatus, *, now: float | None = None) -> str:
    """Return a status in Prometheus' text format.

    Example:
        >>> status = JoinStatus(units=1, counts={"bad_key": 2}, open_windows=0, memory_bytes=0, lag_records=0, watermark=0)
        >>> [line for line in prometheus_text(status).splitlines() if "bad" in line and "#" not in line]
        ['monolith_join_bad_records_total{reason="key"} 2']
    """
    lines = []
    for name, text in COUNTERS.items():
        lines += [f"# HELP monolith_join_{name}_total {text}.", f"# TYPE monolith_join_{name}_total counter"]
        lines.append(f"monolith_join_{name}_total {status.counts.get(name, 0)}")
    lines += [
        "# HELP monolith_join_bad_records_total Refused records.",
        "# TYPE monolith_join_bad_records_total counter",
    ]
    for name, count in sorted(status.counts.items()):
        if name.startswith("bad_"):
            lines.append(f'monolith_join_bad_records_total{{reason="{name.removeprefix("bad_")}"}} {count}')
    for name, text in _GAUGES.items():
        lines += [f"# HELP monolith_join_{name} {text}.", f"# TYPE monolith_join_{name} gauge"]
        lines.append(f"monolith_join_{name} {getattr(status, name)}")
    if status.watermark:
        lag = (time.time() if now is None else now) - status.watermark / 1000
        lines += ["# HELP monolith_join_watermark_lag_seconds Age of the event time up to which windows are closed."]
        lines += ["# TYPE monolith_join_watermark_lag_seconds gauge", f"monolith_join_watermark_lag_seconds {lag:.3f}"]
    return "\n".join(lines) + "\n"


def progress_line(status: JoinStatus, before: JoinStatus, secs: float) -> str:
    """Return a line for people about the `secs` seconds between two statuses.

    Example:
        >>> before = JoinStatus(units=1, counts={}, open_windows=0, memory_bytes=0, lag_records=0, watermark=0)
        >>> now = JoinStatus(units=1, counts={"actions": 50}, open_windows=3, memory_bytes=2 << 20, lag_records=7, watermark=0)
        >>> progress_line(now, before, 10.0)
        '5 events/s, 0 examples, 3 keys in 2 MB, 7 records behind, 0 late, 0 duplicates, 0 refused'
    """

    def count(*names: str) -> int:
        return sum(status.counts.get(name, 0) for name in names)

    read = count("impressions", "actions") - sum(before.counts.get(name, 0) for name in ("impressions", "actions"))
    bad = sum(number for name, number in status.counts.items() if name.startswith("bad_"))
    return (
        f"{read / max(secs, 1e-3):,.0f} events/s, {count('positives', 'negatives'):,} examples, "
        f"{status.open_windows:,} keys in {status.memory_bytes >> 20:,} MB, {status.lag_records:,} records behind, "
        f"{count('late_actions', 'late_impressions'):,} late, "
        f"{count('duplicate_impressions', 'duplicate_actions'):,} duplicates, "
        f"{bad + count('expired_impressions'):,} refused"
    )


class MetricsServer:
    """Answers `GET /metrics` (Prometheus) and `GET /status` (JSON) on loopback.

    Example:
        >>> status = JoinStatus(units=1, counts={}, open_windows=0, memory_bytes=0, lag_records=0, watermark=0)
        >>> with MetricsServer(0, lambda: status) as server:
        ...     server.port > 0
        True
    """

    def __init__(self, port: int, status: Callable[[], JoinStatus]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_SECS

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, "text/plain; version=0.0.4", prometheus_text(status()).encode())
                elif self.path == "/status":
                    self._answer(200, "application/json", orjson.dumps(status_json(status())))
                else:
                    self._answer(404, "text/plain", b"expected /metrics or /status\n")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: a scrape is not an event."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise StorageError(f"metrics port {port}: cannot be opened: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="monolith-join-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
