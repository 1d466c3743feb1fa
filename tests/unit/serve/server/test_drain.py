"""Danger: a server that is stopped and takes requests down with it, or leaves threads behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from monolith.errors import UnavailableError
from served_models import ServeSums, columns, sum_replica


def test_running_requests_are_answered_and_new_ones_refused(serve_sums: ServeSums) -> None:
    gate = threading.Event()
    gate.set()
    replica = sum_replica(gate=gate)
    server, client = serve_sums(replica)
    for _ in range(3):
        assert replica.predictor.entered.acquire(timeout=20)  # type: ignore[attr-defined]
    gate.clear()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.infer, columns(*[1.0] * 20_000))
        assert replica.predictor.entered.acquire(timeout=20)  # type: ignore[attr-defined]
        closed = pool.submit(server.close, grace=20.0)
        while not server.handler.admission.draining:
            threading.Event().wait(0.005)
        assert not client.ready()
        with pytest.raises(UnavailableError, match="the server is stopping"):
            client.infer(columns(1.0))
        gate.set()
        assert len(running.result()["sum"]) == 20_000
        assert closed.result()


def test_no_thread_is_left(serve_sums: ServeSums) -> None:
    before = set(threading.enumerate())
    server, client = serve_sums()
    client.infer(columns(1.0))
    client.infer(columns(*[1.0] * 50_000))
    assert server.close()
    assert set(threading.enumerate()) - before == set()


def test_a_server_that_cannot_start_leaves_nothing_behind(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    port = int(server.http_address.rpartition(":")[2])
    before = set(threading.enumerate())
    with pytest.raises(OSError, match=rf"http_port: cannot listen on 127.0.0.1:{port}"):
        serve_sums(http_port=port)
    assert set(threading.enumerate()) == before
