"""Servers that are started again where they were."""

from __future__ import annotations

import time

from monolith.errors import UnavailableError
from monolith.ps import ParameterServer, ServerConfig

__all__ = ["started_again"]


def started_again(config: ServerConfig) -> ParameterServer:
    """A server, on the port of one that has ended once nobody else, by chance, has it for a connection of its own."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return ParameterServer(config)
        except UnavailableError:
            assert time.monotonic() < deadline, f"port {config.port} is taken"
            time.sleep(0.05)
