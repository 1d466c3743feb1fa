"""`ServingMetrics`: counts the answers of a server, for Prometheus and for the operator's page."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from monolith.console import RareWarnings
from monolith.errors import ModelNotFoundError, MonolithError
from monolith.optional_packages import import_extra
from monolith.serve.repository import ModelRepository

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from monolith.serve.replica import Lag, Replica
    from monolith.serve.server.routing import Answered
    from monolith.table import TableStats

__all__ = ["LATENCY_BUCKETS", "LoadSample", "ServingMetrics", "VersionTotals"]

LATENCY_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the latency histogram, seconds."""
_FAILED = frozenset({"error", "deadline"})
# They are answered without predicting: counted among latencies, they would hide an overload.
_NOT_PREDICTED = frozenset({"overloaded", "invalid"})
_UNKNOWN = "unknown"
_LABELS = ("model", "version")
_MAX_VERSIONS = 256
_RECENT = 1024
_PER_SECOND = 4096
_FRESHNESS_SAMPLES = 300
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """The load of one second."""

    time: float
    """When it ended, seconds since 1970."""
    requests_per_second: float
    errors_per_second: float
    """Answers with status "error" or "deadline"."""
    shed_per_second: float
    """Answers with status "overloaded"."""
    latency_p50_seconds: float | None
    """None if nothing was predicted."""
    latency_p99_seconds: float | None
    lag_seconds: float | None
    """Of the default version that is furthest behind. None if none follows a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionTotals:
    """What one version of a model has answered since the server started."""

    statuses: Mapping[str, int]
    """Requests by status."""
    rows: int
    """Rows predicted."""
    latency: Mapping[str, float]
    """p50, p90, p99 and max of the last 1,024 predictions, seconds. Empty if there were none."""

    @property
    def requests(self) -> int:
        """Requests of every status."""
        return sum(self.statuses.values())


@dataclass(slots=True)
class _Answers:
    """Counters of one version of a model."""

    used: float = 0.0
    rows: int = 0
    statuses: dict[tuple[str, str], int] = field(default_factory=dict)  # by protocol and status
    histograms: dict[str, list[int]] = field(default_factory=dict)  # by protocol; the last bucket has no bound
    seconds: dict[str, float] = field(default_factory=dict)
    shadows: dict[str, int] = field(default_factory=dict)  # by status
    recent: array[float] = field(default_factory=lambda: array("d"))
    predicted: int = 0

    def observe(self, protocol: str, seconds: float) -> None:
        if protocol not in self.histograms:
            self.histograms[protocol] = [0] * (len(LATENCY_BUCKETS) + 1)
        self.histograms[protocol][bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self.seconds[protocol] = self.seconds.get(protocol, 0.0) + seconds
        _keep(self.recent, seconds, self.predicted, _RECENT)
        self.predicted += 1


@dataclass(slots=True)
class _Second:
    """Counters of the second that has not ended."""

    requests: int = 0
    errors: int = 0
    shed: int = 0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    predicted: int = 0


@dataclass(slots=True)
class _Followed:
    """What the lag of one replica was."""

    freshness: deque[float] = field(default_factory=lambda: deque(maxlen=_FRESHNESS_SAMPLES))
    applied: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=3600))  # time, sequence


class ServingMetrics:
    """Observes the answers of a server. Thread-safe, of bounded size, and without global state.

    One thread, started by `start`, closes a sample of the load every second.

    Args:
        repository: The models that are served, by default none. Answers for models that it does not have, whose names clients
            can make up, are counted under the model "unknown".
        in_flight: Returns the number of requests that are not answered yet.
        seconds: Samples to keep, one for each second.
        clock: Seconds that never go back.
        now: Seconds since 1970.

    Example:
        >>> from monolith.serve.server.routing import Answered
        >>> metrics = ServingMetrics(clock=iter([0.0, 1.0]).__next__, now=lambda: 1_700_000_000.0)
        >>> metrics.answered(
        ...     Answered(model="clicks", version=3, protocol="grpc", rows=8, seconds=0.002, status="ok", request_id="")
        ... )
        >>> metrics.tick()
        >>> metrics.samples()[0].requests_per_second, metrics.totals()["unknown", 0].rows
        (1.0, 8)
    """

    def __init__(
        self,
        repository: ModelRepository | None = None,
        *,
        in_flight: Callable[[], int] = lambda: 0,
        seconds: int = 3600,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.repository = repository or ModelRepository()
        self.in_flight = in_flight
        self.started = now()
        """When the server started, seconds since 1970."""
        self._clock, self._now = clock, now
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, int], _Answers] = {}
        self._dropped = 0
        self._second, self._second_began = _Second(), clock()
        self._samples: deque[LoadSample] = deque(maxlen=seconds)
        self._followed: dict[tuple[str, int], _Followed] = {}
        self._warnings = RareWarnings(_LOG, seconds=60)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.collectors: list[object] = []
        """Other metrics of the server, as `RolloutCollector`. Add them before the first scrape."""
        self._registry: CollectorRegistry | None = None

    def answered(self, answered: Answered) -> None:
        """Count one answer."""
        key = answered.model, answered.version
        if key not in self._answers:
            key = self._known(key)
        status, seconds = answered.status, answered.seconds
        with self._lock:
            answers = self._answers.get(key) or self._add(key)
            answers.used = self._second_began
            if answered.shadow:
                answers.shadows[status] = answers.shadows.get(status, 0) + 1
                return
            second = self._second
            second.requests += 1
            label = answered.protocol, status
            answers.statuses[label] = answers.statuses.get(label, 0) + 1
            if status == "overloaded":
                second.shed += 1
            elif status in _FAILED:
                second.errors += 1
            if status in _NOT_PREDICTED:
                return
            if status == "ok":
                answers.rows += answered.rows
            answers.observe(answered.protocol, seconds)
            _keep(second.latencies, seconds, second.predicted, _PER_SECOND)
            second.predicted += 1

    def _known(self, key: tuple[str, int]) -> tuple[str, int]:
        """Return `key` if such a replica is served. A name that a client made up must not become a metric."""
        if self.repository.ready(*key):
            return key
        return (key[0] if self.repository.ready(key[0]) else _UNKNOWN), 0

    def _add(self, key: tuple[str, int]) -> _Answers:
        if len(self._answers) >= _MAX_VERSIONS:
            del self._answers[min(self._answers, key=lambda old: self._answers[old].used)]
            self._dropped += 1
        answers = self._answers[key] = _Answers()
        return answers

    def start(self) -> None:
        """Start the thread that closes a sample every second. Calling it again is harmless."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="serving-metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Calling it twice is harmless."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, 1.0 - time.time() % 1.0)):
            try:
                self.tick()
            except Exception:  # the next sample may succeed, and without this thread the page would stand still
                _LOG.exception("a sample of the load is missing")

    def tick(self) -> None:
        """Close the sample of the load since the last call, and take one of the lag of every replica."""
        at, elsewhen = self._clock(), self._now()
        with self._lock:
            second, self._second = self._second, _Second()
            elapsed, self._second_began = max(at - self._second_began, 1e-9), at
        latency = _quantiles(second.latencies)
        sample = LoadSample(
            time=elsewhen,
            requests_per_second=second.requests / elapsed,
            errors_per_second=second.errors / elapsed,
            shed_per_second=second.shed / elapsed,
            latency_p50_seconds=latency.get("p50"),
            latency_p99_seconds=latency.get("p99"),
            lag_seconds=self._sample_lags(elsewhen),
        )
        with self._lock:
            self._samples.append(sample)

    def _sample_lags(self, now: float) -> float | None:
        lags = [((replica.name, replica.version), self.lag(replica)) for replica in self.replicas()]
        with self._lock:
            followed = self._followed
            self._followed = {}
            for key, lag in lags:
                if lag is None:
                    continue
                known = self._followed[key] = followed.get(key) or _Followed()
                known.freshness.append(lag.seconds)
                if not known.applied or known.applied[-1][1] != lag.sequence:
                    known.applied.append((now, lag.sequence))
        defaults = (lag for (name, version), lag in lags if self.default(name) == version)
        return max((lag.seconds for lag in defaults if lag is not None), default=None)

    def replicas(self) -> Iterator[Replica]:
        """Yield all replicas. Each is kept open until the next is asked for."""
        for name in self.repository.names():
            with suppress(ModelNotFoundError):  # removed meanwhile
                for version in self.repository.versions(name):
                    with suppress(ModelNotFoundError), self.repository.hold(name, version) as replica:
                        yield replica

    def default(self, model: str) -> int | None:
        """Return the default version of a model. None if there is no such model."""
        try:
            return self.repository.default(model)
        except ModelNotFoundError:
            return None

    def lag(self, replica: Replica) -> Lag | None:
        """Return how far a replica is behind. None if it follows no run, or cannot say."""
        try:
            return replica.lag()
        except MonolithError as error:
            self._warnings.warn("the lag of %r cannot be measured: %s", replica, error)
            return None

    def tables(self, replica: Replica) -> dict[str, TableStats]:
        """Return the sizes of its tables. Empty if they cannot be measured, as when a shard does not answer."""
        try:
            return replica.stats()
        except MonolithError as error:
            self._warnings.warn("the tables of %r cannot be measured: %s", replica, error)
            return {}

    def samples(self, since: float = 0.0) -> list[LoadSample]:
        """Return the samples after the time `since`, oldest first."""
        with self._lock:
            return [sample for sample in self._samples if sample.time > since]

    def totals(self) -> dict[tuple[str, int], VersionTotals]:
        """Return what each version of a model has answered. Version 0 stands for requests that reached none."""
        with self._lock:
            return {
                key: VersionTotals(statuses=_by_status(known), rows=known.rows, latency=_quantiles(known.recent))
                for key, known in self._answers.items()
            }

    def freshness(self, model: str, version: int) -> dict[str, float]:
        """Return p50, p90, p99 and max of the lag in the last 300 samples, seconds. Empty if there are none."""
        with self._lock:
            known = self._followed.get((model, version))
            return {} if known is None else _quantiles(known.freshness)

    def served_since(self, model: str, version: int, sequence: int) -> tuple[float, bool] | None:
        """Return when a replica was first seen to have applied `sequence`, to the second.

        Returns:
            The time, seconds since 1970, and whether the replica may have had it earlier, because it is the oldest
            sample. None if it has not applied it.
        """
        with self._lock:
            known = self._followed.get((model, version))
            applied = [] if known is None else list(known.applied)
        for position, (at, newest) in enumerate(applied):
            if newest >= sequence:
                return at, position == 0
        return None

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text that Prometheus scrapes, and its content type, for a request that accepts `accept`."""
        client = import_extra("prometheus_client.exposition", extra="serve", purpose="/metrics")
        if self._registry is None:
            registry = import_extra("prometheus_client.registry", extra="serve", purpose="/metrics")
            self._registry = registry.CollectorRegistry(auto_describe=False)
            for collector in (self, *self.collectors):
                self._registry.register(collector)  # type: ignore[arg-type]
        encoder, content_type = client.choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Prometheus' client calls it for each scrape."""
        core = import_extra("prometheus_client.metrics_core", extra="serve", purpose="/metrics")
        with self._lock:
            yield from _answer_metrics(core, self._answers)
            dropped = self._dropped
        yield core.CounterMetricFamily(
            "monolith_serving_dropped_series",
            "Versions whose counters were dropped because there were too many",
            dropped,
        )
        yield core.GaugeMetricFamily(
            "monolith_serving_requests_in_flight", "Requests that are not answered yet", self.in_flight()
        )
        yield core.GaugeMetricFamily(
            "monolith_serving_start_time_seconds", "When the server started, seconds since 1970", self.started
        )
        yield from self._replica_metrics(core)
        yield from self._table_metrics(core)

    def _replica_metrics(self, core: Any) -> Iterator[Metric]:  # noqa: ANN401 - a module that may be missing
        def gauge(name: str, text: str) -> Any:  # noqa: ANN401
            return core.GaugeMetricFamily(f"monolith_serving_{name}", text, labels=_LABELS)

        seconds = gauge("lag_seconds", "Age of the newest training changes that are applied")
        step = gauge("applied_step", "Global step of the newest changes applied")
        sequence = gauge("applied_sequence", "Sequence number of the newest changes applied")
        event_time = gauge("applied_event_time_seconds", "Newest event time applied, seconds since 1970")
        connected = gauge("connected", "1 if all writers that the replica follows answer")
        missing = gauge(
            "missing_changes", "1 if writers do not answer, and what the run has saved cannot be read either"
        )
        default = gauge("default_version", "1 if requests that name no version are answered by this one")
        for replica in self.replicas():
            labels = replica.name, str(replica.version)
            default.add_metric(labels, self.default(replica.name) == replica.version)
            lag = self.lag(replica)
            if lag is None:
                continue
            seconds.add_metric(labels, lag.seconds)
            step.add_metric(labels, lag.step)
            sequence.add_metric(labels, lag.sequence)
            event_time.add_metric(labels, lag.event_time)
            connected.add_metric(labels, lag.connected)
            missing.add_metric(labels, bool(lag.missing))
        return iter((seconds, step, sequence, event_time, connected, missing, default))

    def _table_metrics(self, core: Any) -> Iterator[Metric]:  # noqa: ANN401
        labels = (*_LABELS, "table")
        rows = core.GaugeMetricFamily("monolith_serving_table_rows", "Ids that have a row", labels=labels)
        size = core.GaugeMetricFamily("monolith_serving_table_bytes", "Memory of the table", labels=labels)
        for replica in self.replicas():
            for table, stat in self.tables(replica).items():
                rows.add_metric((replica.name, str(replica.version), table), stat.rows)
                size.add_metric((replica.name, str(replica.version), table), stat.bytes)
        return iter((rows, size))


