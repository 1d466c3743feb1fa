"""Danger: an invisible registration counts as successful, or an unavailable Consul blocks a process forever.

Against a small HTTP server of ours that speaks as much of Consul as these faults need; the rest is tested with a real agent.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from monolith.cluster import ConsulServiceDiscovery
from monolith.errors import DiscoveryError
from monolith.testing.servers import free_ports


class SmallConsul(ThreadingHTTPServer):
    """Takes registrations, and shows none of them: as a blacklisted host finds it. Answers `status` if that is not 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.requests: list[str] = []
        self.services: dict[str, object] = {}


class Handler(BaseHTTPRequestHandler):
    server: SmallConsul

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if path == "/v1/agent/service/register":
            service = json.loads(body)
            self.server.services[service["id"]] = service
        if path.startswith("/v1/agent/service/deregister/"):
            self.server.services.pop(path.rsplit("/", 1)[1])
        reply = json.dumps(self.server.services if path == "/v1/agent/services" else []).encode()
        self.send_response(self.server.status)
        self.send_header("X-Consul-Index", "1")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_GET = do_PUT = answer  # noqa: N815 - the names http.server looks for


@pytest.fixture
def server() -> Iterator[SmallConsul]:
    with SmallConsul() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Time:
    def __init__(self) -> None:
        self.now, self.naps = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps.append(seconds)


def discovery(port: int, time: Time) -> ConsulServiceDiscovery:
    return ConsulServiceDiscovery(
        "job", address=f"127.0.0.1:{port}", clock=lambda: time.now, sleep=time.sleep, uniform=lambda low, high: high
    )


def test_a_host_that_consul_hides_is_told_so_after_three_minutes(server: SmallConsul) -> None:
    time = Time()
    with discovery(server.server_port, time) as here:
        with pytest.raises(OSError, match=r"ps 0 at h0:1 .* 180 seconds; is this host blacklisted"):
            here.register("ps", 0, "h0:1")
        assert 175 < time.now <= 180
        assert max(time.naps) == 3.0
        assert here.query("ps") == {}
        assert here._own == {}


def test_a_refusal_is_an_error_at_once(server: SmallConsul) -> None:
    time = Time()
    server.status = 500
    with discovery(server.server_port, time) as here:
        with pytest.raises(DiscoveryError, match="refused: 500"):
            here.register("ps", 0, "h0:1")
        with pytest.raises(DiscoveryError, match="refused: 500"):
            here.query("ps")
    assert time.naps == []


def test_an_agent_that_is_away_is_tried_five_times(server: SmallConsul) -> None:
    time = Time()
    [port] = free_ports(1)
    with discovery(port, time) as here:
        with pytest.raises(OSError, match=f"127.0.0.1:{port} does not answer"):
            here.query("ps")
        assert time.naps == [5.0] * 4
        with pytest.raises(DiscoveryError, match="does not answer"):
            here.register("ps", 0, "h0:1")


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "127.0.0.1:8500"),
        ({"CONSUL_HTTP_HOST": "192.0.2.7", "CONSUL_HTTP_PORT": "2280"}, "192.0.2.7:2280"),
        ({"TCE_HOST_IP": "192.0.2.8"}, "192.0.2.8:8500"),
        ({"CONSUL_HTTP_HOST": "192.0.2.7", "TCE_HOST_IP": "192.0.2.8"}, "192.0.2.7:8500"),
        ({"CONSUL_HTTP_ADDR": "http://192.0.2.9:99", "CONSUL_HTTP_HOST": "192.0.2.7"}, "192.0.2.9:99"),
    ],
)
def test_the_environment_says_where_the_agent_is(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], address: str
) -> None:
    for name in ("CONSUL_HTTP_ADDR", "CONSUL_HTTP_HOST", "CONSUL_HTTP_PORT", "TCE_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with ConsulServiceDiscovery("job") as here:
        assert here._agent.address == address
