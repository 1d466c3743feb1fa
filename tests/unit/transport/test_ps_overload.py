"""Danger: a server that looks dead, or is, because it has more connections or requests than it can serve."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from monolith.cli import main
from monolith.console import RareWarnings
from monolith.errors import OverloadedError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.transport import link as link_module
from monolith.transport import sockets
from monolith.transport.calls import Answer, BasicCall, FrameCalls
from monolith.transport.errors import decode_error
from monolith.transport.framed_socket import FramedSocket, hello
from monolith.transport.frames import Frame, decode, encode
from monolith.transport.link import Link, StreamPool, Transport, connector_to
from real_servers import until

BOTH = pytest.mark.parametrize("transport", ["socket", "flight"])
QUICK = ClientConfig(timeout=0.5)


@contextmanager
def connected(server: ParameterServer) -> Iterator[FramedSocket]:
    """A connection over TCP that has said nothing yet."""
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection = FramedSocket(raw)
    try:
        yield connection
    finally:
        connection.close()


def ask_once(address: str, transport: Transport, request: np.ndarray) -> Frame:
    """The answer to one request over a stream of its own."""
    connector = connector_to(address, transport=transport, timeout=30, token=None, tls_root_certs=None)
    deadline = time.monotonic() + 30
    stream = connector.open(deadline=deadline)
    try:
        stream.send(request, deadline=deadline)
        frame = stream.receive(1, deadline=deadline)
    finally:
        stream.close()
        connector.close()
    if frame.call == BasicCall.ERROR:
        raise decode_error(frame.text, address)
    return frame


def has_ended(connection: FramedSocket) -> bool:
    try:
        connection.receive(1, deadline=time.monotonic() + 30)
    except ConnectionError:
        return True
    return False


@BOTH
def test_health_is_answered_while_all_streams_are_taken(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ClientConfig(transport=transport, timeout=20.0)
    with (
        ParameterServer(ServerConfig(max_streams=1, transport=transport)) as server,
        ServerStore([server.address], config=client) as store,
    ):
        assert store.stats() == {}
        with pytest.raises(OverloadedError, match=r"1 streams are open, no more are allowed"):
            ask_once(server.address, transport, encode(call=Call.STATS, request=1, text="{}"))
        link = Link(server.address, timeout=20.0, transport=transport)
        for _ in range(2 * sockets.HEALTH_STREAMS):
            assert "tables" in json.loads(link.call(BasicCall.HEALTH).text)
        link.close()
        if transport == "socket":
            assert main(["probe", server.address]) == 0
        assert store.stats() == {}, "who came first is not disturbed"


def test_a_large_request_beyond_the_streams_is_told_so_too() -> None:
    with ParameterServer(ServerConfig(max_streams=1)) as server, ServerStore([server.address]) as store:
        assert store.stats() == {}
        with pytest.raises(OverloadedError, match="1 streams are open"):
            ask_once(server.address, "socket", encode(call=17, request=1, text="{}", arrays=[np.zeros(100_000)]))


def test_it_accepts_again_when_descriptors_are_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED] * 2)

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        number = next(failures, None)
        if number is not None:
            raise OSError(number, "it has none left")
        return accept(listener)

    with caplog.at_level(logging.WARNING, "monolith.transport"):
        monkeypatch.setattr(sockets, "RETRY_SECONDS", 0.001)
        monkeypatch.setattr(socket.socket, "accept", failing)
        with ParameterServer() as server, ServerStore([server.address]) as store:
            assert store.stats() == {}
            assert next(failures, None) is None
    told = [record.getMessage() for record in caplog.records if "cannot accept" in record.getMessage()]
    assert len(told) == 1, "not a line for each"
    assert "it has none left" in told[0]
    assert "ulimit -n" in told[0]


def test_who_cannot_be_accepted_is_let_go_and_not_left_waiting() -> None:
    with ParameterServer() as server:
        service = server._service
        assert isinstance(service, sockets.SocketService)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as client,
        ):
            service._not_accepted(listener, OSError(errno.EMFILE, "Too many open files"))
            client.settimeout(30)
            assert client.recv(1) == b""


def test_it_goes_on_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, iter(range(3))

    def failing(thread: threading.Thread) -> None:
        if thread.name == "monolith-ps-stream" and next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with caplog.at_level(logging.WARNING, "monolith.transport"), ParameterServer() as server:
        with ServerStore([server.address]) as store:
            assert store.stats() == {}
        service = server._service
        assert isinstance(service, sockets.SocketService)
        until(lambda: not service._connections)
    assert "cannot serve a connection: can't start new thread" in caplog.text


def test_strangers_who_say_nothing_keep_nobody_out() -> None:
    with ParameterServer(ServerConfig(max_streams=2)) as server, ExitStack() as strangers:
        service = server._service
        assert isinstance(service, sockets.SocketService)
        for _ in range(service._most + 5):
            strangers.enter_context(connected(server))
        until(lambda: len(service._connections) >= service._most)
        with ServerStore([server.address], config=ClientConfig(timeout=20.0)) as store:
            assert store.stats() == {}


def test_an_idle_stream_is_closed_and_its_client_opens_another_without_looking_for_the_server() -> None:
    with ParameterServer(ServerConfig(idle_secs=0.05)) as server:
        link = Link(server.address, timeout=20.0)
        looked = []
        link.on_unavailable = lambda: looked.append(1)
        assert link.call(Call.STATS).call == Call.STATS
        (stream,) = link.pool._idle
        until(lambda: not stream.is_open)
        assert link.call(Call.STATS).call == Call.STATS
        assert not looked
        link.close()


@pytest.mark.parametrize("sent", [struct.pack("<Q", 100_000), struct.pack("<Q", 100_000) + b"some"])
def test_a_request_that_comes_too_slowly_ends_its_stream(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SLOW_SECONDS", 0.05)
    with ParameterServer(ServerConfig(min_bytes_per_sec=10**9)) as server, connected(server) as slow:
        slow.send(hello(None))
        assert len(slow.receive(8, deadline=time.monotonic() + 30)) == 8
        slow.send(sent)
        assert has_ended(slow)


def test_an_answer_that_nobody_reads_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SLOW_SECONDS", 0.05)
    with ParameterServer(ServerConfig(max_streams=1, min_bytes_per_sec=10**9)) as server, connected(server) as deaf:
        service = server._service
        assert isinstance(service, sockets.SocketService)
        large = encode(call=1, request=1, text="", arrays=[np.zeros(10_000_000)])
        monkeypatch.setattr(service._calls, "answer", lambda data, **options: large)
        deaf.send(hello(None))
        deaf.send_frame(encode(call=BasicCall.HEALTH, request=1, text="{}"))
        until(lambda: not service._connections)


class Blocked(FrameCalls):
    """A call that waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(max_frame_bytes=4096)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self._handlers |= {BasicCall.HEALTH: self._at_once, Call.STATS: self._wait}

    def _at_once(self, frame: Frame) -> Answer:
        return Answer()

    def _wait(self, frame: Frame) -> Answer:
        self.inside.set()
        assert self.go_on.wait(30)
        return Answer()


