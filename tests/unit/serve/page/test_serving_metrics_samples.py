"""Danger: a page that shows rates over the wrong time, percentiles of the wrong requests, or a lag of nobody."""

from __future__ import annotations

import threading

import pytest

from monolith.serve.metrics import ServingMetrics
from page_replicas import Clock, SetLag, answer, replica, repository


def test_rates_are_over_the_time_that_really_passed() -> None:
    clock = Clock(100.0)
    metrics = ServingMetrics(repository(replica()), clock=clock, now=clock)
    for status in ("ok", "ok", "ok", "error", "deadline", "overloaded", "invalid", "ok"):
        metrics.answered(answer(status=status))
    clock.now += 2.0  # the thread came late
    metrics.tick()
    clock.now += 1.0
    metrics.tick()
    first, second = metrics.samples()
    assert (first.time, second.time) == (102.0, 103.0)
    assert (first.requests_per_second, first.errors_per_second, first.shed_per_second) == (4.0, 1.0, 0.5)
    assert (second.requests_per_second, second.latency_p50_seconds) == (0.0, None)
    assert metrics.samples(since=102.0) == [second]


def test_latencies_of_a_second_are_of_its_predictions_only() -> None:
    clock = Clock()
    metrics = ServingMetrics(repository(replica()), clock=clock, now=clock)
    for number in range(101):
        metrics.answered(answer(seconds=number / 1000))
    metrics.answered(answer(seconds=50.0, status="overloaded"))
    clock.now += 1
    metrics.tick()
    (sample,) = metrics.samples()
    assert sample.latency_p50_seconds == pytest.approx(0.050)
    assert sample.latency_p99_seconds == pytest.approx(0.099)
    totals = metrics.totals()["clicks", 3]
    assert totals.latency == pytest.approx({"p50": 0.05, "p90": 0.09, "p99": 0.099, "max": 0.1})
    assert totals.statuses == {"ok": 101, "overloaded": 1}


def test_the_lag_of_a_sample_is_that_of_the_default_version() -> None:
    clock, new = Clock(), SetLag(seconds=0.5)
    metrics = ServingMetrics(
        repository(replica(version=3, follower=SetLag(seconds=90.0)), replica(version=4, follower=new)), now=clock
    )
    for seconds in (0.5, 0.1, 0.3):
        new.fields["seconds"] = seconds
        metrics.tick()
    assert [sample.lag_seconds for sample in metrics.samples()] == [0.5, 0.1, 0.3]
    assert metrics.freshness("clicks", 4)["p50"] == 0.3
    assert metrics.freshness("clicks", 4)["max"] == 0.5
    assert metrics.freshness("clicks", 3)["p50"] == 90.0
    assert metrics.freshness("clicks", 9) == {}


def test_it_says_since_when_a_change_is_served() -> None:
    clock, follower = Clock(1000.0), SetLag(sequence=10)
    metrics = ServingMetrics(repository(replica(follower=follower)), now=clock)
    for sequence in (10, 10, 14, 14, 15):
        follower.fields["sequence"] = sequence
        metrics.tick()
        clock.now += 1
    assert metrics.served_since("clicks", 3, 10) == (1000.0, True), "it had it when it was first asked"
    assert metrics.served_since("clicks", 3, 11) == (1002.0, False)
    assert metrics.served_since("clicks", 3, 14) == (1002.0, False)
    assert metrics.served_since("clicks", 3, 15) == (1004.0, False)
    assert metrics.served_since("clicks", 3, 16) is None
    assert metrics.served_since("clicks", 9, 1) is None


def test_the_thread_takes_samples_until_it_is_closed() -> None:
    ticked = threading.Event()

    class Counted(ServingMetrics):
        def tick(self) -> None:
            super().tick()
            ticked.set()

    metrics = Counted(repository(replica()))
    metrics.start()
    metrics.start()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("serving-metrics") == 1
    assert ticked.wait(60)
    metrics.close()
    metrics.close()
    assert "serving-metrics" not in [thread.name for thread in threading.enumerate()]


def test_a_sample_that_fails_does_not_end_the_samples(caplog: pytest.LogCaptureFixture) -> None:
    calls, twice = 0, threading.Event()

    class Failing(ServingMetrics):
        def tick(self) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                twice.set()
            raise RuntimeError("out of luck")

    metrics = Failing()
    metrics.start()
    assert twice.wait(60)
    metrics.close()
    assert "out of luck" in caplog.text
