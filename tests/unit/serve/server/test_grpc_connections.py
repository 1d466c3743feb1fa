"""Danger: a connection of gRPC that outlives its client, or an answer that goes to a client that has left."""

from __future__ import annotations

import time

from h2.config import H2Configuration
from h2.connection import H2Connection

from kept_transport import Transport
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.failures import RequestFailure
from monolith.serve.server.grpc_connection import (
    STALL_SECONDS,
    GrpcConnection,
    IncomingCall,
    OpenGrpcConnections,
)
from monolith.serve.server.listener import LINGER_SECONDS

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/s/m"),
    (":authority", "a"),
    ("content-type", "application/grpc"),
]


class Application:
    """Keeps calls until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[IncomingCall] = []

    def answer(self, call: IncomingCall) -> None:
        self.asked.append(call)


class Served:
    """Connections without a network, each with a client that has sent one call."""

    def __init__(self, **config: float) -> None:
        self.application = Application()
        self.shared = OpenGrpcConnections(
            application=self.application,
            config=ServingConfig(**config),  # type: ignore[arg-type]
        )

    def connect(self) -> tuple[GrpcConnection, Transport]:
        connection, transport = self.shared.accept(), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    def call(self, *, is_whole: bool = True) -> tuple[GrpcConnection, Transport]:
        connection, transport = self.connect()
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(1, HEADERS)
        if is_whole:
            client.send_data(1, b"\0\0\0\0\1m", end_stream=True)
        connection.data_received(client.data_to_send())
        return connection, transport


def far(seconds: float) -> float:
    return time.monotonic() + seconds + 1


def test_a_call_is_busy_until_it_is_answered_once() -> None:
    served = Served()
    connection, transport = served.call()
    (call,) = served.application.asked
    assert (call.path, call.message, call.metadata) == ("/s/m", b"m", {"content-type": "application/grpc"})
    assert connection.is_busy
    assert not call.is_abandoned
    call.respond(b"the answer")
    sent = transport.sent
    assert b"the answer" in sent
    assert not connection.is_busy
    call.respond(b"another")
    call.respond(RequestFailure(500, "INTERNAL", "error", "MonolithError", "too late"))
    assert transport.sent == sent


def test_an_answer_to_a_client_that_has_left_is_dropped() -> None:
    served = Served()
    connection, transport = served.call()
    connection.connection_lost(None)
    assert not served.shared.open
    (call,) = served.application.asked
    assert call.is_abandoned
    sent = transport.sent
    call.respond(b"the answer")
    assert transport.sent == sent
    assert served.shared.memory.held == 0
    connection.expire(far(1e6))
    connection.stop()


def test_a_client_that_does_not_read_is_not_read_either_and_given_up() -> None:
    served = Served()
    connection, transport = served.call()
    connection.pause_writing()
    assert transport.paused
    connection.expire(far(STALL_SECONDS) - 3)
    assert transport.state == "open"
    connection.resume_writing()
    assert not transport.paused
    connection.expire(far(STALL_SECONDS))
    assert transport.state == "open"
    connection.pause_writing()
    connection.expire(far(STALL_SECONDS))
    assert transport.state == "aborted"


def test_a_request_that_does_not_end_is_told_and_its_memory_is_free() -> None:
    served = Served(deadline_secs=5.0)
    connection, transport = served.call(is_whole=False)
    assert connection.is_busy
    connection.expire(far(5.0))
    assert b"the deadline of the request was exceeded before all of it had come" in transport.sent
    assert not connection.is_busy
    assert served.shared.memory.held == 0


def test_a_client_that_breaks_the_protocol_is_told_and_closed() -> None:
    served = Served()
    connection, transport = served.call()
    connection.data_received(b"\0\0\0\4\0\0\0\0\1")  # settings of a stream
    assert b"a frame" in transport.sent
    assert transport.state == "half closed"
    sent = transport.sent
    connection.data_received(b"more")
    served.application.asked[0].respond(b"the answer")
    connection.expire(far(LINGER_SECONDS) - 3)
    assert (transport.sent, transport.state) == (sent, "half closed")
    connection.expire(far(LINGER_SECONDS))
    assert transport.state == "aborted"


def test_connections_beyond_the_limit_are_closed() -> None:
    served = Served(max_connections=1)
    connection, transport = served.call()
    _, excess = served.connect()
    assert excess.state == "closed"
    assert transport.state == "open"
    connection.connection_lost(None)
    assert served.connect()[1].state == "open"


def test_a_connection_that_stops_ends_with_its_last_call() -> None:
    served = Served()
    idle, busy = served.connect(), served.call()
    served.shared.stop()
    assert (idle[1].state, busy[1].state) == ("closed", "open")
    served.application.asked[0].respond(b"the answer")
    assert b"the answer" in busy[1].sent
    assert busy[1].state == "closed"
