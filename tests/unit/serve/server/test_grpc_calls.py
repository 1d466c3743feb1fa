"""Danger: clients of gRPC that do what the usual request does not: compress, hurry, call often at once, ask wrongly."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from grpc_messages import INFER, infer_message, predictions
from monolith.errors import InvalidArgumentError, MessageTooLargeError, ProtocolError
from monolith.serve.server.grpc_app import inflated, timeout_of
from monolith.serve.server.model_server import ModelServer
from monolith.serve.server.routing import Answered
from served_models import ServeSums, sum_replica


class Seen:
    """Keeps what observers hear."""

    def __init__(self) -> None:
        self.answers: list[Answered] = []

    def answered(self, answered: Answered) -> None:
        self.answers.append(answered)


@pytest.fixture
def channel(serve_sums: ServeSums) -> Iterator[grpc.Channel]:
    server, _ = serve_sums(max_message_bytes=1 << 20)
    with grpc.insecure_channel(server.grpc_address, _large()) as channel:
        yield channel


def _large() -> list[tuple[str, int]]:
    return [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def refusal(channel: grpc.Channel, message: bytes = b"", path: str = INFER, **options: object) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(path)(message, timeout=20, **options)
    return refused.value.code().name, refused.value.details()


@pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]
)
@pytest.mark.parametrize("rows", [1, 65_536])
def test_messages_of_any_size_and_encoding_are_answered(
    channel: grpc.Channel, compression: grpc.Compression, rows: int
) -> None:
    answer = channel.unary_unary(INFER)(infer_message(*[1.5] * rows), timeout=20, compression=compression)
    assert predictions(answer) == [3.0] * rows


def test_many_calls_of_one_connection_get_their_own_answers(channel: grpc.Channel) -> None:
    calls = [channel.unary_unary(INFER).future(infer_message(float(number)), timeout=20) for number in range(100)]
    assert [predictions(call.result()) for call in calls] == [[2.0 * number] for number in range(100)]


def test_every_error_has_its_status(channel: grpc.Channel) -> None:
    assert refusal(channel, path="/inference.GRPCInferenceService/ModelTrain")[0] == "UNIMPLEMENTED"
    assert refusal(channel, path="/grpc.health.v1.Health/Check")[0] == "UNIMPLEMENTED"
    assert refusal(channel, b"\xff\xff")[0] == "INVALID_ARGUMENT"
    assert refusal(channel, b"\xff\xff", "/inference.GRPCInferenceService/ModelReady")[0] == "INVALID_ARGUMENT"
    assert refusal(channel, infer_message(1.0, model="nobody's ä"))[0] == "NOT_FOUND"
    status, text = refusal(channel, infer_message(*[1.0] * 200_000))
    assert status == "RESOURCE_EXHAUSTED"
    assert "expected at most 1048576 bytes, got 16" in text
    metadata = [("long", "x" * 20_000)]
    assert refusal(channel, infer_message(1.0), metadata=metadata)[0] == "RESOURCE_EXHAUSTED"
    assert predictions(channel.unary_unary(INFER)(infer_message(1.0), timeout=20)) == [2.0], (
        "the connection is still good"
    )


def test_a_message_that_is_too_large_when_it_is_read_is_refused(channel: grpc.Channel) -> None:
    large = infer_message(*[1.0] * 200_000)
    status, text = refusal(channel, large, compression=grpc.Compression.Gzip)
    assert (status, text) == ("RESOURCE_EXHAUSTED", "message: expected at most 1,048,576 bytes")


def test_observers_hear_of_answers_and_failures(serve_sums: ServeSums) -> None:
    seen = Seen()
    server, _ = serve_sums(observers=[seen], max_concurrency=1, max_queue=0)
    with grpc.insecure_channel(server.grpc_address) as channel:
        channel.unary_unary(INFER)(infer_message(1.0, 2.0, request_id="seven"), timeout=20)
        refusal(channel, b"\xff\xff")
        server.handler.admission.admit()
        refusal(channel, infer_message(1.0))
        server.handler.admission.leave()
    found = [(one.protocol, one.model, one.rows, one.request_id, one.status) for one in seen.answers]
    assert found == [
        ("grpc", "sums", 2, "seven", "ok"),
        ("grpc", "", 0, "", "invalid"),
        ("grpc", "sums", 0, "", "overloaded"),
    ]


def stuck_server(serve_sums: ServeSums, **options: object) -> tuple[ModelServer, threading.Event, threading.Semaphore]:
    """A server whose predictions wait for an event."""
    gate = threading.Event()
    gate.set()
    replica = sum_replica(gate=gate)
    server, _ = serve_sums(replica, **options)
    entered: threading.Semaphore = replica.predictor.entered  # type: ignore[attr-defined]
    for _ in range(3):
        assert entered.acquire(timeout=20)
    gate.clear()
    return server, gate, entered


def test_a_call_whose_deadline_is_over_is_not_predicted(serve_sums: ServeSums) -> None:
    replica = sum_replica()
    server, _ = serve_sums(replica)
    predicted = len(replica.predictor.rows)  # type: ignore[attr-defined]
    with grpc.insecure_channel(server.grpc_address) as channel:
        # Metadata instead of an option, so that the server and not the client notices.
        call = channel.unary_unary(INFER).future(infer_message(1.0), metadata=[("grpc-timeout", "1n")])
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "before it was predicted" in call.details()
    assert len(replica.predictor.rows) == predicted  # type: ignore[attr-defined]


def test_a_call_that_is_given_up_leaves_the_server_free(serve_sums: ServeSums) -> None:
    server, gate, entered = stuck_server(serve_sums, max_concurrency=1, max_queue=1)
    with grpc.insecure_channel(server.grpc_address) as channel:
        given_up = channel.unary_unary(INFER).future(infer_message(*[1.0] * 10_000), timeout=20)
        assert entered.acquire(timeout=20)
        given_up.cancel()
        gate.set()
        assert predictions(channel.unary_unary(INFER)(infer_message(1.0), timeout=20)) == [2.0]


def test_a_call_that_runs_when_the_server_stops_is_answered(serve_sums: ServeSums) -> None:
    server, gate, entered = stuck_server(serve_sums)
    with grpc.insecure_channel(server.grpc_address) as channel, ThreadPoolExecutor(1) as pool:
        running = channel.unary_unary(INFER).future(infer_message(*[1.0] * 10_000), timeout=20)
        assert entered.acquire(timeout=20)
        closed = pool.submit(server.close, grace=20.0)
        while not server.handler.admission.draining:
            threading.Event().wait(0.005)
        assert refusal(channel, infer_message(1.0))[0] == "UNAVAILABLE"
        gate.set()
        assert predictions(running.result()) == [2.0] * 10_000
        assert closed.result()
        assert refusal(channel, infer_message(1.0))[0] == "UNAVAILABLE"


def test_requests_are_joined_over_grpc_too(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(max_batch_rows=64, batch_wait_ms=5.0)
    with grpc.insecure_channel(server.grpc_address) as channel:
        calls = [channel.unary_unary(INFER).future(infer_message(float(number)), timeout=20) for number in range(20)]
        assert [predictions(call.result()) for call in calls] == [[2.0 * number] for number in range(20)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("3S", 3.0), ("99999999H", 99999999 * 3600.0), ("7u", 7e-6), ("0n", 0.0)]
)
def test_timeouts(text: str, seconds: float) -> None:
    assert timeout_of({"grpc-timeout": text}) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "S", "3", "3s", "-3S", "+3S", "3.5S", "123456789S", "\u0663S"])
def test_what_is_no_timeout_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="grpc-timeout: expected up to 8 digits"):
        timeout_of({"grpc-timeout": text})


def call_of(message: bytes, encoding: str | None) -> SimpleNamespace:
    metadata = {} if encoding is None else {"grpc-encoding": encoding}
    return SimpleNamespace(message=message, is_compressed=True, metadata=metadata)


def test_what_is_compressed_wrongly_is_refused() -> None:
    packed = zlib.compress(b"message" * 100)
    assert inflated(call_of(packed, "deflate"), 700) == b"message" * 100  # type: ignore[arg-type]
    with pytest.raises(MessageTooLargeError, match="expected at most 699 bytes"):
        inflated(call_of(packed, "deflate"), 699)  # type: ignore[arg-type]
    for message, encoding, expected in (
        (packed, "gzip", "is not compressed by gzip"),
        (packed[:-5], "deflate", "ends within what deflate has compressed"),
        (packed, "br", "expected one of gzip, deflate for a compressed message, got 'br'"),
        (packed, None, "expected one of gzip, deflate for a compressed message, got 'identity'"),
    ):
        with pytest.raises(ProtocolError, match=expected):
            inflated(call_of(message, encoding), 1000)  # type: ignore[arg-type]
