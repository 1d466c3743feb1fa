"""Danger: a process forks, for a data loader or otherwise, and the child waits forever, reads its parent's responses, writes
its parent's log or keeps its parent's port.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from monolith import EmbeddingTable
from monolith.data.prefetch import Prefetch
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import ForkedProcessError
from monolith.log import ChangeLog
from monolith.original.flows import merge_flow
from monolith.ps import CachedParameters, ParameterServer, ServerConfig, ServerStore
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.table import Bags
from monolith.testing import sgd_table_config
from same_port import started_again

SECONDS = 60
"""After which a child counts as hanging."""
TABLE = sgd_table_config(8, name="t")
IDS = np.arange(20_000)


def in_child(action: Callable[[], object]) -> object:
    """What `action` returns, or the error it raises, in a forked child; "hangs" if it does not end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            outcome: object = action()
        except BaseException as error:
            outcome = type(error)
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(data) if data else f"hangs: {status}"


@contextmanager
def busy(*actions: Callable[[], object]) -> Iterator[None]:
    """Threads that do `actions` all the time."""
    stopping = threading.Event()

    def run(action: Callable[[], object]) -> None:
        while not stopping.is_set():
            action()

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def bags(ids: np.ndarray = IDS) -> Bags:
    return Bags(table="t", ids=ids, offsets=np.arange(len(ids) + 1))


def clicks() -> ClickStream:
    return ClickStream(ClickStreamConfig(users=50, batches=8, batch_size=4))


def test_a_table_can_be_read_and_trained_in_a_child_whatever_other_threads_were_doing_to_it() -> None:
    table = EmbeddingTable(TABLE)
    ones = np.ones((len(IDS), 8), np.float32)
    table.assign(IDS, ones)
    table.track_changes()
    torch.ones(10**6).sum()  # torch has threads, which calls of the main thread would use

    def use() -> tuple[int, float]:
        # Summed by NumPy: the threads of torch itself do not survive a fork.
        before = float(table.lookup(IDS).numpy().sum())
        table.apply_gradients(IDS, ones)
        table.evict(now=0)
        return len(table), before - float(table.lookup(IDS).numpy().sum())

    def cut() -> None:
        changes = table.cut_changes()
        assert sum(len(piece.ids) for piece in changes) <= len(IDS)
        changes.commit()

    readers = [lambda: table.lookup(IDS), lambda: table.lookup(IDS), lambda: table.assign(IDS, ones), cut]
    with busy(*readers):
        outcomes = [in_child(use) for _ in range(10)]
    assert {outcome[0] for outcome in outcomes if isinstance(outcome, tuple)} == {len(IDS)}
    assert all(isinstance(outcome, tuple) and outcome[1] > 0 for outcome in outcomes), outcomes


def test_children_of_a_worker_with_servers_are_refused_and_the_worker_goes_on(tmp_path: Path) -> None:
    log_table = EmbeddingTable(TABLE)
    with (
        ParameterServer(ServerConfig(folder=tmp_path / "ps", log_flush_secs=0.01)) as server,
        ServerStore([server.address], [TABLE]) as store,
        CoordinationClient([server.address], index=0, epoch=1, lease=3.0) as client,
        ChangeLog(tmp_path / "log", [log_table]) as log,
        Prefetch(clicks(), capacity=2) as ahead,
    ):
        few = bags(np.arange(10))
        layer = torch.nn.Linear(2, 1)
        cached = CachedParameters(layer, store, torch.optim.SGD(layer.parameters(), lr=1.0))
        log_table.assign(np.arange(3), np.ones((3, 8), np.float32))
        log.commit_in_background(step=1).result()
        store.prefetch([few])
        store.lookup([few])
        read, merged = iter(ahead), iter(merge_flow([clicks(), clicks()], queue_size=2))
        next(read), next(merged)
        uses: list[Callable[[], object]] = [
            lambda: store.lookup([few]),
            lambda: store.prefetch([few]),
            lambda: store.assign("t", [1], torch.ones(1, 8)),
            cached.fetch,
            client.members,
            lambda: log.commit(step=2),
            lambda: log.commit_in_background(step=2),
            lambda: next(read),
            lambda: next(merged),
        ]
        with busy(lambda: store.lookup([few]), lambda: store.assign("t", [1], torch.ones(1, 8))):
            for number, use in enumerate(uses):
                assert in_child(use) is ForkedProcessError, number
            # A child that leaves the blocks of its parent has no effect on it.
            ends = [store.close, client.close, log.close, ahead.close, server.close]
            assert [in_child(lambda end=end: (end(), None)[1]) for end in ends] == [None] * len(ends)  # type: ignore[misc]
            # And one that makes its own works.
            assert in_child(lambda: ServerStore([server.address], [TABLE]).stats()["t"].rows) == 1
        store.assign("t", [2], torch.ones(1, 8))
        assert store.stats()["t"].rows == 2
        assert client.members().members[0].alive
        assert log.commit(step=2) == 2
        assert len(list(read)) == 7


class Clicks(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in Prefetch(clicks(), capacity=2):
            yield batch["user_id"]


def test_a_data_loader_forks_its_workers_while_tables_and_servers_are_in_use() -> None:
    table, expected = EmbeddingTable(TABLE), sum(int(batch["user_id"].sum()) for batch in clicks())
    with (
        ParameterServer() as server,
        ServerStore([server.address], [TABLE]) as store,
        busy(lambda: table.lookup(IDS), lambda: store.lookup([bags(IDS[:100])])),
    ):
        for _ in range(3):
            loader = DataLoader(
                Clicks(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=SECONDS
            )
            assert sum(int(ids.sum()) for ids in loader) == 2 * expected


def test_a_child_does_not_keep_the_port_of_its_parents_server() -> None:
    server = ParameterServer()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        signal.alarm(SECONDS)
        os.read(reader, 1)
        os._exit(0)
    try:
        host, _, port = server.address.rpartition(":")
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)
        started_again(ServerConfig(port=int(port))).close()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)
