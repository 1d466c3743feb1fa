"""Danger: a machine looks for ZooKeeper at addresses of the family it does not speak, or without its credentials."""

from __future__ import annotations

import socket

import pytest

from monolith.cluster import default_zk_servers, get_zk_auth_data, is_ipv6_only

HOSTS = {"MONOLITH_ZK_HOSTS": "10.0.0.1, 10.0.0.2,", "MONOLITH_ZK_HOSTS_IPV6": "2001:db8::1,[2001:db8::2]"}
IPV4 = "10.0.0.1:2181,10.0.0.2:2181"
IPV6 = "[2001:db8::1]:2181,[2001:db8::2]:2181"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MY_HOST_IP": "10.0.0.7"}, False),
        ({"MY_POD_IP": "10.0.0.7", "MY_HOST_IPV6": "2001:db8::7"}, False),
        ({"MY_HOST_IPV6": "2001:db8::7"}, True),
        ({"MY_HOST_IPV6": "2001:db8::7", "MY_HOST_IP": ""}, True),
    ],
)
def test_what_the_platform_says_decides(environ: dict[str, str], expected: bool) -> None:
    assert is_ipv6_only(environ) is expected
    assert default_zk_servers(environ=HOSTS | environ) == (IPV6 if expected else IPV4)
    assert default_zk_servers(use_ipv6=True, environ=HOSTS | environ) == IPV6


def test_elsewhere_the_machines_own_name_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", {"box": "10.0.0.7"}.__getitem__)
    assert not is_ipv6_only({})

    def unknown(name: str) -> str:
        raise socket.gaierror(name)

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert is_ipv6_only({})


@pytest.mark.parametrize("use_ipv6", [False, True])
def test_without_a_list_there_is_no_server(use_ipv6: bool) -> None:
    assert default_zk_servers(use_ipv6, {"MY_HOST_IP": "10.0.0.7"}) == ""


def test_credentials_are_a_digest_or_none() -> None:
    assert get_zk_auth_data({"ZK_AUTH": "me:secret"}) == [("digest", "me:secret")]
    assert get_zk_auth_data({"ZK_AUTH": ""}) is None
    assert get_zk_auth_data({}) is None
