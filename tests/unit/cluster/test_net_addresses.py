"""Danger: an address is put together or taken apart wrongly, so that a process announces or calls one that does not exist."""

from __future__ import annotations

import socket

import pytest

from monolith import InvalidArgumentError
from monolith.cluster import (
    AddressFamily,
    concat_ip_and_port,
    get_local_ip,
    get_local_server_addr,
    is_ipv4_supported,
    is_ipv6_address,
    split_address,
)


@pytest.mark.parametrize(
    ("ip", "address"),
    [("1.2.3.4", "1.2.3.4:10"), ("localhost", "localhost:10"), ("::1", "[::1]:10"), ("fe80::1", "[fe80::1]:10")],
)
def test_only_ipv6_addresses_get_brackets_and_all_come_back(ip: str, address: str) -> None:
    assert concat_ip_and_port(ip, 10) == address
    assert split_address(address) == (ip, 10)
    assert is_ipv6_address(ip) == ("[" in address)


@pytest.mark.parametrize(
    "wrong",
    ["", "host", "host:", ":1", "host:http", "host:-1", "host:65536", "host:٣", "::1", "::1:10", "[::1]", "[host]:1",
     "[::1:10", "a b:1", "a,b:1", "host/path:1", "[]:1", "host: 1", "host:1\n"],
)  # fmt: skip
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected host:port"):
        split_address(wrong)


def resolver(answers: dict[int, list[str] | None], name: str = "box") -> object:
    """A getaddrinfo that knows these addresses of `name` by family."""

    def getaddrinfo(host: str, port: object, family: int = 0) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = answers.get(family) if host == name else None
        if found is None:
            raise socket.gaierror("unknown")
        return [(family, 0, 0, "", (address, 0)) for address in found]

    return getaddrinfo


@pytest.fixture(autouse=True)
def _name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")


def test_the_first_address_of_the_machines_name_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver({0: ["192.0.2.7", "192.0.2.8"]}))
    assert get_local_ip() == "192.0.2.7"
    assert get_local_server_addr(80) == "192.0.2.7:80"
    assert is_ipv4_supported()


def test_a_machine_known_only_by_ipv6_is_found_by_asking_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver({socket.AF_INET6: ["2001:db8::7"]}))
    assert get_local_server_addr(80) == "[2001:db8::7]:80"
    assert not is_ipv4_supported()


def test_a_machine_whose_bare_name_nobody_knows_is_asked_for_as_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver({0: ["192.0.2.7"]}, "box.local"))
    assert get_local_ip() == "192.0.2.7"


def test_a_machine_without_an_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver({}))
    with pytest.raises(OSError, match="unknown"):
        get_local_ip()


def test_the_families_are_the_words_of_configurations() -> None:
    assert [str(family) for family in AddressFamily] == ["ipv4", "ipv6"]
