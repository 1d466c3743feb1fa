"""Danger: metrics that are wrong by a little: a status missed, a bucket off by one, a unit that the name does not say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monolith.errors import UnavailableError
from monolith.serve.metrics import LATENCY_BUCKETS, ServingMetrics
from monolith.serve.replica import Lag
from page_replicas import Clock, SetLag, answer, replica, repository

parser = pytest.importorskip("prometheus_client.parser", reason="needs the package prometheus-client")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(metrics: ServingMetrics) -> Samples:
    body, kind = metrics.exposition()
    assert kind.startswith("text/plain")
    return {
        (sample.name.removeprefix("monolith_serving_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def labelled(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model": "clicks", "version": "3", **labels}.items()))


def test_requests_are_counted_by_model_version_protocol_and_status() -> None:
    metrics = ServingMetrics(repository(replica(version=3), replica(version=4)))
    for fields in (
        {"protocol": "grpc", "rows": 8},
        {"protocol": "grpc", "rows": 2},
        {"protocol": "http-json", "rows": 5, "status": "invalid"},
        {"protocol": "http-json", "rows": 5, "status": "overloaded"},
        {"protocol": "http-binary", "rows": 5, "status": "deadline"},
        {"version": 4, "rows": 7},
    ):
        metrics.answered(answer(**fields))
    counted = scrape(metrics)
    requests = {labels: value for (name, labels), value in counted.items() if name == "requests_total"}
    assert requests == {
        labelled(protocol="grpc", status="ok"): 2,
        labelled(protocol="http-json", status="invalid"): 1,
        labelled(protocol="http-json", status="overloaded"): 1,
        labelled(protocol="http-binary", status="deadline"): 1,
        labelled(version="4", protocol="grpc", status="ok"): 1,
    }
    assert counted["rows_predicted_total", labelled()] == 10
    assert counted["rows_predicted_total", labelled(version="4")] == 7
    assert counted["shed_requests_total", labelled()] == 1
    assert counted["shed_requests_total", labelled(version="4")] == 0


def test_the_histogram_has_each_latency_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    metrics = ServingMetrics(repository(replica()))
    for seconds in (0.001, 0.0011, 0.004, 99.0):
        metrics.answered(answer(seconds=seconds))
    # Answers without a prediction are quick, and would make an overloaded server look quick.
    metrics.answered(answer(seconds=0.0001, status="overloaded"))
    metrics.answered(answer(seconds=0.0001, status="invalid"))
    counted = scrape(metrics)
    found = [
        counted["request_duration_seconds_bucket", labelled(protocol="grpc", le=str(bound))]
        for bound in (*LATENCY_BUCKETS, "+Inf")
    ]
    assert found == [0, 0, 0, 1, 2, 3, *[3] * 10, 4]
    assert counted["request_duration_seconds_count", labelled(protocol="grpc")] == 4
    assert counted["request_duration_seconds_sum", labelled(protocol="grpc")] == pytest.approx(99.0061)


def test_shadow_predictions_are_apart_from_what_clients_saw() -> None:
    metrics = ServingMetrics(repository(replica()), clock=Clock())
    metrics.answered(answer(shadow=True, rows=9))
    metrics.tick()
    counted = scrape(metrics)
    assert counted["shadow_requests_total", labelled(status="ok")] == 1
    assert counted["rows_predicted_total", labelled()] == 0
    assert not [name for name, _ in counted if name == "requests_total"]
    assert metrics.samples()[0].requests_per_second == 0


def test_the_state_of_replicas_and_tables_is_read_when_it_is_scraped() -> None:
    follower = SetLag(seconds=0.25, step=900, sequence=45, event_time=1_700_000_123, connected=False)
    in_flight = 4
    metrics = ServingMetrics(
        repository(replica(follower=follower, tables=("user", "item")), replica(version=4)),
        now=Clock(1_600_000_000.0),
        in_flight=lambda: in_flight,
    )
    counted = scrape(metrics)
    assert counted["lag_seconds", labelled()] == 0.25
    assert counted["applied_step", labelled()] == 900
    assert counted["applied_sequence", labelled()] == 45
    assert counted["applied_event_time_seconds", labelled()] == 1_700_000_123
    assert counted["connected", labelled()] == 0
    assert counted["missing_changes", labelled()] == 0
    assert ("lag_seconds", labelled(version="4")) not in counted, "it follows nothing"
    assert counted["default_version", labelled()] == 0
    assert counted["default_version", labelled(version="4")] == 1
    assert counted["table_rows", labelled(table="item")] == 1
    assert counted["table_bytes", labelled(table="user")] > 0
    assert counted["requests_in_flight", ()] == 4
    assert counted["start_time_seconds", ()] == 1_600_000_000
    follower.fields |= {"seconds": 7.5, "missing": "run /runs/clicks: no answer, and there is no such folder here"}
    assert scrape(metrics)["missing_changes", labelled()] == 1
    assert scrape(metrics)["lag_seconds", labelled()] == 7.5


def test_a_replica_that_cannot_be_measured_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SetLag):
        def lag(self) -> Lag:
            raise UnavailableError("shard 2 does not answer")

    metrics = ServingMetrics(repository(replica(follower=Broken()), replica(version=4, follower=SetLag())))
    counted = scrape(metrics)
    assert ("lag_seconds", labelled()) not in counted
    assert counted["lag_seconds", labelled(version="4")] == 0.05
    assert "shard 2 does not answer" in caplog.text


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = ServingMetrics(repository(replica())), ServingMetrics(repository(replica()))
    one.answered(answer())
    assert scrape(one)["requests_total", labelled(protocol="grpc", status="ok")] == 1
    assert not [name for name, _ in scrape(other) if name == "requests_total"]


def test_other_parts_of_the_server_add_their_metrics() -> None:
    core = pytest.importorskip("prometheus_client.metrics_core")

    class Rollout:
        def collect(self) -> Iterator[object]:
            yield core.GaugeMetricFamily("monolith_rollout_share", "Share of requests", 0.25)

    metrics = ServingMetrics()
    metrics.collectors.append(Rollout())
    assert scrape(metrics)["monolith_rollout_share", ()] == 0.25
