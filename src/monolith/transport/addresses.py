"""Addresses of servers: host:port."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from monolith.errors import InvalidArgumentError

__all__ = ["Address", "connect", "distinct_addresses"]


def _host_and_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or "/" in address or not address.isprintable():
        raise ValueError("expected host:port")
    return address


Address = Annotated[str, Field(max_length=512), AfterValidator(_host_and_port)]
"""host:port, as a field of a message."""


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connect over TCP. Raises `OSError`, also for a `host` that cannot be a name."""
    try:
        return socket.create_connection((host, port), timeout)
    except UnicodeError as error:
        # Python encodes a name before it resolves it, which fails for "node..local" and for labels above 63 characters.
        raise OSError(f"{host!r} is not the name of a host: {error}") from None


def distinct_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return `addresses` as a tuple. Raises `InvalidArgumentError` unless each is host:port and none is repeated.

    Example:
        >>> distinct_addresses(["10.0.0.1:7100", "10.0.0.2:7100"])
        ('10.0.0.1:7100', '10.0.0.2:7100')
    """
    if isinstance(addresses, str) or not addresses:
        raise InvalidArgumentError(f"addresses: expected a list of host:port, got {addresses!r}")
    for address in addresses:
        try:
            _host_and_port(address)
        except ValueError:
            raise InvalidArgumentError(f"addresses: expected host:port, got {address!r}") from None
    if len(set(addresses)) != len(addresses):
        raise InvalidArgumentError(f"addresses: expected each server once, got {', '.join(addresses)}")
    return tuple(addresses)
