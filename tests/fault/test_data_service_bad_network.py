"""Danger: a network that cuts connections and repeats frames, and so makes batches come twice or not at all."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from test_ps_bad_network import FATES, Fates, SocketProxy, cutting_relay

from monolith.dataservice import (
    DataClientConfig,
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
)
from monolith.testing.servers import free_ports

ROWS = 600


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetConfig:
    for place, begin in enumerate(range(0, ROWS, 20)):
        lines = "".join(f"{row}\n" for row in range(begin, begin + 20))
        (tmp_path / f"{place:02}.csv").write_text(f"x\n{lines}")
    fields = {"columns": [{"name": "x", "shape": []}], "batch_size": 3}
    return DatasetConfig(kind="csv", paths=(f"{tmp_path}/*.csv",), fields=fields)


def rows(address: str, dataset: DatasetConfig, config: DataClientConfig) -> list[int]:
    """What two trainers get that take turns."""
    source = DataServiceSource(address, dataset, config=config)
    trainers = [iter(source.shard(trainer, 2)) for trainer in range(2)]
    batches = itertools.chain.from_iterable(itertools.zip_longest(*trainers))
    return sorted(row for batch in batches if batch is not None for row in batch["x"].tolist())


@pytest.mark.parametrize("seed", range(2))
def test_connections_that_are_reset_leave_every_row_once(dataset: DatasetConfig, seed: int) -> None:
    (port,) = free_ports(1)
    with (
        DataDispatcher() as dispatcher,
        cutting_relay(dispatcher.address, seed) as front,
        cutting_relay(f"127.0.0.1:{port}", seed + 1) as way,
        DataWorker(DataWorkerConfig(dispatcher=front, port=port, advertise=way)),
    ):
        assert rows(front, dataset, DataClientConfig(timeout=60)) == list(range(ROWS))


@pytest.mark.parametrize("seed", range(2))
def test_repeated_delayed_and_lost_frames_leave_every_row_once(dataset: DatasetConfig, seed: int) -> None:
    fates = Fates(seed)
    with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)):
        front = SocketProxy(dispatcher.address, fates)
        assert rows(front.address, dataset, DataClientConfig(timeout=60)) == list(range(ROWS))
        front.shutdown()
    assert fates.happened == set(FATES)
