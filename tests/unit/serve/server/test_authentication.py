"""Danger: a model, or an operator's route, that anybody on the network can use."""

from __future__ import annotations

import base64
import http.client
import ssl
from pathlib import Path

import grpc
import pytest

from monolith.errors import AuthenticationError, ConfigError, UnavailableError
from monolith.proto import open_inference_pb2 as messages
from monolith.serve import Client
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from served_models import ServeSums, columns
from tls import TOKEN, certificate  # noqa: F401 - a fixture


def get(address: str, path: str, method: str = "GET", **headers: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


async def ok(request: HttpRequest) -> HttpResponse:
    return HttpResponse(body=b"ok")


ROUTES = (
    HttpRoute(method="GET", path="/seen", handler=ok),
    HttpRoute(method="GET", path="/open", handler=ok, is_public=True),
    HttpRoute(method="POST", path="/change", handler=ok, needs_token=True),
)


def test_without_the_token_only_health_is_answered(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(token=TOKEN, extra_routes=ROUTES)
    address = server.http_address
    for path in ("/v2/health/live", "/v2/health/ready", "/open"):
        assert get(address, path) == 200
    for path in ("/v2", "/v2/models", "/v2/models/sums", "/v2/models/sums/ready", "/seen"):
        assert get(address, path) == 401
        assert get(address, path, Authorization=f"Bearer {TOKEN}x") == 401
        assert get(address, path, Authorization=f"Bearer {TOKEN}") == 200
    assert get(address, "/change", "POST") == 401
    assert get(address, "/change", "POST", Authorization=f"Bearer {TOKEN}") == 200
    with Client(address, model="sums") as stranger, pytest.raises(AuthenticationError, match="expected the token"):
        stranger.infer(columns(1.0))
    with Client(address, model="sums", token=TOKEN) as friend:
        assert friend.infer(columns(1.0))["sum"].tolist() == [2.0]


def test_a_password_of_a_browser_can_read_but_change_nothing(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(token=TOKEN, extra_routes=ROUTES)
    basic = "Basic " + base64.b64encode(f"operator:{TOKEN}".encode()).decode()
    assert get(server.http_address, "/seen", Authorization=basic) == 200
    assert get(server.http_address, "/change", "POST", Authorization=basic) == 401
    assert get(server.http_address, "/seen", Authorization="Basic !!!") == 401


def test_a_server_without_a_token_refuses_to_change_anything(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(extra_routes=ROUTES)
    assert get(server.http_address, "/seen") == 200
    assert get(server.http_address, "/change", "POST") == 401
    assert get(server.http_address, "/change") == 405
    assert get(server.http_address, "/other") == 404


def test_grpc_needs_the_token_too(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(token=TOKEN)
    with grpc.insecure_channel(server.grpc_address) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert messages.ServerLiveResponse.FromString(live(b"", timeout=20)).live
        metadata = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        with pytest.raises(grpc.RpcError) as refused:
            metadata(b"", timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert metadata(b"", timeout=20, metadata=[("authorization", f"Bearer {TOKEN}")])


def test_tls_of_both_protocols(serve_sums: ServeSums, certificate: tuple[Path, Path]) -> None:  # noqa: F811
    cert, key = certificate
    server, _ = serve_sums(token=TOKEN, tls_cert=cert, tls_key=key)
    with Client(f"https://{server.http_address}", model="sums", token=TOKEN, tls_root_certs=cert) as client:
        assert client.infer(columns(1.0))["sum"].tolist() == [2.0]
    with (
        Client(f"https://{server.http_address}", model="sums", token=TOKEN) as client,
        pytest.raises(UnavailableError, match="is tls_root_certs the CA of the server"),
    ):
        client.infer(columns(1.0))
    credentials = grpc.ssl_channel_credentials(cert.read_bytes())
    with grpc.secure_channel(server.grpc_address, credentials) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert messages.ServerLiveResponse.FromString(live(b"", timeout=20)).live
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        get(server.http_address, "/v2/health/live")


def test_a_public_address_needs_tls_and_a_token(serve_sums: ServeSums) -> None:
    with pytest.raises(ConfigError, match=r"ServingConfig.host: '0.0.0.0' can be reached from other machines"):
        serve_sums(host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"ServingConfig.token: expected at least 16 ASCII characters"):
        serve_sums(token="short")
    assert TOKEN not in repr(ServingConfig(token=TOKEN))