def _answer_metrics(core: Any, served: Mapping[tuple[str, int], _Answers]) -> Iterator[Metric]:  # noqa: ANN401
    def counter(name: str, text: str, *more: str) -> Any:  # noqa: ANN401
        return core.CounterMetricFamily(f"monolith_serving_{name}", text, labels=(*_LABELS, *more))

    requests = counter("requests", "Requests answered, by protocol and status", "protocol", "status")
    shed = counter("shed_requests", "Requests refused because of overload")
    rows = counter("rows_predicted", "Rows of requests with status ok")
    shadows = counter("shadow_requests", "Predictions of shadow versions, which no client sees", "status")
    latency = core.HistogramMetricFamily(
        "monolith_serving_request_duration_seconds",
        "From arrival to answer, without requests that were shed or invalid",
        labels=(*_LABELS, "protocol"),
    )
    for (model, version), answers in served.items():
        labels = model, str(version)
        for (protocol, status), count in answers.statuses.items():
            requests.add_metric((*labels, protocol, status), count)
        shed.add_metric(labels, _by_status(answers).get("overloaded", 0))
        rows.add_metric(labels, answers.rows)
        for status, count in answers.shadows.items():
            shadows.add_metric((*labels, status), count)
        for protocol, histogram in answers.histograms.items():
            bounds = [*map(str, LATENCY_BUCKETS), "+Inf"]
            buckets = list(zip(bounds, map(int, np.cumsum(histogram)), strict=True))
            latency.add_metric((*labels, protocol), buckets, answers.seconds[protocol])
    return iter((requests, shed, rows, shadows, latency))


def _by_status(answers: _Answers) -> dict[str, int]:
    statuses: dict[str, int] = {}
    for (_, status), count in answers.statuses.items():
        statuses[status] = statuses.get(status, 0) + count
    return statuses


def _keep(values: array[float], value: float, count: int, limit: int) -> None:
    """Append `value`, the `count`-th, or replace the oldest of `limit` values."""
    if count < limit:
        values.append(value)
    else:
        values[count % limit] = value


def _quantiles(values: Iterable[float]) -> dict[str, float]:
    known = np.fromiter(values, dtype=np.float64)
    if not len(known):
        return {}
    p50, p90, p99, top = np.quantile(known, (0.5, 0.9, 0.99, 1.0)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": top}
