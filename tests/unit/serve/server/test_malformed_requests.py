"""Danger: a malformed request that ends the server, takes its memory, or is answered as if it were another."""

from __future__ import annotations

import http.client
import json
import re
import socket
from typing import Any

import pytest

from monolith.serve.replica import Replica
from monolith.serve.server.model_server import ModelServer
from served_models import ServeSums


def post(
    address: str, body: bytes, headers: dict[str, str] | None = None, *, model: str = "sums"
) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers or {})
        response = connection.getresponse()
        return response.status, response.headers.get("monolith-error", ""), json.loads(response.read())["error"]
    finally:
        connection.close()


def tensor(name: str, /, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"name": name, "datatype": "FP32", "shape": [1], "data": [1.0], **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datatype": "FP31"}, r"inputs\['a'\].datatype: expected one of BOOL, .*, got 'FP31'"),
        ({"datatype": None}, r"inputs\['a'\].datatype: expected one of"),
        ({"shape": [2]}, r"inputs\['a'\].data: expected 2 elements for \[2\], got 1 elements"),
        ({"shape": [-1]}, r"inputs\['a'\].shape: expected whole numbers >= 0, got \[-1\]"),
        ({"shape": [True]}, r"inputs\['a'\].shape: expected whole numbers"),
        ({"shape": []}, r"inputs\['a'\].shape: expected 1 to 8 sizes"),
        ({"shape": [1] * 9}, r"inputs\['a'\].shape: expected 1 to 8 sizes"),
        ({"shape": "1"}, r"inputs\['a'\].shape: expected 1 to 8 sizes"),
        ({"data": ["x"]}, r"inputs\['a'\].data: expected numbers for FP32"),
        ({"data": [[1.0], 2.0]}, r"inputs\['a'\].data: expected lists of the same length"),
        ({"data": None}, r"inputs\['a'\].data: expected a list, got NoneType"),
        ({"data": [None]}, r"inputs\['a'\].data: expected numbers for FP32, got other values"),
        ({"datatype": "INT64", "data": [1]}, r"inputs\['a'\]: expected FP32 \[rows\], got INT64 \[1\]"),
        ({"shape": [1, 1]}, r"inputs\['a'\]: expected FP32 \[rows\], got FP32 \[1, 1\]"),
        ({"datatype": "INT8", "data": [128]}, r"INT8 is from -128 to 127, got 128"),
        ({"datatype": "BOOL", "data": [1]}, r"inputs\['a'\].data: expected true or false for BOOL"),
        ({"name": "other"}, r"inputs\['a'\]: expected FP32 \[rows\], but it is missing; got 'other', 'b'"),
        ({"name": "b"}, r"inputs\['b'\]: is given twice"),
        ({"name": 7}, r"inputs: expected objects with a name"),
        ({"parameters": 7}, r"inputs\['a'\].parameters: expected an object"),
        ({"parameters": {"binary_data_size": 4}}, r"binary_data_size: expected up to 0, the bytes that are left, got 4"),
        ({"parameters": {"shared_memory_region": "x"}}, r"this server has no shared memory"),
        ({"shape": [2], "data": [1, 2]}, r"batch\['b'\]: expected 2 rows as in batch\['a'\], got 1"),
        ({"data": [1e300]}, r"inputs\['a'\].data: a number is too large for FP32"),
    ],
)  # fmt: skip
def test_an_error_names_the_input_and_what_was_expected(
    serve_sums: ServeSums, changes: dict[str, Any], message: str
) -> None:
    server, _ = serve_sums()
    status, kind, error = post(
        server.http_address, json.dumps({"inputs": [tensor("a", **changes), tensor("b")]}).encode()
    )
    assert status == 400
    assert kind in ("InvalidArgumentError", "ProtocolError")
    assert re.search(message, error), error


def test_a_dense_column_cannot_be_ragged(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    splits = {"name": "a.splits", "datatype": "INT64", "shape": [2], "data": [0, 1]}
    body = json.dumps({"inputs": [tensor("a"), splits, tensor("b")]}).encode()
    status, _, error = post(server.http_address, body)
    assert (status, error) == (400, "inputs['a']: expected FP32 [rows], got FP32 [1] and 'a.splits'")


def test_rows_without_data_cannot_be_without_number(clicks: tuple[ModelServer, Replica]) -> None:
    server, _ = clicks
    ids = [{"name": name, "datatype": "INT64", "shape": [2**39, 0], "data": []} for name in ("user", "item", "tags")]
    status, _, error = post(server.http_address, json.dumps({"inputs": ids}).encode(), model="clicks")
    assert (status, error) == (400, "inputs['user']: expected at most 65,536 rows, got 549,755,813,888")


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"", {}, 400, "JSON: "),
        (b"[" * 60_000, {}, 400, "JSON: "),
        (b"\xff{}", {}, 400, "JSON: "),
        (b"[]", {}, 400, "JSON: expected an object, got list"),
        (b'{"inputs": 7}', {}, 400, "inputs: expected a list"),
        (b'{"id": 7}', {}, 400, "id: expected a string"),
        (b'{"parameters": {"topk": 7}}', {}, 400, "parameters['topk']: is not known; did you mean 'top_k'?"),
        (b'{"parameters": {"top_k": "7"}}', {}, 400, "parameters['top_k']: expected int, got '7'"),
        (b"{}", {"Inference-Header-Content-Length": "3"}, 400, "expected a number up to 2"),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, 400, "expected a number up to 2"),
        (b"{}x", {"Inference-Header-Content-Length": "2"}, 400, "body: 1 bytes are left"),
        (b"{}", {"Content-Encoding": "gzip"}, 400, "content-encoding: expected none, got 'gzip'"),
        (b'{"inputs": []}' + b" " * 2**16, {}, 413, "JSON: expected at most 65,536 bytes"),
    ],
)
def test_a_request_that_cannot_be_read_gets_a_typed_answer(
    serve_sums: ServeSums, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    server, _ = serve_sums(max_json_bytes=2**16)
    got, _, error = post(server.http_address, body, headers)
    assert (got, message in error) == (status, True), error


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(max_message_bytes=2**20)
    host, _, port = server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sent:
        sent.sendall(b"POST /v2/models/sums/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
        assert sent.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_stated_length_is_cut_off(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(max_message_bytes=2**16)
    host, _, port = server.http_address.rpartition(":")
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sent:
        sent.sendall(
            b"POST /v2/models/sums/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + 3 * chunk
        )
        assert sent.recv(100).startswith(b"HTTP/1.1 413 ")


def test_headers_without_end_are_cut_off(serve_sums: ServeSums) -> None:
    server, client = serve_sums()
    host, _, port = server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sent:
        sent.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert sent.recv(100).startswith(b"HTTP/1.1 431 ")
    assert client.live()


def test_a_misspelt_input_and_texts_say_what_to_do(clicks: tuple[ModelServer, Replica]) -> None:
    server, _ = clicks
    given = [{"name": name, "datatype": "INT64", "shape": [1], "data": [7]} for name in ("usr", "item", "tags")]
    _, _, error = post(server.http_address, json.dumps({"inputs": given}).encode(), model="clicks")
    assert error.startswith("inputs['user']: expected INT64")
    assert error.endswith("but it is missing; you sent 'usr'; call it 'user'")
    text = {"name": "user", "datatype": "BYTES", "shape": [1], "data": ["ann"]}
    _, _, error = post(server.http_address, json.dumps({"inputs": [text, *given[1:]]}).encode(), model="clicks")
    assert "got BYTES; convert texts to ids: monolith.features.hash_strings, or its formula in docs/formats.md" in error
