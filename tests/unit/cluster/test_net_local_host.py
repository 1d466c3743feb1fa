"""Danger: in a container a process announces the address of its own name, which cannot be reached from outside."""

from __future__ import annotations

import socket

import pytest

from monolith.cluster import get_local_host, get_local_ip
from monolith.errors import DiscoveryError


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({"YARN_INET_ADDR": "1.2.3.4"}, "1.2.3.4"),
        ({"CLOUDNATIVE_INET_ADDR": "1.2.3.4,5.6.7.8"}, "1.2.3.4"),
        ({"CLOUDNATIVE_INET_ADDR": "1.2.3.4", "YARN_INET_ADDR": "5.6.7.8"}, "1.2.3.4"),
        ({"CLOUDNATIVE_INET_ADDR": "2001:db8::7"}, "2001:db8::7"),
    ],
)
def test_what_the_scheduler_says_comes_first(environ: dict[str, str], host: str) -> None:
    assert get_local_host(environ) == host


def test_without_a_scheduler_it_is_the_machines_own() -> None:
    assert get_local_host({}) == get_local_ip()


def test_the_environment_of_the_process_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDNATIVE_INET_ADDR", raising=False)
    monkeypatch.setenv("YARN_INET_ADDR", "1.2.3.4")
    assert get_local_host() == "1.2.3.4"


@pytest.mark.parametrize("name", ["CLOUDNATIVE_INET_ADDR", "YARN_INET_ADDR"])
def test_an_empty_address_is_an_error_that_names_the_variable(name: str) -> None:
    with pytest.raises(DiscoveryError, match=name):
        get_local_host({name: ""})


def test_other_machines_cannot_reach_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian lets the name of a machine mean 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr("monolith.cluster.net._outgoing_ip", lambda: "10.0.0.7")
    assert get_local_ip() == "10.0.0.7"
    monkeypatch.setattr("monolith.cluster.net._outgoing_ip", lambda: None)
    assert get_local_ip() == "127.0.1.1", "a machine without a network has no other"
    found[0] = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.9", 0))
    monkeypatch.setattr("monolith.cluster.net._outgoing_ip", lambda: "10.0.0.7")
    assert get_local_ip() == "10.0.0.9", "what the name says comes first"
