"""Danger: a network that loses, delays, repeats and cuts, and so makes updates count twice or not at all."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
import torch

from monolith.ps import (
    ClientConfig,
    DenseOptimizer,
    ParameterServer,
    ServerConfig,
    ServerParameters,
    ServerStore,
)
from monolith.table import Bags, Zeros
from monolith.table.config import Segment, TableConfig
from monolith.transport.framed_socket import HELLO, FramedSocket
from monolith.transport.link import Transport

TABLE = TableConfig(name="counts", segments=(Segment(dim=1, initializer=Zeros()),))
FATES = ("pass", "twice", "again later", "cut before", "cut after", "both answers")


class Cut(Exception):  # noqa: N818 - what the network does
    """The connection ends here."""


class Fates:
    """Lets one of the fates happen to each frame."""

    def __init__(self, seed: int) -> None:
        self.happened: set[str] = set()
        self._random = random.Random(seed)
        self._kept: list[bytes] = []
        self._lock = threading.Lock()

    def answers(self, data: bytes, ask: Callable[[bytes], bytes]) -> list[bytes]:
        """What the client gets to hear when it has sent `data`."""
        with self._lock:
            fate = self._random.choice(FATES)
            self.happened.add(fate)
            late = self._random.choice(self._kept) if self._kept else None
            if len(self._kept) < 30 and fate == "again later":
                self._kept.append(data)
        if fate == "cut before":
            raise Cut
        if fate == "again later" and late is not None:
            ask(late)  # a frame of long ago, whose answer nobody waits for
        answers = [ask(data)]
        if fate in ("twice", "both answers"):
            answers.append(ask(data))
        if fate == "cut after":
            raise Cut
        return answers if fate == "both answers" else answers[:1]


class FlightProxy(flight.FlightServerBase):
    """Forwards messages of Flight to `upstream`, as the fates allow."""

    def __init__(self, upstream: str, fates: Fates) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self._upstream = upstream
        self._fates = fates

    def do_exchange(self, context: object, descriptor: object, reader: object, writer: object) -> None:
        with flight.connect(f"grpc://{self._upstream}") as client:
            forward, back = client.do_exchange(flight.FlightDescriptor.for_command(b""))

            def ask(data: bytes) -> bytes:
                forward.write_metadata(pa.py_buffer(data))
                answer: bytes = back.read_chunk().app_metadata.to_pybytes()
                return answer

            try:
                while True:
                    data = reader.read_chunk().app_metadata.to_pybytes()  # type: ignore[attr-defined]
                    for answer in self._fates.answers(data, ask):
                        writer.write_metadata(pa.py_buffer(answer))  # type: ignore[attr-defined]
            except StopIteration:
                forward.close()
            except Cut:
                raise flight.FlightUnavailableError("cut") from None


class SocketProxy:
    """Forwards messages over sockets to `upstream`, as the fates allow."""

    def __init__(self, upstream: str, fates: Fates) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._upstream = upstream
        self._fates = fates
        threading.Thread(target=self._accept, daemon=True).start()

    def shutdown(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._exchange, args=(FramedSocket(near),), daemon=True).start()

    def _exchange(self, near: FramedSocket) -> None:
        host, _, port = self._upstream.rpartition(":")
        far = FramedSocket(socket.create_connection((host, int(port))))

        def ask(data: bytes) -> bytes:
            far.send_frame(np.frombuffer(data, dtype=np.uint8))
            return far.receive_frame().tobytes()

        with suppress(OSError, Cut):
            far.send(near.receive(HELLO.size).tobytes())
            near.send(far.receive(HELLO.size).tobytes())
            while True:
                for answer in self._fates.answers(near.receive_frame().tobytes(), ask):
                    near.send_frame(np.frombuffer(answer, dtype=np.uint8))
        for end in (near, far):
            end.close()


@contextmanager
def cutting_relay(upstream: str, seed: int) -> Iterator[str]:
    """Forwards bytes to `upstream` and resets each connection after some thousands of them."""
    host, _, port = upstream.rpartition(":")
    rng, listener = random.Random(seed), socket.create_server(("127.0.0.1", 0))

    def relay(source: socket.socket, sink: socket.socket, left: int) -> None:
        with suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 4096))):
                sink.sendall(data)
                left -= len(data)
        for end in (source, sink):
            with suppress(OSError):
                # A thread that still waits for bytes would keep the connection alive. Lingering for 0 seconds: the peer sees a
                # reset, not an orderly end.
                end.shutdown(socket.SHUT_RD)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Also one that the peer has left already, which cannot be shut down any more.
            with suppress(OSError):
                end.close()

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=relay, args=(source, sink, rng.randrange(2000, 30000)), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # Closing alone does not wake a thread that waits in accept.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=30)


def add_from_threads(store: ServerStore, times: int) -> None:
    """`times` pushes of each of two threads; a push that raised would end the test."""
    failures: list[BaseException] = []

    def add(number: int) -> None:
        try:
            for turn in range(times):
                store.assign_add("counts", [number, 100 + turn], torch.ones(2, 1))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def counts(address: str, ids: np.ndarray, config: ClientConfig) -> list[float]:
    with ServerStore([address], config=config) as store:
        bags = Bags(table="counts", ids=ids, offsets=np.arange(len(ids) + 1))
        values: list[float] = store.lookup([bags])[0].flatten().tolist()
        return values


@pytest.mark.parametrize(("transport", "seed"), [("socket", 0), ("socket", 1), ("socket", 2), ("flight", 0)])
def test_repeated_delayed_and_lost_frames_leave_counts_exact(transport: Transport, seed: int) -> None:
    fates, client = Fates(seed), ClientConfig(timeout=60, transport=transport)
    with ParameterServer(ServerConfig(transport=transport)) as server:
        proxy = (SocketProxy if transport == "socket" else FlightProxy)(server.address, fates)
        with ServerStore([proxy.address], [TABLE], config=client) as store:
            add_from_threads(store, times=40)
            parameters = ServerParameters(store, {"w": torch.zeros(1)}, DenseOptimizer.of(torch.optim.SGD, lr=1.0))
            for _ in range(20):
                parameters.apply({"w": torch.ones(1)})
            assert parameters.read()["w"].item() == -20
        proxy.shutdown()
        assert counts(server.address, np.array([1, 2]), client) == [40, 40]
        assert counts(server.address, np.arange(100, 140), client) == [2] * 40
    assert fates.happened == set(FATES)


@pytest.mark.parametrize(("transport", "seed"), [("socket", 0), ("socket", 1), ("socket", 2), ("flight", 0)])
def test_connections_that_are_reset_leave_counts_exact(transport: Transport, seed: int) -> None:
    config = ServerConfig(transport=transport)
    with (
        ParameterServer(config) as one,
        ParameterServer(config) as two,
        cutting_relay(one.address, seed) as first,
        cutting_relay(two.address, seed + 100) as second,
        ServerStore([first, second], [TABLE], config=ClientConfig(timeout=60, transport=transport)) as store,
    ):
        add_from_threads(store, times=60)
        everything = np.array([1, 2, *range(100, 160)])
        (values,) = store.lookup([Bags(table="counts", ids=everything, offsets=np.arange(63))])
    assert values.flatten().tolist() == [60, 60, *[2] * 60]


@pytest.mark.parametrize("seed", range(2))
def test_buckets_that_move_over_such_a_network_leave_counts_exact(seed: int) -> None:
    fates, config = Fates(seed), ServerConfig(move_piece_bytes=256)
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(config)) for _ in range(3)]
        proxies = [SocketProxy(server.address, fates) for server in servers]
        # Servers reach each other over the same network: transfers get lost, come twice, and long after they have ended.
        addresses = [proxy.address for proxy in proxies]
        client = ClientConfig(timeout=60)
        with ServerStore(addresses[:2], [TABLE], config=client) as store:
            adding = threading.Thread(target=add_from_threads, args=(store, 60))
            adding.start()
            for wanted in (addresses, addresses[:2], addresses):
                store.rebalance(wanted)
            adding.join(timeout=120)
            assert not adding.is_alive()
            everything = np.array([1, 2, *range(100, 160)])
            (values,) = store.lookup([Bags(table="counts", ids=everything, offsets=np.arange(63))])
            assert values.flatten().tolist() == [60, 60, *[2] * 60]
            assert store.stats()["counts"].rows == 62
        for proxy in proxies:
            proxy.shutdown()
