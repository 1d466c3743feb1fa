"""Danger: a server that runs for months, or a client that makes up names, fills the memory with counters."""

from __future__ import annotations

import threading

from monolith.serve.metrics import ServingMetrics
from page_replicas import Clock, answer, replica, repository


def test_an_hour_of_samples_is_kept() -> None:
    clock = Clock()
    metrics = ServingMetrics(clock=clock, now=clock)
    for _ in range(4000):
        clock.now += 1
        metrics.tick()
    assert len(metrics.samples()) == 3600
    assert metrics.samples()[-1].time == clock.now


def test_names_that_clients_make_up_become_no_metrics() -> None:
    metrics = ServingMetrics(repository(replica()))
    for number in range(5000):
        metrics.answered(answer(model=f"model-{number}", version=0, status="invalid"))
        metrics.answered(answer(version=number + 1000, status="invalid"))
    metrics.answered(answer())
    counted = {key: totals.requests for key, totals in metrics.totals().items()}
    assert counted == {("unknown", 0): 5000, ("clicks", 0): 5000, ("clicks", 3): 1}


def test_versions_that_came_and_went_are_forgotten_and_counted() -> None:
    clock, served = Clock(), repository(replica(version=1))
    metrics = ServingMetrics(served, clock=clock, now=clock)
    for version in range(2, 301):
        served.add(replica(version=version))
        metrics.answered(answer(version=version))
        metrics.answered(answer(version=1))
        served.remove("clicks", version)
        clock.now += 1
        metrics.tick()
    versions = {version for _, version in metrics.totals()}
    assert versions == {1, *range(46, 301)}, "the least recently used went first"
    assert b"monolith_serving_dropped_series_total 44.0" in metrics.exposition()[0]


def test_latencies_of_a_busy_second_are_bounded() -> None:
    clock = Clock()
    metrics = ServingMetrics(repository(replica()), clock=clock, now=clock)
    for number in range(20_000):
        metrics.answered(answer(seconds=1.0 if number < 10_000 else 0.5))
    clock.now += 1
    assert len(metrics._second.latencies) == 4096
    metrics.tick()
    assert metrics.samples()[0].requests_per_second == 20_000
    assert metrics.samples()[0].latency_p50_seconds == 0.5, "the newest are kept"


def test_no_answer_of_several_threads_is_lost() -> None:
    metrics = ServingMetrics(repository(replica()))
    stop = threading.Event()

    def count() -> None:
        for _ in range(2000):
            metrics.answered(answer())

    def read() -> None:
        while not stop.is_set():
            metrics.exposition()
            metrics.tick()
            metrics.totals()

    reader = threading.Thread(target=read)
    reader.start()
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert metrics.totals()["clicks", 3].requests == 8000