def test_requests_beyond_the_limit_are_refused_at_once_and_health_is_not() -> None:
    calls = Blocked()
    calls.max_requests = 1
    answers: list[Frame] = []
    request = encode(call=Call.STATS, request=1, text="{}")
    first = threading.Thread(target=lambda: answers.append(decode(calls.answer(request))))
    first.start()
    assert calls.inside.wait(30)
    refused = json.loads(decode(calls.answer(request)).text)
    assert refused["error"] == "OverloadedError"
    assert "1 requests are running" in refused["message"]
    assert decode(calls.answer(encode(call=BasicCall.HEALTH, request=2, text="{}"))).call == BasicCall.HEALTH
    calls.go_on.set()
    first.join()
    assert answers[0].call == Call.STATS


class Scripted:
    """A stream, and its connector, whose answers are given."""

    is_open = True

    def __init__(self, answers: list[str]) -> None:
        self._answers = answers
        self.opened = 0

    def open(self, *, deadline: float) -> Scripted:
        self.opened += 1
        return self

    def send(self, *pieces: np.ndarray, deadline: float) -> None:
        pass

    def receive(self, request: int, *, deadline: float) -> Frame:
        error = self._answers.pop(0)
        text = json.dumps({"error": error, "message": "busy"}) if error else "{}"
        return Frame(call=BasicCall.ERROR if error else Call.STATS, request=request, instance=1, text=text)

    def close(self) -> None:
        pass


def scripted_link(answers: list[str], timeout: float) -> tuple[Link, Scripted]:
    link, script = Link("127.0.0.1:1", timeout=timeout), Scripted(answers)
    link.pool = StreamPool(link.address, script)
    return link, script


def test_a_client_backs_off_from_a_server_that_has_too_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(link_module.time, "sleep", pauses.append)
    link, script = scripted_link(["OverloadedError"] * 40 + [""], timeout=1000.0)
    link.on_unavailable = lambda: pytest.fail("it is there")
    assert link.call(Call.STATS).call == Call.STATS
    assert script.opened == 41, "a stream that was for the refusal alone is not used again"
    assert len(pauses) == 40
    assert all(0 < pause <= link_module.LONGEST_OVERLOAD_PAUSE for pause in pauses)
    assert max(pauses) > link_module.LONGEST_PAUSE
    assert len(set(pauses)) == 40, "with jitter"


def test_a_client_gives_up_in_the_end_with_the_same_error() -> None:
    link, _ = scripted_link(["OverloadedError"] * 1000, timeout=0.2)
    with pytest.raises(OverloadedError, match=r"busy .*tried for 0.2 s"):
        link.call(Call.STATS)
    assert issubclass(OverloadedError, UnavailableError)


def test_warnings_about_the_same_come_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    warnings = RareWarnings(logging.getLogger("monolith.test"), seconds=10, clock=lambda: now[0])
    for second in (0.0, 1.0, 2.0, 9.0, 11.0, 12.0):
        now[0] = second
        warnings.warn("cannot accept: %s", "none left")
    warnings.warn("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept: none left",
        "cannot accept: none left (3 more since the last line)",
        "something else",
    ]


def test_a_server_that_several_threads_shut_down_closes_its_spare_descriptor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare = sockets._Spare()
    closed: list[int] = []
    both = threading.Barrier(2)
    real = os.close

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # lets the other thread in, if it can come
        real(descriptor)

    monkeypatch.setattr(os, "close", close)
    threads = [threading.Thread(target=spare.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert len(closed) == 1
