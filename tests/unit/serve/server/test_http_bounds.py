"""Danger: a client that takes memory or connections by what it leaves out: the end of a head, of a body, or reading."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept_transport import Transport
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.http import HttpResponse
from monolith.serve.server.http_connection import (
    HEAD_SECONDS,
    IDLE_SECONDS,
    MAX_HEAD_BYTES,
    HttpConnection,
    IncomingRequest,
    OpenConnections,
)

POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"


class Application:
    """Keeps requests until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[IncomingRequest] = []

    def refusal(self, request: IncomingRequest) -> HttpResponse | None:
        return HttpResponse(status=401) if request.url == b"/secret" else None

    def answer(self, request: IncomingRequest) -> None:
        self.asked.append(request)


class Served:
    """Connections without a network."""

    def __init__(self, **config: float) -> None:
        self.application = Application()
        self.shared = OpenConnections(application=self.application, config=ServingConfig(**config))  # type: ignore[arg-type]

    def connect(self) -> tuple[HttpConnection, Transport]:
        connection, transport = HttpConnection(self.shared), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport


def far(seconds: float) -> float:
    return time.monotonic() + seconds + 1


def test_a_connection_that_says_nothing_is_closed() -> None:
    served = Served()
    connection, transport = served.connect()
    connection.expire(far(HEAD_SECONDS) - 3)
    assert transport.state == "open"
    connection.expire(far(HEAD_SECONDS))
    assert transport.state == "aborted"


def test_a_head_that_does_not_end_is_closed_and_a_body_that_does_not_is_told() -> None:
    served = Served(deadline_secs=5.0)
    connection, transport = served.connect()
    connection.data_received(b"POST / HTTP/1.1\r\nHost")
    connection.expire(far(HEAD_SECONDS))
    assert transport.state == "aborted"
    connection, transport = served.connect()
    connection.data_received((POST % (10, b""))[:-1] + b"\n12345")
    connection.expire(far(5.0))
    assert (transport.statuses, transport.state) == ([504], "half closed")
    assert served.shared.held == 0


def test_one_that_is_answered_may_be_idle_for_longer_and_then_goes() -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(POST % (1, b"1"))
    connection.expire(far(10 * IDLE_SECONDS))
    assert transport.state == "open", "the answer takes so long, not the client"
    served.application.asked[0].respond(HttpResponse())
    connection.expire(far(IDLE_SECONDS) - 3)
    assert transport.state == "open"
    connection.expire(far(IDLE_SECONDS))
    assert transport.state == "aborted"


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: ",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nTrailer: ",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;extension=",
    ],
)
def test_what_the_parser_holds_is_bounded(start: bytes) -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(start)
    for _ in range(MAX_HEAD_BYTES // 1000 + 1):
        connection.data_received(b"x" * 1000)
    assert transport.statuses == [431]
    assert served.shared.held == 0


def test_a_long_body_before_a_short_head_is_no_long_head() -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(POST % (2 * MAX_HEAD_BYTES, b"x" * 2 * MAX_HEAD_BYTES) + b"GET / HTTP/1.1\r\n")
    connection.data_received(b"Host: x\r\n\r\n")
    for _ in range(2):
        served.application.asked[-1].respond(HttpResponse())
    assert transport.statuses == [200, 200]


def test_a_client_that_does_not_read_is_not_read_either() -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(2 * (POST % (1, b"1")))
    connection.pause_writing()
    assert transport.paused
    served.application.asked[0].respond(HttpResponse())
    assert len(served.application.asked) == 1, "the second has to wait until the client reads"
    connection.resume_writing()
    assert len(served.application.asked) == 2
    assert not transport.paused
    connection.pause_writing()
    connection.expire(far(IDLE_SECONDS))
    assert transport.state == "aborted"


def test_all_clients_together_cannot_fill_the_memory_and_what_they_held_is_free_again() -> None:
    served = Served(max_message_bytes=4096)
    half = POST % (4096, b"x" * 4000)
    connections = [served.connect() for _ in range(6)]
    for connection, _ in connections:
        connection.data_received(half)
    assert [transport.statuses for _, transport in connections] == [[], [], [], [], [503], [503]]
    assert served.shared.held == 4 * 4000
    for connection, _ in connections:
        connection.connection_lost(None)
    assert (served.shared.held, served.shared.open) == (0, set())


def test_requests_of_a_lost_connection_are_abandoned() -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(2 * (POST % (1, b"1")))
    connection.connection_lost(None)
    (asked,) = served.application.asked
    assert asked.is_abandoned
    asked.respond(HttpResponse())
    assert transport.sent == b""


def test_the_body_of_a_refused_request_is_not_kept() -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(b"POST /secret HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n" + b"x" * 10_000)
    assert (served.shared.held, transport.statuses) == (0, [])
    connection.data_received(b"x" * 10_000)
    assert (transport.statuses, transport.state) == ([401], "open")


def test_connections_beyond_the_limit_are_refused_and_do_not_pile_up() -> None:
    served = Served(max_connections=1)
    served.connect()
    connection, transport = served.connect()
    connection.data_received(POST % (1, b"1"))
    assert (transport.statuses, transport.state) == ([503], "half closed")
    states = [served.connect()[1].state for _ in range(200)]
    assert (states.count("open"), states.count("aborted")) == (127, 73)


def test_an_answer_that_cannot_be_sent_is_an_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    served = Served()
    connection, transport = served.connect()
    connection.data_received(POST % (1, b"1"))
    served.application.asked[0].respond(HttpResponse(headers={"x": "1\r\nset-cookie: evil"}))
    assert transport.statuses == [500]
    assert b"evil" not in transport.sent
    assert "a name or value has a line end" in caplog.text


class Echo(Application):
    """Answers each request with its body at once."""

    def answer(self, request: IncomingRequest) -> None:
        request.respond(HttpResponse(body=request.url + b" " + request.body))


@given(
    bodies=st.lists(st.binary(max_size=80), min_size=1, max_size=6), cuts=st.lists(st.integers(0, 2000), max_size=12)
)
def test_answers_do_not_depend_on_how_the_bytes_arrive(bodies: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(
        b"POST /%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%s0\r\n\r\n"
        % (number, b"".join(b"1\r\n%c\r\n" % byte for byte in body))
        if number % 2
        else b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (number, len(body), body)
        for number, body in enumerate(bodies)
    )
    shared = OpenConnections(application=Echo(), config=ServingConfig())
    connection, transport = HttpConnection(shared), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    ends = [*sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        connection.data_received(sent[begin:end])
    answers = transport.sent
    for number, body in enumerate(bodies):
        head, _, answers = answers.partition(b"\r\n\r\n")
        wanted = b"/%d %s" % (number, body)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-length: %d" % len(wanted) in head
        assert answers.startswith(wanted)
        answers = answers[len(wanted) :]
    assert answers == b""
    assert shared.held == 0
