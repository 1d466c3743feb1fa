"""Danger: a server that has ended and still holds its address, so that its successor cannot begin."""

from __future__ import annotations

import socket
import threading

import pytest

from monolith.ps import ParameterServer, ServerConfig
from monolith.testing.servers import free_ports
from monolith.transport.sockets import SocketService


def test_a_server_has_ended_when_nobody_accepts_connections_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # As long as a thread is inside the kernel's accept, the address is taken.
    go_on, accept = threading.Event(), SocketService._accept

    def lingering(self: SocketService, listener: socket.socket) -> None:
        accept(self, listener)
        assert go_on.wait(60)

    monkeypatch.setattr(SocketService, "_accept", lingering)
    server = ParameterServer()
    assert not server.close(grace=0.1)
    go_on.set()
    assert server.close(grace=60)


def test_servers_follow_each_other_at_one_address() -> None:
    config = ServerConfig(port=free_ports(1)[0])
    for _ in range(30):
        assert ParameterServer(config).close(grace=60)
