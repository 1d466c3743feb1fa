"""How a server listens: over plain sockets, or over Arrow Flight, which can encrypt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from monolith.errors import ConfigError
from monolith.transport.frame_calls import FrameCalls
from monolith.transport.stream_pool import Transport

__all__ = ["Service", "StreamLimits", "start_service"]


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """What clients may ask of a service. The fields of `ListenConfig` explain them."""

    max_streams: int
    max_message_bytes: int
    idle_secs: float
    min_bytes_per_sec: int


class Service(Protocol):
    """Something that listens, hands frames to `FrameCalls.answer` and sends the answers back."""

    port: int

    def shutdown(self) -> None:
        """Stop listening, send the answers that are on their way, wait until every stream has ended."""


def start_service(
    calls: FrameCalls,
    *,
    transport: Transport | None,
    host: str,
    port: int,
    certificate: tuple[bytes, bytes] | None,
    token: str | None,
    limits: StreamLimits,
) -> Service:
    """Listen; `transport` None takes Flight where there is a certificate, and sockets otherwise."""
    if (transport or ("socket" if certificate is None else "flight")) == "socket":
        from monolith.transport.socket_service import SocketService

        if certificate is not None:
            raise ConfigError(
                "transport: plain sockets cannot encrypt; leave out transport='socket', or tls_cert and tls_key"
            )
        return SocketService(calls, host=host, port=port, token=token, limits=limits)
    from monolith.transport.flight_service import FlightService

    flight: Service = FlightService(
        calls, host=host, port=port, certificate=certificate, token=token, max_streams=limits.max_streams
    )
    return flight
