"""Danger: a checkpoint taken while workers push mixes moments of one server, and other servers restore something that never was.

A worker takes 1 from every row with each batch, and says with each push which batch it is. So every row of a server's part must
say the number that its ledger has, whatever the other servers' numbers are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.state import read_manifest, read_state
from monolith.table import SGD, Bags, Gradient, Segment, TableConfig, Zeros, bucket_of
from monolith.table.store import Position

TABLE = TableConfig(name="counts", segments=(Segment(dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros()),))
IDS = np.arange(3000)
BAGS = Bags(table="counts", ids=IDS, offsets=np.arange(len(IDS) + 1))


@contextmanager
def cluster(model_dir: Path, numbers: range, worker: str) -> Iterator[ServerStore]:
    with ExitStack() as stack:
        configs = [ServerConfig(folder=model_dir / "ps" / str(number)) for number in numbers]
        addresses = [stack.enter_context(ParameterServer(config)).address for config in configs]
        config = ClientConfig(worker=worker, timeout=60.0)
        yield stack.enter_context(ServerStore(addresses, [TABLE], config=config))


@contextmanager
def pushing(store: ServerStore) -> Iterator[None]:
    stop, started = threading.Event(), threading.Event()

    def push() -> None:
        batches = 0
        while not stop.is_set():
            batches += 1
            position = Position(batches=batches, state=None)
            store.apply([Gradient(bags=BAGS, values=torch.ones(len(IDS), 1))], position=position)
            started.set()

    thread = threading.Thread(target=push)
    thread.start()
    try:
        assert started.wait(60)
        yield
    finally:
        stop.set()
        thread.join()


def expected(model_dir: Path, step: int) -> np.ndarray:
    """What each row was when the server that had it was cut, by the ledgers."""
    rows = np.zeros(len(IDS))
    for part in read_manifest(model_dir / f"model.ckpt-{step}").parts:
        path = (model_dir / part.name).parent
        source = read_state(path)["source"]
        assert isinstance(source, dict)
        (at,) = json.loads(str(source["ledger"]))["workers"]["w0"]["tables"]
        for first, end in read_manifest(path).buckets or ():
            buckets = bucket_of(IDS)
            rows[(first <= buckets) & (buckets < end)] = at["position"]["batches"]
    return rows


@pytest.mark.parametrize("saves", [pytest.param(4, id="quick"), pytest.param(50, id="long", marks=pytest.mark.slow)])
def test_checkpoints_taken_while_a_worker_pushes_restore_exactly_onto_other_servers(tmp_path: Path, saves: int) -> None:
    with cluster(tmp_path, range(2), "w0") as store, pushing(store):
        for step in range(1, saves + 1):
            store.save(tmp_path / f"model.ckpt-{step}")
    for count in (1, 2, 3):
        with cluster(tmp_path, range(10 * count, 10 * count + count), "w1") as store:
            for step in range(1, saves + 1):
                store.restore(tmp_path / f"model.ckpt-{step}")
                found = -store.lookup([BAGS])[0].flatten().numpy()
                assert (found == expected(tmp_path, step)).all()
                assert found.min() >= 1
