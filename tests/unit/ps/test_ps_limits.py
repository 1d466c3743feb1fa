"""Danger: a server that takes more than it can hold and freezes, or that waits forever."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import torch

from monolith import Segment, TableConfig
from monolith.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    MemoryLimitError,
    ProtocolError,
    ServerRestartedError,
    UnavailableError,
)
from monolith.ps import (
    ClientConfig,
    DenseOptimizer,
    ParameterServer,
    ServerConfig,
    ServerParameters,
    ServerStore,
)
from monolith.ps.server.parameter_server import Dispatcher
from monolith.table import Bags, Gradient
from monolith.testing import sgd_table_config
from monolith.testing.servers import free_ports
from monolith.transport import sockets
from monolith.transport.calls import BasicCall
from monolith.transport.flight import Deadlines
from monolith.transport.framed_socket import local_name
from monolith.transport.frames import decode, encode
from monolith.transport.link import StreamPool, Transport, connector_to
from same_port import started_again

BOTH = pytest.mark.parametrize("transport", ["socket", "flight"])
ONE = Bags(table="t", ids=np.array([1]), offsets=np.array([0, 1]))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def unused_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def insist(address: str, config: ClientConfig) -> ServerStore:
    """A store at `address`; tried until the time that `config` gives was enough to hear what is said there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(DeadlineExceededError):
            return ServerStore([address], config=config)
    raise AssertionError("nothing was said")


def test_beyond_the_memory_limit_updates_are_refused_and_reading_goes_on() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=256),))
    with (
        ParameterServer(ServerConfig(memory_limit=8 * 2**20)) as server,
        ServerStore([server.address], [config]) as store,
    ):
        accepted = 0

        def fill() -> None:
            nonlocal accepted
            for batch in range(100):
                store.assign("t", np.arange(batch * 500, batch * 500 + 500), torch.ones(500, 256))
                accepted += 500

        with pytest.raises(MemoryLimitError, match=r"would not fit below the limit of 8,388,608.*--memory-limit"):
            fill()
        assert 0 < accepted < 8 * 2**20 / 1024
        assert store.stats()["t"].rows == accepted
        assert store.stats()["t"].bytes <= 8 * 2**20
        assert store.lookup([ONE])[0].sum() == 256
        with pytest.raises(MemoryLimitError):
            store.apply([Gradient(bags=ONE, values=torch.ones(1, 256))] * 2000)
        with pytest.raises(MemoryLimitError):
            ServerParameters(store, {"w": torch.zeros(2**21)}, DenseOptimizer.of(torch.optim.SGD))


def test_a_table_with_room_for_more_than_the_limit_is_refused() -> None:
    with ParameterServer(ServerConfig(memory_limit=2**20)) as server, ServerStore([server.address]) as store:
        with pytest.raises(MemoryLimitError):
            store.declare([TableConfig(name="t", segments=(Segment(dim=4),), initial_capacity=2**40)])
        assert store.configs() == {}


@BOTH
def test_messages_above_the_limit_are_refused_both_ways(transport: Transport) -> None:
    config, client = ServerConfig(max_message_bytes=64 * 1024, transport=transport), ClientConfig(transport=transport)
    table = sgd_table_config(16, name="t")
    with ParameterServer(config) as server, ServerStore([server.address], [table], config=client) as store:
        many = Bags(table="t", ids=np.arange(10_000), offsets=np.arange(10_001))
        with pytest.raises(ProtocolError, match=r"at most 65,536 bytes, got"):
            store.lookup([many])
        pooled = Bags(table="t", ids=np.arange(3000), offsets=np.arange(3001))
        with pytest.raises(ProtocolError, match=r"the answer would have 192,000 bytes"):
            store.lookup([pooled])
        assert store.lookup([ONE])[0].shape == (1, 16)


@BOTH
def test_more_streams_than_allowed_are_turned_away_until_one_is_free(transport: Transport) -> None:
    client = ClientConfig(transport=transport)
    with ParameterServer(ServerConfig(max_streams=1, transport=transport)) as server:
        with (
            ServerStore([server.address], config=client),
            pytest.raises(UnavailableError, match="streams are open"),
        ):
            insist(server.address, ClientConfig(timeout=0.5, transport=transport))
        with ServerStore([server.address], config=client) as store:
            assert store.stats() == {}


@BOTH
def test_a_server_that_never_answers_costs_the_timeout_and_no_more(silent: str, transport: Transport) -> None:
    # Without a limit of our own, gRPC would wait 20 seconds for the other side to speak: more than this test may take.
    outcome: list[BaseException] = []

    def ask() -> None:
        with pytest.raises((DeadlineExceededError, UnavailableError)) as caught:
            ServerStore([silent], config=ClientConfig(timeout=0.5, transport=transport))
        outcome.append(caught.value)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout=15)
    assert len(outcome) == 1


