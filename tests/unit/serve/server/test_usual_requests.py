"""Danger: the core's readers of usual requests find something else than the readers of all requests, or accept too much."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError

from monolith._core import InferRequestReader, read_post
from monolith.errors import MonolithError
from monolith.proto import open_inference_pb2 as messages
from monolith.serve.server import protocol
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.grpc_messages import decode_message, read_infer_message
from monolith.serve.server.http import HttpResponse
from monolith.serve.server.http_connection import HttpConnection, IncomingRequest, OpenConnections
from monolith.serve.server.protocol import InferRequest, decode_infer

NAMES = ("user", "item", "a place")
Values = dict[str, Any]


class NoReader:
    """A core that leaves every request to the readers of all requests."""

    def json(self, *_: object) -> None:
        """Find nothing."""

    binary = message = json


def values_of(request: InferRequest) -> Values:
    """Everything that a request says, in a form that can be compared."""
    inputs = {
        name: (one.datatype, one.shape, torch.as_tensor(one.data).tolist()) for name, one in request.inputs.items()
    }
    return {
        "id": request.id,
        "parameters": dict(request.parameters),
        "inputs": inputs,
        "outputs": dict(request.outputs),
    }


def tensors(rows: int, **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    ids = np.random.default_rng(rows).integers(-(2**62), 2**62, (len(NAMES), rows))
    return [
        {"name": name, "datatype": "INT64", "shape": [rows], "data": column.tolist(), **more}
        for name, column in zip(NAMES, ids, strict=True)
    ]


def json_body(rows: int, **more: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"inputs": tensors(rows), **more}).encode()


def binary_body(rows: int, **more: Any) -> tuple[bytes, int]:  # noqa: ANN401
    head, data = [], b""
    for entry in tensors(rows):
        raw = np.array(entry.pop("data"), dtype=np.int64).tobytes()
        head.append({**entry, "parameters": {"binary_data_size": len(raw)}})
        data += raw
    text = json.dumps({"inputs": head, **more}).encode()
    return text + data, len(text)


def message_body(rows: int, *, raw: bool) -> bytes:
    message = messages.ModelInferRequest(model_name="sums", model_version="3", id="r-1")
    for entry in tensors(rows):
        one = message.inputs.add(name=entry["name"], datatype="INT64", shape=[rows])
        if raw:
            message.raw_input_contents.append(np.array(entry["data"], dtype=np.int64).tobytes())
        else:
            one.contents.int64_contents.extend(entry["data"])
    return message.SerializeToString()


def mutants(whole: bytes, count: int) -> list[bytes]:
    """`whole`, and versions of it with a few bytes changed, removed or repeated."""
    chance = random.Random(len(whole))
    found = [whole]
    for _ in range(count):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(changed))
            match chance.randrange(4):
                case 0:
                    changed[at] ^= 1 << chance.randrange(8)
                case 1:
                    changed[at] = chance.choice(b'0123456789"[]{},:-.eE tfn\\')
                case 2:
                    del changed[at : at + chance.randint(1, 4)]
                case _:
                    changed[at:at] = changed[at : at + chance.randint(1, 30)]
        found.append(bytes(changed))
    return found


def outcome(read: Callable[[], InferRequest]) -> Values | str:
    try:
        return values_of(read())
    except (MonolithError, DecodeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def without_core(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], InferRequest]], Values | str]:
    """Read a request without the core."""

    def read(call: Callable[[], InferRequest]) -> Values | str:
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "usual_reader", SimpleNamespace(core=NoReader()))
            return outcome(call)

    return read


@pytest.mark.parametrize("more", [{}, {"id": "r-7"}, {"parameters": {"timeout": 70, "route_key": "k"}}])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_json_and_tensors_behind_it(without_core: Any, rows: int, more: dict[str, Any]) -> None:  # noqa: ANN401
    reader, accepted = InferRequestReader(), 0
    assert reader.json(json_body(rows, **more)) is not None
    for body in mutants(json_body(rows, **more), 1500):
        if reader.json(body) is not None:
            accepted += 1
            read = lambda body=body: decode_infer(body, None, max_json_bytes=1 << 20)  # noqa: E731
            assert outcome(read) == without_core(read), body
    assert accepted > 30, "so few of the changed requests are accepted that the test says little"
    whole, size = binary_body(rows, **more)
    assert reader.binary(whole, size) is not None
    for head in mutants(whole[:size], 1500):
        body = head + whole[size:]
        if reader.binary(body, len(head)) is not None:
            length = str(len(head))
            read = lambda body=body, length=length: decode_infer(body, length, max_json_bytes=1 << 20)  # noqa: E731
            assert outcome(read) == without_core(read), body


@pytest.mark.parametrize("raw", [True, False])
def test_messages(without_core: Any, raw: bool) -> None:  # noqa: ANN401
    reader, accepted = InferRequestReader(), 0
    assert reader.message(message_body(3, raw=raw)) is not None
    for body in mutants(message_body(3, raw=raw), 3000):
        if reader.message(body) is None:
            continue
        accepted += 1
        usual = read_infer_message(body)
        whole = messages.ModelInferRequest.FromString(body)
        assert (usual.model_name, usual.model_version) == (whole.model_name, whole.model_version)
        assert values_of(usual.request) == without_core(lambda whole=whole: decode_message(whole)), body
    assert accepted > 100


def test_longer_json_than_is_allowed_is_refused_as_before() -> None:
    body, size = binary_body(2)
    for read in (
        lambda: decode_infer(json_body(2), None, max_json_bytes=100),
        lambda: decode_infer(body, str(size), max_json_bytes=100),
    ):
        assert str(outcome(read)).startswith("MessageTooLargeError: JSON: expected at most 100 bytes")


class Recorder:
    """An application that keeps its requests, and a transport that keeps nothing."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes, dict[str, str], bytes, bool]] = []
        self.written = b""

    def refusal(self, request: IncomingRequest) -> None:
        """Refuse nothing."""

    def answer(self, request: IncomingRequest) -> None:
        """Keep the request."""
        self.requests.append((request.method, request.url, request.headers, request.body, request.is_last))
        request.respond(HttpResponse(status=200))

    def write(self, data: bytes) -> None:
        """Keep what was answered."""
        self.written += data

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_: False


