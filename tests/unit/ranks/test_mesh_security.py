"""Danger: strangers in a run. Nobody without the token, of another time or with other intentions gets in, or stops a run."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from mesh_ranks import LIMITS, as_threads, in_folder, run_formed
from monolith.errors import AuthenticationError, ConfigError, RankLostError
from monolith.ranks import Kind, MeshConfig, SocketMesh, form_mesh, formation
from monolith.ranks.messages import (
    Formed,
    JoinCall,
    RankConnect,
    RankMember,
    RankRefused,
    read_message,
    receive_message,
    send_message,
)
from monolith.ranks.peers import Arrival, Gate, RankConnection, dial
from monolith.transport.framed_socket import hello
from monolith.transport.frames import encode
from tls import TOKEN

Certificate = tuple[Path, Path]


def large_exchange(mesh: SocketMesh) -> bool:
    for step in range(3):
        out = [[np.full(300_000 + r, mesh.rank)] for r in range(mesh.size)]
        got = mesh.exchange(Kind.ROWS, out, step=step)
        assert all((got[rank][0] == rank).all() for rank in range(mesh.size))
    return True


def with_tls(certificate: Certificate) -> dict[str, object]:
    cert, key = certificate
    return {"tls_cert": cert, "tls_key": key, "tls_root_certs": cert, "token": TOKEN, "within_host": False}


def test_ranks_exchange_over_tls(tmp_path: Path, certificate: Certificate) -> None:
    assert run_formed(tmp_path, 3, large_exchange, **with_tls(certificate)) == [True] * 3


def test_what_tls_carries_cannot_be_read_on_the_way(tmp_path: Path, certificate: Certificate) -> None:
    # The hello with the token is the first that is sent over every connection.
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def listen() -> None:
            connected, _ = listener.accept()
            with connected:
                seen.append(connected.recv(4096))

        def connect() -> None:
            config = MeshConfig(**LIMITS, **with_tls(certificate))
            gate = Gate(config)
            try:
                dial(address, config, gate.tls, deadline=formation.time.monotonic() + 5)
            finally:
                gate.close()

        results = as_threads([listen, connect])
    assert isinstance(results[1], OSError)
    assert seen[0][:1] == b"\x16"  # a TLS handshake
    assert TOKEN.encode() not in seen[0]


def test_a_certificate_of_somebody_else_is_refused(tmp_path: Path, certificate: Certificate) -> None:
    def form(rank: int, **more: object) -> SocketMesh:
        config = MeshConfig(**{**LIMITS, **with_tls(certificate), "formation_secs": 1.5, **more})
        return form_mesh(rank, 2, in_folder(tmp_path), config=config)

    # The certificate is of localhost and 127.0.0.1.
    results = as_threads([lambda: form(0, advertised_host="127.0.0.2", host="127.0.0.2"), lambda: form(1)])
    assert all(isinstance(result, RankLostError) for result in results), results
    assert "certificate" in str(results[1])


def test_a_plain_connection_to_ranks_with_tls_is_refused(tmp_path: Path, certificate: Certificate) -> None:
    def form(rank: int, **settings: object) -> SocketMesh:
        return form_mesh(
            rank, 2, in_folder(tmp_path), config=MeshConfig(**{**LIMITS, **settings, "formation_secs": 1.5})
        )

    plain = {"token": TOKEN, "within_host": False}
    results = as_threads([lambda: form(0, **with_tls(certificate)), lambda: form(1, **plain)])
    assert all(isinstance(result, RankLostError) for result in results), results


def test_an_address_that_others_reach_needs_tls_and_a_token(certificate: Certificate) -> None:
    cert, key = certificate
    for config in (
        MeshConfig(host="0.0.0.0"),
        MeshConfig(host="0.0.0.0", token=TOKEN),
        MeshConfig(host="0.0.0.0", tls_cert=cert, tls_key=key, tls_root_certs=cert),
    ):
        with pytest.raises(ConfigError, match=r"MeshConfig\.host: '0\.0\.0\.0' can be reached from other machines"):
            Gate(config)
    with pytest.raises(ConfigError, match=r"MeshConfig\.tls_root_certs: expected the CA bundle"):
        Gate(MeshConfig(host="0.0.0.0", token=TOKEN, tls_cert=cert, tls_key=key))


@pytest.mark.parametrize("within_host", [True, False])
def test_a_wrong_token_is_refused(tmp_path: Path, within_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formation, "LEADER_SECONDS", 0.2)

    def form(rank: int, token: str) -> SocketMesh:
        config = MeshConfig(**{**LIMITS, "formation_secs": 1.5}, token=token, within_host=within_host)
        return form_mesh(rank, 2, in_folder(tmp_path), config=config)

    leader, stranger = as_threads([lambda: form(0, TOKEN), lambda: form(1, f"{TOKEN}-but-wrong")])
    assert isinstance(stranger, AuthenticationError)
    assert isinstance(leader, RankLostError)


def test_strangers_do_not_disturb_a_formation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rendezvous, stop = in_folder(tmp_path), threading.Event()
    rubbish = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 300,
        hello(TOKEN) + struct.pack("<Q", 2**62),
        hello(TOKEN) + struct.pack("<Q", 64) + b"\0" * 64,
        hello(TOKEN)
        + (lambda frame: struct.pack("<Q", len(frame)) + frame.tobytes())(
            encode(call=1, request=1, text='{"rank": "one"}')
        ),
        b"",
    ]

    def disturb() -> bool:
        while not stop.is_set():
            address = rendezvous.find()
            for sent in rubbish if address is not None else ():
                host, _, port = str(address).rpartition(":")
                try:
                    with socket.create_connection((host, int(port)), 1.0) as stranger:
                        stranger.sendall(sent)
                except OSError:
                    pass
            stop.wait(0.02)
        return True

    def form(rank: int) -> bool:
        try:
            stop.wait(0.3 * rank)
            mesh = form_mesh(rank, 3, rendezvous, config=MeshConfig(**LIMITS, token=TOKEN))
            try:
                return large_exchange(mesh)
            finally:
                mesh.close()
        finally:
            if rank == 2:
                stop.set()

    assert as_threads([disturb, lambda: form(0), lambda: form(1), lambda: form(2)]) == [True] * 4
    assert "closed a connection that is not of a rank" in caplog.text
    assert TOKEN not in caplog.text


def test_a_connection_of_another_generation_is_refused(tmp_path: Path) -> None:
    def disturbed(mesh: SocketMesh) -> str:
        text = ""
        if mesh.rank == 0:
            deadline = formation.time.monotonic() + 10
            connection = dial(mesh.members[0].address, MeshConfig(**LIMITS), None, deadline=deadline)
            stale = RankConnect(generation=mesh.generation - 1, rank=1, channel=0)
            send_message(connection, JoinCall.CONNECT, stale, deadline=deadline)
            text = read_message(receive_message(connection, deadline=deadline), RankRefused).text
            connection.close()
        mesh.exchange(Kind.WORD, [[]] * mesh.size)
        return text

    first, _ = run_formed(tmp_path, 2, disturbed)
    assert first == "this generation of the run is complete; join it again"


def test_a_process_of_another_generation_does_not_get_into_one_that_is_formed() -> None:
    member = {"address": "127.0.0.1:1", "host": "a", "process": 1}
    formed = Formed(generation=5, members=[RankMember(rank=rank, incarnation=1, **member) for rank in range(2)])
    deadline = formation.time.monotonic() + 10
    sockets: dict[tuple[int, int], RankConnection] = {}
    for generation, answer in ((4, JoinCall.REFUSED), (5, JoinCall.CONNECTED)):
        here, there = map(RankConnection, socket.socketpair())
        message = RankConnect(generation=generation, rank=1, channel=0)
        send_message(there, JoinCall.CONNECT, message, deadline=deadline)
        formation._accept_peer(Arrival(here, receive_message(here, deadline=deadline)), formed, 0, sockets)
        frame = receive_message(there, deadline=deadline)
        assert frame.call == answer
        assert len(sockets) == generation - 4
        for connection in (here, there):
            connection.close()