def test_a_server_that_accepts_nobody_costs_the_timeout_and_no_more(silent: str) -> None:
    host, _, port = silent.rpartition(":")
    with socket.socket(socket.AF_UNIX) as nearby, ExitStack() as waiting:
        nearby.bind(local_name(host, int(port)))
        nearby.listen(0)
        with suppress(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(nearby.getsockname())
        connector = connector_to(silent, transport="socket", timeout=30, token=None, tls_root_certs=None)
        outcome: list[BaseException | None] = []

        def ask() -> None:
            with pytest.raises(DeadlineExceededError) as caught:
                connector.open(deadline=time.monotonic() + 0.2)
            outcome.append(caught.value)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(timeout=60)
        assert len(outcome) == 1


@BOTH
def test_no_server_at_all_is_unavailable(transport: Transport) -> None:
    with pytest.raises(UnavailableError, match=r"tried for 0\.3 s"):
        insist(unused_address(), ClientConfig(timeout=0.3, transport=transport))


def test_a_stream_that_nobody_uses_for_long_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HELLO_SECONDS", 0.05)
    with ParameterServer(ServerConfig(max_streams=1)) as server:
        connector = connector_to(server.address, transport="socket", timeout=30, token=None, tls_root_certs=None)
        deadline = time.monotonic() + 60
        stream = connector.open(deadline=deadline)
        time.sleep(0.3)  # several times what a stranger has to say who it is
        stream.send(encode(call=BasicCall.HEALTH, request=1, text="{}"), deadline=deadline)
        assert stream.receive(1, deadline=deadline).call == BasicCall.HEALTH
        stream.close()


def test_a_store_that_is_dropped_lets_go_of_its_connections(recwarn: pytest.WarningsRecorder) -> None:
    with ParameterServer(ServerConfig(max_streams=1)) as server:
        for _ in range(3):
            dropped = [ServerStore([server.address])]
            dropped.append(dropped)  # type: ignore[arg-type] # a circle: only the collector finds it
            del dropped
            gc.collect()
        assert [str(warning.message) for warning in recwarn] == []


def test_a_client_waits_for_a_server_that_starts_later() -> None:
    address, stores = unused_address(), []
    patient = ClientConfig(timeout=120)
    waiting = threading.Thread(target=lambda: stores.append(ServerStore([address], config=patient)), daemon=True)
    waiting.start()
    with started_again(ServerConfig(port=int(address.rpartition(":")[2]))):
        waiting.join()
        stores[0].close()
    assert len(stores) == 1


@BOTH
def test_a_server_that_was_started_again_is_not_taken_for_the_one_before(transport: Transport) -> None:
    server = ParameterServer(ServerConfig(transport=transport))
    client = ClientConfig(transport=transport)
    store = ServerStore([server.address], [sgd_table_config(1, name="t")], config=client)
    store.assign("t", [1], torch.ones(1, 1))
    again = ServerConfig(port=server.port, transport=transport)
    link = store.links[0]
    link.pool.close()
    server.close()
    with started_again(again) as fresh:
        # The same client over a new connection.
        connector = connector_to(link.address, transport=transport, timeout=5, token=None, tls_root_certs=None)
        link.pool = StreamPool(link.address, connector)
        for call in (lambda: store.lookup([ONE]), lambda: store.assign("t", [1], torch.ones(1, 1))):
            with pytest.raises(ServerRestartedError, match="has lost its state"):
                call()
        assert fresh.instance != server.instance
        store.rejoin()
        assert store.stats()["t"].rows == 0
        store.close()


def test_a_stopping_server_finishes_what_is_under_way_and_refuses_the_rest() -> None:
    server, inside, go_on = Dispatcher(), threading.Event(), threading.Event()

    def slow(frame: object) -> object:
        inside.set()
        assert go_on.wait(10)
        return type(server._health(frame))()  # type: ignore[arg-type]

    server._handlers[63] = slow  # type: ignore[assignment]
    answers = []
    call = threading.Thread(target=lambda: answers.append(decode(server.answer(encode(call=63, request=1, text="")))))
    call.start()
    assert inside.wait(10)
    assert not server.stop(grace=0)
    refused = decode(server.answer(encode(call=1, request=2, text="{}")))
    assert "the server is stopping" in refused.text
    go_on.set()
    call.join()
    assert server.stop(grace=10)
    assert answers[0].call == 63


def test_a_client_can_ask_the_server_to_end() -> None:
    with ParameterServer() as server, ServerStore([server.address]) as store:
        assert not server.wait(timeout=0)
        store.shut_down_servers()
        assert server.wait(timeout=10)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:70000", "http://host:1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="host:port"):
        ServerStore([address])


def test_a_deadline_is_kept_beside_later_and_ended_ones() -> None:
    deadlines, expired = Deadlines(), threading.Event()
    with deadlines.watch(time.monotonic() + 600, lambda: pytest.fail("too early")):
        with deadlines.watch(time.monotonic() + 300, lambda: pytest.fail("it had ended")):
            pass
        with deadlines.watch(time.monotonic() + 0.01, expired.set) as late:
            assert expired.wait(30)
            assert late.is_set()


def test_a_deadline_is_kept_after_one_whose_end_failed() -> None:
    def fail() -> None:
        raise OSError("it cannot be ended")

    deadlines, expired = Deadlines(), threading.Event()
    with deadlines.watch(time.monotonic(), fail) as late:
        assert late.wait(60)
        with deadlines.watch(time.monotonic(), expired.set):
            assert expired.wait(60)
