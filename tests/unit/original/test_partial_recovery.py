"""Danger: a restarted server stays empty, or one that kept running loses what it has learned since the last save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith import EmbeddingTable
from monolith.errors import CheckpointMismatchError, CorruptFileError, InvalidArgumentError
from monolith.original import PartialRecoverySaver, PsMonitor
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ps.client.saving import server_shards
from monolith.table import Bags, LocalStore
from monolith.testing import sgd_table_config

IDS = torch.arange(1, 101)
SHARD_OF = {"v0": 0, "table0": 0, "v1": 1, "table1": 1}


class Server:
    """A parameter server in miniature: one variable, one store; a new one has lost everything."""

    def __init__(self) -> None:
        self.v = torch.zeros(1)
        self.store = LocalStore([EmbeddingTable(sgd_table_config(1, name="table"))])

    def step(self) -> None:
        self.v += 1
        self.store.assign_add("table", [1], torch.ones(1, 1))

    def values(self) -> tuple[float, float]:
        entries = self.store.tables["table"].lookup_entry([1])
        return self.v.item(), entries.values[0, 0].item()


def saver(servers: list[Server], monitored: bool) -> PartialRecoverySaver:
    variables = {"v0": servers[0].v, "table0": servers[0].store, "v1": servers[1].v, "table1": servers[1].store}
    monitor = PsMonitor([server.store for server in servers]) if monitored else None
    return PartialRecoverySaver(variables, shard_of=SHARD_OF, ps_monitor=monitor)


def trained(tmp_path: Path, monitored: bool) -> tuple[list[Server], str]:
    """Two servers, saved after one step, and one step further."""
    servers = [Server(), Server()]
    first = saver(servers, monitored)
    for server in servers:
        server.step()
    first.setup_ps_initialized_state()
    path = first.save(tmp_path / "ckpt", global_step=1)
    assert path is not None
    for server in servers:
        server.step()
    assert [server.values() for server in servers] == [(2.0, 2.0), (2.0, 2.0)]
    return servers, path


def test_with_a_monitor_only_what_was_started_anew_is_restored(tmp_path: Path) -> None:
    servers, path = trained(tmp_path, monitored=True)
    everything_new = [Server(), Server()]
    saver(everything_new, monitored=True).restore(path)
    assert [server.values() for server in everything_new] == [(1.0, 1.0), (1.0, 1.0)]
    second_new = [servers[0], Server()]
    again = saver(second_new, monitored=True)
    again.restore(path)
    assert [server.values() for server in second_new] == [(2.0, 2.0), (1.0, 1.0)]
    # From now on the second has a state to keep as well.
    again.setup_ps_initialized_state()
    second_new[1].step()
    again.restore(path)
    assert [server.values() for server in second_new] == [(2.0, 2.0), (2.0, 2.0)]


def test_without_a_monitor_everything_is_restored(tmp_path: Path) -> None:
    servers, path = trained(tmp_path, monitored=False)
    saver(servers, monitored=False).restore(path)
    assert [server.values() for server in servers] == [(1.0, 1.0), (1.0, 1.0)]


def test_a_variable_on_no_known_shard_counts_as_fresh() -> None:
    store = LocalStore([])
    store.mark_initialised()
    monitor = PsMonitor([store])
    assert [monitor.is_ps_uninitialized(shard) for shard in (0, None, 1, -1)] == [False, True, True, True]


def shard() -> LocalStore:
    return LocalStore([EmbeddingTable(sgd_table_config(1, name="table"))])


def rows(store: ServerStore) -> torch.Tensor:
    bags = Bags(table="table", ids=IDS.numpy(), offsets=torch.arange(101).numpy())
    return store.lookup([bags])[0][:, 0]


def test_of_a_table_spread_over_servers_only_the_lost_part_comes_back(tmp_path: Path) -> None:
    def server(name: str) -> ParameterServer:
        return ParameterServer(ServerConfig(folder=tmp_path / name, restore_roots=(str(tmp_path),)))

    config = [sgd_table_config(1, name="table")]
    with server("0") as first, server("2") as third:
        with server("1") as second:
            addresses = [first.address, second.address, third.address]
            with ServerStore(addresses, config) as store:
                store.assign("table", IDS, torch.ones(100, 1))
                store.mark_initialised()
                path = PartialRecoverySaver({"store": store}).save(tmp_path / "ckpt")
                assert path is not None
                store.assign("table", IDS, torch.full((100, 1), 2.0))
                owned = [server.ranges for server in store.ownership.servers]
        with (
            server("new") as replacement,
            ServerStore([first.address, replacement.address, third.address], config, replace_lost=True) as recovered,
        ):
            assert [server.ranges for server in recovered.ownership.servers] == owned
            monitor = PsMonitor(server_shards(recovered.links))
            assert [monitor.is_ps_uninitialized(number) for number in range(3)] == [False, True, False]
            lost = rows(recovered) == 0.0
            assert 0 < lost.sum() < 100
            PartialRecoverySaver({"store": recovered}, ps_monitor=monitor).restore(path)
            assert torch.equal(rows(recovered), torch.where(lost, 1.0, 2.0))
            assert recovered.is_initialised()


def test_a_store_that_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    servers, path = trained(tmp_path, monitored=False)
    v0, other = torch.zeros(1), LocalStore([EmbeddingTable(sgd_table_config(2, name="table"))])
    with pytest.raises((CorruptFileError, CheckpointMismatchError)):
        PartialRecoverySaver({"v0": v0, "table0": other}).restore(path)
    with pytest.raises(CheckpointMismatchError, match="'table9' was not found"):
        PartialRecoverySaver({"v0": v0, "table9": shard()}).restore(path)
    assert v0.item() == 0.0
    assert [server.values() for server in servers] == [(2.0, 2.0), (2.0, 2.0)]


def test_stores_saved_again_and_removed(tmp_path: Path) -> None:
    servers = [Server(), Server()]
    kept = PartialRecoverySaver({"v0": servers[0].v, "table0": servers[0].store}, max_to_keep=1)
    for _ in range(2):
        servers[0].step()
        path = kept.save(tmp_path / "s1")
    assert len(list((tmp_path / "s1.assets").iterdir())) == 1
    servers[0].step()
    assert path is not None
    kept.restore(path)
    assert servers[0].values() == (2.0, 2.0)
    kept.save(tmp_path / "s2")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["checkpoint", "s2", "s2.assets"]


def test_stores_are_saved_to_a_disk() -> None:
    with pytest.raises(InvalidArgumentError, match="local disk"):
        PartialRecoverySaver({"store": shard()}).save("memory://partial/ckpt")
