"""How trainers and data workers talk to the servers of a data service."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from monolith.config import Config, Positive
from monolith.dataservice.messages import DataCall
from monolith.errors import ConfigError, ProtocolError
from monolith.transport.frames import Frame
from monolith.transport.link import Link, Transport
from monolith.transport.server import read_pem
from monolith.transport.tokens import Token, reveal

__all__ = ["DataClientConfig", "Nothing", "ask", "link_to", "told"]

Told = TypeVar("Told", bound=Config)


class Nothing(Config):
    """The text of a call without arguments, or of an answer that has none."""


class DataClientConfig(Config):
    """How to reach a data service.

    Example:
        >>> DataClientConfig(timeout=10).worker_timeout
        5.0
    """

    timeout: Positive = 30.0
    """Seconds a call to the dispatcher may take, retries included, and in which some data worker must be found."""
    worker_timeout: Positive = 5.0
    """Seconds without an answer after which another data worker is asked; they answer within one, ready or not."""
    token: Token = None
    """What the servers ask for."""
    tls_root_certs: Path | None = None
    """PEM of whom the servers' certificates are signed by; None: no TLS."""
    transport: Transport | None = None
    """How frames travel: "socket" or "flight"; None: Flight with TLS, sockets without."""


def link_to(address: str, config: DataClientConfig, *, timeout: float, max_streams: int = 4) -> Link:
    """The way to a server."""
    certificates = None if config.tls_root_certs is None else read_pem(config.tls_root_certs, "tls_root_certs")
    return Link(
        address,
        timeout=timeout,
        token=reveal(config.token),
        tls_root_certs=certificates,
        max_streams=max_streams,
        transport=config.transport,
    )


def ask(link: Link, call: DataCall, request: Config, answer: type[Told]) -> Told:
    """What the server says to one request."""
    return told(link.call(call, request.model_dump_json()), answer, link.address)


def told(frame: Frame, answer: type[Told], address: str) -> Told:
    """The text of an answer as what it must be."""
    try:
        return answer.from_json(frame.text)
    except ConfigError as error:
        raise ProtocolError(f"the server at {address} sent an answer that cannot be read: {error}") from None
