"""Danger: an error that shows a client the inside of the server: paths, code, values of variables."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from monolith.errors import InvalidArgumentError, ServerError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.transport.errors import encode_error
from monolith.transport.frames import Frame
from monolith.transport.link import Transport

SECRET = "Traceback (most recent call last)"


def fail(*arguments: object, **options: object) -> object:
    raise ZeroDivisionError("first line\nsecond line")


@pytest.mark.parametrize("transport", ["socket", "flight"])
def test_a_fault_of_the_server_is_told_in_a_line_and_logged_in_full(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ParameterServer(ServerConfig(transport=transport)) as server,
        ServerStore([server.address], config=ClientConfig(transport=transport)) as store,
    ):
        server._calls._handlers[Call.STATS] = fail  # type: ignore[assignment]
        with pytest.raises(
            ServerError, match="the server failed: ZeroDivisionError: first line; its log has more"
        ) as caught:
            store.stats()
    assert "second line" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert any(record.exc_info for record in caplog.records if record.levelno >= logging.ERROR)


def test_an_error_that_quotes_a_traceback_is_cut_before_it() -> None:
    told = encode_error(InvalidArgumentError(f"a source failed: {SECRET}:\n  File secret.py"))
    assert told.message == "a source failed: "
    assert len(encode_error(ValueError("x" * 10_000)).message) < 1000


@pytest.mark.parametrize("broken", ["answer", "answer_health_only"])
def test_flight_sends_no_traceback_of_its_own(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ParameterServer(ServerConfig(transport="flight")) as server:
        monkeypatch.setattr(server._calls, broken, fail)
        client = flight.connect(f"grpc://{server.address}")
        told = []
        for ask in (
            lambda: list(client.do_action(flight.Action("health", b"x"))),
            lambda: list(client.list_flights()),
            lambda: list(client.list_actions()),
            lambda: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
            lambda: client.do_get(flight.Ticket(b"x")),
            lambda: exchange(client),
        ):
            try:
                ask()
            except pa.ArrowException as error:
                told.append(str(error))
        client.close()
    assert len(told) >= 5
    assert not any(word in text for text in told for word in (SECRET, "File ", ".py", "second line"))
    assert "ZeroDivisionError" in caplog.text


def exchange(client: flight.FlightClient) -> Frame:
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"monolith"))
    try:
        writer.write_metadata(b"no frame")
        return reader.read_chunk()
    finally:
        reader.cancel()
