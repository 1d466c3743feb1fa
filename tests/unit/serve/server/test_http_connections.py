"""Danger: a client that does more of HTTP than ours, and gets another request's answer, half of one, or none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse

import pytest

from monolith.serve.server.model_server import ModelServer
from served_models import ServeSums, sum_replica
from tls import TOKEN

HOST = b"Host: x\r\n"


def request(value: float, *, headers: bytes = b"", rows: int = 1) -> bytes:
    tensors = [{"name": name, "datatype": "FP32", "shape": [rows], "data": [value] * rows} for name in ("a", "b")]
    body = json.dumps({"inputs": tensors}).encode()
    head = b"POST /v2/models/sums/infer HTTP/1.1\r\n" + HOST + headers
    return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connection:
    """A connection without an HTTP client, which would not send what the tests send."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self._stream = opened.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
        # All of one buffer: what follows the answer belongs to the next one.
        response = HTTPResponse(_Shared(self._stream), method=method)  # type: ignore[arg-type]
        response.begin()
        return response.status, {key.lower(): value for key, value in response.headers.items()}, response.read()

    def sums(self) -> list[float]:
        status, _, body = self.answer()
        assert status == 200, body
        found: list[float] = json.loads(body)["outputs"][0]["data"]
        return found

    def rest(self) -> bytes:
        return self._stream.read()


class _Shared:
    """A socket whose file stays open."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def makefile(self, mode: str) -> object:
        return _Unclosed(self._stream)


class _Unclosed:
    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def close(self) -> None:
        pass

    def flush(self) -> None:
        pass


@contextmanager
def connected(server: ModelServer) -> Iterator[Connection]:
    host, _, port = server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as opened:
        yield Connection(opened)


def test_a_request_may_come_byte_by_byte(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with connected(server) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(2):
            for byte in request(1.0 + number):
                client.send(bytes([byte]))
            assert client.sums() == [2.0 + 2 * number]


def test_pipelined_requests_are_answered_in_their_order(serve_sums: ServeSums) -> None:
    gate = threading.Event()
    gate.set()
    replica = sum_replica(gate=gate)
    server, _ = serve_sums(replica)
    for _ in range(3):
        assert replica.predictor.entered.acquire(timeout=20)  # type: ignore[attr-defined]
    gate.clear()
    with connected(server) as client:
        # The first is large, so another thread predicts it while the second could be answered at once.
        client.send(request(1.0, rows=20_000) + request(2.0) + b"GET /v2/health/live HTTP/1.1\r\n" + HOST + b"\r\n")
        assert replica.predictor.entered.acquire(timeout=20)  # type: ignore[attr-defined]
        gate.set()
        assert client.sums() == [2.0] * 20_000
        assert client.sums() == [4.0]
        assert client.answer("GET")[2] == b'{"live":true}'


def test_many_small_requests_in_one_packet_are_all_answered(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with connected(server) as client, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.send, b"".join(request(float(number)) for number in range(300)))
        assert [client.sums() for _ in range(300)] == [[2.0 * number] for number in range(300)]
        sending.result()


def test_a_chunked_body_is_a_body(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    head, _, body = request(3.0).partition(b"\r\n\r\n")
    head = head.rpartition(b"\r\n")[0] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:1], body[1:50], body[50:]))
    with connected(server) as client:
        client.send(head + chunks + b"0\r\nX-Trailer: ignored\r\n\r\n" + request(4.0))
        assert (client.sums(), client.sums()) == ([6.0], [8.0])


def test_a_client_that_waits_to_be_asked_for_the_body_is_asked(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    head, _, body = request(3.0, headers=b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with connected(server) as client:
        client.send(request(1.0) + head + b"\r\n\r\n")
        assert client.sums() == [2.0]
        assert client._stream.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert client._stream.readline() == b"\r\n"
        client.send(body)
        assert client.sums() == [6.0]


@pytest.mark.parametrize(("length", "status"), [(9_999_999_999, 413), (100, 401)])
def test_one_that_is_refused_is_not_asked_for_its_body(serve_sums: ServeSums, length: int, status: int) -> None:
    server, _ = serve_sums(token=TOKEN)
    head = b"POST /v2/models/sums/infer HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\n"
    with connected(server) as client:
        client.send(head + f"Content-Length: {length}\r\n\r\n".encode())
        got, headers, _ = client.answer()
        assert (got, headers["connection"]) == (status, "close")
        assert client.rest() == b""


def test_the_answer_to_head_has_no_body_and_the_connection_goes_on(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with connected(server) as client:
        client.send(b"HEAD /v2/models/sums HTTP/1.1\r\n" + HOST + b"\r\n")
        status, headers, body = client.answer("HEAD")
        assert (status, body) == (200, b"")
        client.send(b"GET /v2/models/sums HTTP/1.1\r\n" + HOST + b"\r\n")
        assert len(client.answer("GET")[2]) == int(headers["content-length"])


@pytest.mark.parametrize(("version", "header"), [(b"1.1", b"Connection: close\r\n"), (b"1.0", b"")])
def test_a_client_that_wants_one_answer_gets_one(serve_sums: ServeSums, version: bytes, header: bytes) -> None:
    server, _ = serve_sums()
    with connected(server) as client:
        live = b"GET /v2/health/live HTTP/" + version + b"\r\n" + HOST + header + b"\r\n"
        client.send(live + live)
        assert client.answer("GET")[1]["connection"] == "close"
        assert client.rest() == b""


def test_a_client_that_closes_its_side_still_gets_its_answer(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with connected(server) as client:
        client.send(request(1.0, rows=20_000))
        client.socket.shutdown(socket.SHUT_WR)
        assert client.sums() == [2.0] * 20_000
        assert client.rest() == b""


def test_a_client_that_offers_another_protocol_is_answered_in_this_one(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with connected(server) as client:
        client.send(b"GET /v2/health/live HTTP/1.1\r\n" + HOST + offer + b"\r\n" + request(5.0))
        assert client.answer("GET")[0] == 200
        assert client.sums() == [10.0]
        client.send(request(5.0, headers=offer))
        assert client.answer()[0] == 400, "its body could be read as another request"
        assert client.rest() == b""


def test_what_is_no_http_is_answered_after_what_is(serve_sums: ServeSums) -> None:
    server, client = serve_sums()
    with connected(server) as raw:
        raw.send(request(1.0) + b"\x16\x03\x01 this is TLS, for example\r\n\r\n" + request(2.0))
        assert raw.sums() == [2.0]
        status, headers, body = raw.answer()
        assert (status, headers["connection"], headers["monolith-error"]) == (400, "close", "ProtocolError")
        assert b"HTTP: " in body
        assert raw.rest() == b""
    assert client.live()


def test_paths_and_queries_are_decoded(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(sum_replica(name="a model"))
    with connected(server) as client:
        for path, status in (
            (b"/v2/models/a%20model/ready", 200),
            (b"http://x/v2/models/a%20model/ready?verbose=1", 200),
            (b"/v2/models/other/ready", 503),
            (b"/%FF?" + b"&".join(b"a=1" for _ in range(200)), 400),
        ):
            client.send(b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n")
            assert client.answer("GET")[0] == status