def received(data: bytes, pieces: int) -> tuple[object, bytes]:
    """Send `data` over a new connection, and return the requests that arrived, and the answers without their dates."""
    seen = Recorder()
    connection = HttpConnection(OpenConnections(application=seen, config=ServingConfig(), date=""))  # type: ignore[arg-type]
    connection.connection_made(seen)  # type: ignore[arg-type]
    step = -(-len(data) // pieces)
    for begin in range(0, len(data), step):
        connection.data_received(data[begin : begin + step])
    return seen.requests, seen.written


def test_heads_of_http() -> None:
    whole = (
        b"POST /v2/models/sums/infer HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\nConnection: keep-alive\r\n"
        b"X-Request_id: 7, 8\r\nContent-Length: 12\r\n\r\n{'inputs':1}"
    )
    assert read_post(whole) is not None
    accepted = 0
    for data in mutants(whole, 6000):
        if read_post(data) is not None:
            accepted += 1
            # In two pieces no request is whole when it is looked at, so llhttp reads it.
            assert received(data, 1) == received(data, 2), data
    assert accepted > 500


def test_a_request_after_a_part_of_another_is_not_read_by_itself() -> None:
    whole = b"POST /v2 HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
    begun = b"POST /v2 HTTP/1.1\r\nContent-Length: " + str(len(whole)).encode() + b"\r\n\r\n"
    seen = Recorder()
    connection = HttpConnection(OpenConnections(application=seen, config=ServingConfig(), date=""))  # type: ignore[arg-type]
    connection.connection_made(seen)  # type: ignore[arg-type]
    connection.data_received(begun)
    connection.data_received(whole)
    connection.data_received(whole)
    assert [body for _, _, _, body, _ in seen.requests] == [whole, b"{}"]


def test_other_threads_do_not_change_what_a_thread_reads() -> None:
    async def read_all() -> None:
        bodies = [json_body(rows) for rows in range(1, 9)]
        wanted = [outcome(lambda body=body: decode_infer(body, None, max_json_bytes=1 << 20)) for body in bodies]

        def read(number: int) -> bool:
            body = bodies[number % 8]
            return outcome(lambda: decode_infer(body, None, max_json_bytes=1 << 20)) == wanted[number % 8]

        assert all(await asyncio.gather(*(asyncio.to_thread(read, number) for number in range(200))))

    asyncio.run(read_all())
