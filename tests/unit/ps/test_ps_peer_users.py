"""Danger: a Unix socket whose other end belongs to another user of the machine, who then reads memory or gets rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from monolith.ps import ParameterServer, ServerStore
from monolith.testing.servers import free_ports
from monolith.transport.framed_socket import FramedSocket, hello, local_name
from monolith.transport.sockets import connect_nearby
from real_servers import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
NOBODY = 65534
as_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to be another user")

CONNECT = r"""
import os, socket, sys
os.setuid(int(sys.argv[2]))
client = socket.socket(socket.AF_UNIX)
client.settimeout(30)
client.connect(chr(0) + sys.argv[1])
try:
    client.sendall(bytes.fromhex(sys.argv[3]))
    print("got", client.recv(8))
except ConnectionError:
    print("got", b"")
"""
LISTEN = r"""
import os, socket, sys
os.setuid(int(sys.argv[2]))
server = socket.socket(socket.AF_UNIX)
server.bind(chr(0) + sys.argv[1])
server.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def command(code: str, name: str, *, uid: int) -> list[str]:
    return [sys.executable, "-IS", "-c", code, name.removeprefix("\0"), str(uid), hello(None).hex()]


@as_root
def test_a_server_turns_other_users_away(caplog: pytest.LogCaptureFixture) -> None:
    with ParameterServer() as server:
        name = local_name("127.0.0.1", server.port)
        assert name is not None
        for uid, answer in ((0, "MOPS"), (NOBODY, "got b''")):
            run = command(CONNECT, name, uid=uid)
            told = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
            assert answer in told
        assert f"refused a connection from a process of user {NOBODY}" in caplog.text
        with ServerStore([server.address]) as store:
            assert store.stats() == {}


@as_root
def test_a_client_does_not_talk_to_another_user_who_took_the_name_of_its_server() -> None:
    (port,) = free_ports(1)
    name = local_name("127.0.0.1", port)
    assert name is not None
    with subprocess.Popen(
        command(LISTEN, name, uid=NOBODY), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline().strip() == "listening"
        assert connect_nearby("127.0.0.1", port) is None
        squatter.communicate(timeout=60)


def test_a_process_of_an_unknown_user_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ParameterServer() as server:
        monkeypatch.setattr(FramedSocket, "peer_uid", property(lambda self: os.geteuid() + 4242))
        host, _, port = server.address.rpartition(":")
        local = connect_nearby(host, int(port))
        assert local is not None
        local.settimeout(30)
        assert local.recv(1) == b""
        local.close()
        until(lambda: "refused a connection" in caplog.text)


def test_root_and_the_same_user_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for uid in (0, os.geteuid(), None):
        with monkeypatch.context() as patched, ParameterServer() as server:
            patched.setattr(FramedSocket, "peer_uid", property(lambda self, uid=uid: uid))
            with ServerStore([server.address]) as store:
                assert store.stats() == {}
