"""Danger: memory that two processes see. Numbers that change after they were checked, answers that are overwritten, memory that
is not what it was said to be and takes the server with it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Lookup, TableRead
from monolith.ps.server.parameter_server import Dispatcher
from monolith.testing import sgd_table_config
from monolith.transport.calls import BasicCall
from monolith.transport.framed_socket import (
    SHARED_BYTES,
    FramedSocket,
    SharedMemory,
    hello,
    local_name,
    make_shared_memory,
)
from monolith.transport.frames import SHARED_FROM, Frame, decode, encode, own

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no memory of this kind")

SHARED, ROOM_COMES = 2**63, 2**62


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    near, far = socket.socketpair()
    client, server = FramedSocket(near, offers_memory=True), FramedSocket(far, accepts_memory=True)
    yield client, server
    client.close()
    server.close()


def data_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8)


@pytest.mark.parametrize("size", [SHARED_FROM, SHARED_FROM + 1, SHARED_BYTES])
def test_a_large_frame_is_read_where_it_was_written_in_both_directions(
    ends: tuple[FramedSocket, FramedSocket], size: int
) -> None:
    client, server = ends
    for turn in range(3):
        asked, answer = data_of(size, turn), data_of(size, 10 + turn)
        client.send_frame(asked[:100], asked[100:])
        got = server.receive_frame()
        assert server.shared is not None
        assert server.shared.is_incoming(got)
        assert np.array_equal(got, asked)
        server.send_frame(answer)
        back = client.receive_frame()
        assert client.shared is not None
        assert client.shared.is_incoming(back)
        assert np.array_equal(back, answer)


def test_small_and_huge_frames_go_through_the_socket(ends: tuple[FramedSocket, FramedSocket]) -> None:
    client, server = ends
    client.send_frame(data_of(SHARED_FROM - 1))
    assert len(server.receive_frame()) == SHARED_FROM - 1
    assert server.shared is None
    client.send_frame(data_of(SHARED_FROM))
    server.receive_frame()
    assert server.shared is not None
    huge = data_of(SHARED_BYTES + 1)
    sender = Thread(target=client.send_frame, args=(huge,))
    sender.start()
    got = server.receive_frame()
    sender.join()
    assert not server.shared.is_incoming(got)
    assert np.array_equal(got, huge)


def test_a_system_without_such_memory_uses_the_socket(
    ends: tuple[FramedSocket, FramedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError("not allowed here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    client, server = ends
    for _ in range(2):
        client.send_frame(data_of(SHARED_FROM))
        assert np.array_equal(server.receive_frame(), data_of(SHARED_FROM))
        assert server.shared is None


def test_whole_numbers_are_copied_before_they_are_checked_and_floats_only_where_they_are_read_once() -> None:
    seen: list[Frame] = []

    class Keeps(Dispatcher):
        def _answered(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
            seen.append(frame)
            return encode(call=frame.call, request=frame.request, text="{}")

    calls = Keeps()
    floats = np.ones(4, dtype=np.float32)
    for call in (Call.APPLY_GRADIENTS, Call.ASSIGN):
        data = encode(call=call, request=1, text="{}", arrays=[np.arange(4), floats])
        calls.answer(data, is_shared=True)
        data[:] = 0  # what a client could do meanwhile
        assert seen[-1].arrays[0].tolist() == [0, 1, 2, 3]
    assert [frame.arrays[1].tolist() for frame in seen] == [[0.0] * 4, [1.0] * 4]


def test_a_frame_of_ones_own_shares_nothing() -> None:
    data = encode(call=1, request=1, text="{}", arrays=[np.arange(4), np.ones(3, dtype=np.float32)])
    mine = own(decode(data), but_floats=False)
    assert not any(np.shares_memory(array, data) for array in mine.arrays)


def test_what_was_looked_up_stays_when_the_room_is_used_again() -> None:
    ids, rows = np.arange(20_000), torch.arange(80_000, dtype=torch.float32).reshape(20_000, 4)
    text = Lookup(tables=(TableRead(table="t", pooling="none"),)).model_dump_json()
    with ParameterServer() as server, ServerStore([server.address], [sgd_table_config(4, name="t")]) as store:
        store.assign("t", ids, rows)
        (link,) = store.links
        first = link.call(Call.LOOKUP, text, [ids])
        link.call(Call.LOOKUP, text, [ids + 10**6])
        assert np.array_equal(first.arrays[0], rows.numpy())


def plain_memory(size: int, *, sealed: bool = True) -> int:
    if sealed:
        made = make_shared_memory(size // 2)
        assert made is not None
        return made[1]
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


@pytest.mark.parametrize(
    ("size", "said", "sealed"),
    [(8192, 4096, False), (8192, 4095, True), (8192, 0, True), (8192, 2**40, True), (2, 8192, True)],
)
def test_memory_that_is_not_what_it_is_said_to_be_is_not_taken(size: int, said: int, sealed: bool) -> None:
    descriptor = plain_memory(size, sealed=sealed)
    with pytest.raises(ValueError, match="shared memory"):
        SharedMemory(descriptor, said, made_here=False)
    os.close(descriptor)


def opened(server: ParameterServer) -> socket.socket:
    name = local_name("127.0.0.1", server.port)
    assert name is not None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(name)
    connection.sendall(hello(None))
    assert connection.recv(8)[:4] == b"MOPS"
    return connection


def memories() -> int:
    """Descriptors of such memory that this process has; a server in it that was closed has none."""
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("memfd" in str(entry.readlink()) for entry in entries)


def test_whoever_lies_about_a_room_is_turned_away_and_others_are_served() -> None:
    def words(*values: int) -> bytes:
        return b"".join(struct.pack("<Q", value) for value in values)

    before = memories()
    with ParameterServer(ServerConfig()) as server:
        lies: list[tuple[bytes, list[int]]] = [
            (words(SHARED | SHARED_FROM), []),  # in a room that never came
            (words(ROOM_COMES | 4096), []),  # no descriptor
            (words(ROOM_COMES | 4096), [plain_memory(8192, sealed=False)]),
            (words(ROOM_COMES | 5000), [plain_memory(8192)]),
            (words(ROOM_COMES | 4096, SHARED | 4097), [plain_memory(8192)]),  # more than there is
            (words(ROOM_COMES | 4096, ROOM_COMES | 4096), [plain_memory(8192)]),  # a second one
            (words(ROOM_COMES | 4096), [os.open("/dev/null", os.O_RDONLY)]),
            (words(ROOM_COMES | 4096)[:4], [plain_memory(8192)]),  # half a word
        ]
        for data, descriptors in lies:
            with opened(server) as liar:
                socket.send_fds(liar, [data], descriptors)
                if len(data) < 8:
                    liar.shutdown(socket.SHUT_WR)  # the server waits for the rest; others must be turned away unasked
                assert liar.recv(1) == b"", "the server has closed the stream"
            for descriptor in descriptors:
                os.close(descriptor)
        with ServerStore([server.address], [sgd_table_config(1, name="t")]) as store:
            assert store.stats()["t"].rows == 0
    assert memories() <= before, "descriptors that were sent are closed"


def test_a_frame_in_the_room_is_checked_like_any_other() -> None:
    with ParameterServer() as server, opened(server) as connection:
        made = make_shared_memory()
        assert made is not None
        shared, descriptor = made
        shared.outgoing[: SHARED_FROM + 8] = 255
        socket.send_fds(connection, [struct.pack("<Q", ROOM_COMES | SHARED_BYTES)], [descriptor])
        os.close(descriptor)
        connection.sendall(struct.pack("<Q", SHARED | (SHARED_FROM + 8)))
        (size,) = struct.unpack("<Q", connection.recv(8, socket.MSG_WAITALL))
        answer = decode(connection.recv(size, socket.MSG_WAITALL))
        assert answer.call == BasicCall.ERROR
        assert "magic" in answer.text
