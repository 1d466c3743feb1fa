"""Danger: a server of HTTP/2 that only understands the client it was written with. Here it is asked by the package `h2`."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from grpc_messages import INFER, infer_message, predictions
from served_models import ServeSums
from tls import TOKEN, certificate  # noqa: F401 - a fixture

HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": INFER,
    ":authority": "a",
    "content-type": "application/grpc",
    "te": "trailers",
}


class Call:
    """What has come of an answer."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.reset: int | None = None
        self.is_over = False

    @property
    def message(self) -> bytes:
        assert len(self.body) == 5 + int.from_bytes(self.body[1:5])
        return self.body[5:]


class H2Client:
    """One connection, of which every frame is checked by `h2`."""

    def __init__(self, address: str, settings: dict[int, int] | None = None, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            assert self._socket.selected_alpn_protocol() == "h2"  # type: ignore[attr-defined]
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        if settings:
            self.state.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self.state.initiate_connection()
        self.calls: dict[int, Call] = {}
        self.closed = False
        self.gone: int | None = None
        """The error of the server's GOAWAY."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def flush(self) -> None:
        self._socket.sendall(self.state.data_to_send())

    def begin(self, **headers: str) -> int:
        stream: int = self.state.get_next_available_stream_id()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.state.send_headers(stream, list((HEADERS | named).items()))
        self.calls[stream] = Call()
        self.flush()
        return stream

    def send(self, stream: int, message: bytes) -> None:
        """Send a message in as many frames as the windows of the server ask for."""
        left = b"\0" + len(message).to_bytes(4) + message
        while left:
            size = min(self.state.local_flow_control_window(stream), self.state.max_outbound_frame_size, len(left))
            if size == 0:
                self.receive()
                continue
            self.state.send_data(stream, left[:size], end_stream=size == len(left))
            left = left[size:]
            self.flush()

    def receive(self) -> None:
        data = self._socket.recv(1 << 16)
        self.closed = not data
        for event in self.state.receive_data(data):
            call = self.calls.get(getattr(event, "stream_id", 0), Call())
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    call.headers |= dict(event.headers)
                case h2.events.DataReceived():
                    call.body += event.data
                    self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    call.is_over = True
                case h2.events.StreamReset():
                    call.reset = event.error_code
                case h2.events.ConnectionTerminated():
                    self.gone = event.error_code
        self.flush()

    def answer(self, stream: int) -> Call:
        call = self.calls[stream]
        while not call.is_over and call.reset is None:
            assert not self.closed
            self.receive()
        return call

    def ask(self, message: bytes, **headers: str) -> Call:
        stream = self.begin(**headers)
        self.send(stream, message)
        return self.answer(stream)


SMALL = {
    h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 500,
    h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0,
    h2.settings.SettingCodes.ENABLE_PUSH: 0,
}


@pytest.mark.parametrize("settings", [None, SMALL])
def test_small_and_large_calls_one_after_the_other(serve_sums: ServeSums, settings: dict[int, int] | None) -> None:
    server, _ = serve_sums()
    with H2Client(server.grpc_address, settings) as client:
        for rows in (1, 3, 1000, 65_536 if settings is None else 20_000, 1):
            call = client.ask(infer_message(*[float(rows)] * rows))
            assert call.headers == {
                ":status": "200",
                "content-type": "application/grpc",
                "grpc-accept-encoding": "identity, deflate, gzip",
                "grpc-status": "0",
            }
            assert predictions(call.message) == [2.0 * rows] * rows


def test_calls_that_are_sent_in_turns(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with H2Client(server.grpc_address) as client:
        streams = [client.begin() for _ in range(20)]
        for number, stream in reversed(list(enumerate(streams))):
            client.send(stream, infer_message(float(number)))
        found = [predictions(client.answer(stream).message) for stream in streams]
    assert found == [[2.0 * number] for number in range(20)]


def test_failures_have_text_that_is_read_back(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with H2Client(server.grpc_address) as client:
        call = client.ask(infer_message(1.0, model="ä 100%"))
        assert call.headers["grpc-status"] == "5"
        assert call.headers["grpc-message"].startswith("model '%C3%A4 100%25'")
        assert call.body == b""
        assert client.ask(b"", content_type="text/plain").headers[":status"] == "415"
        client.state.ping(b"12345678")
        client.flush()
        assert client.ask(infer_message(1.0)).headers["grpc-status"] == "0"
        client.state.reset_stream(client.begin(), 8)
        client.flush()
        assert client.ask(infer_message(1.0)).headers["grpc-status"] == "0"


def test_tls_has_the_protocol_that_it_says(serve_sums: ServeSums, certificate: tuple[Path, Path]) -> None:  # noqa: F811
    cert, key = certificate
    server, _ = serve_sums(token=TOKEN, tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=str(cert))
    context.set_alpn_protocols(["h2", "http/1.1"])
    with H2Client(server.grpc_address, tls=context) as client:
        assert client.ask(infer_message(1.0)).headers["grpc-status"] == "16"
        assert predictions(client.ask(infer_message(1.0), authorization=f"Bearer {TOKEN}").message) == [2.0]
        assert client.ask(infer_message(1.0), authorization="Bearer \xe4").headers["grpc-status"] == "16"


def test_a_server_that_stops_says_so(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    with H2Client(server.grpc_address) as client:
        client.ask(infer_message(1.0))
        assert server.close()
        while not client.closed:
            client.receive()
        assert client.gone == 0


def test_what_is_not_http2_is_told_and_closed(serve_sums: ServeSums) -> None:
    server, _ = serve_sums()
    host, _, port = server.grpc_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        received = b""
        while part := plain.recv(1 << 16):
            received += part
    assert b"expected the preface of HTTP/2" in received
