"""Danger: callers of the original's remote predict get other names, shapes, versions or failures than they know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from monolith.errors import (
    DeadlineExceededError,
    DiscoveryError,
    InvalidArgumentError,
    OwnershipChangedError,
    UnavailableError,
)
from monolith.original.remote_predict import AgentHeartbeat, StatusCode, ps_of, remote_predict
from monolith.serve import load
from monolith.serve.shards.shard_server import ShardServer
from monolith.table import Store
from serving_shards import IDS, export_rows, shard_servers

LONG = 30_000


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def local(export: Path) -> Store:
    (store,) = load(export).stores.values()
    return store


@pytest.fixture(scope="module")
def servers(export: Path) -> Iterator[list[ShardServer]]:
    with shard_servers(export, 2) as running:
        yield running


@pytest.fixture
def agent(servers: list[ShardServer]) -> Iterator[AgentHeartbeat]:
    opened = AgentHeartbeat(lambda: {f"clicks:ps_{at}": [server.address] for at, server in enumerate(servers)})
    yield opened
    opened.close()


def own_ids(number: int, count: int) -> torch.Tensor:
    return IDS[torch.from_numpy(ps_of(IDS, 2) == number)][:count]


def test_model_name_none_is_a_value_error(agent: AgentHeartbeat) -> None:
    with pytest.raises(ValueError, match="model_name"):
        remote_predict(["user"], [IDS], ["user"], agent=agent, model_name=None)


@pytest.mark.parametrize("number", [0, 1])
def test_lookup_returns_a_matrix_for_each_table(agent: AgentHeartbeat, local: Store, number: int) -> None:
    ids = {"user": own_ids(number, 5), "item": own_ids(number, 3)}
    found = remote_predict(
        list(ids),
        list(ids.values()),
        ["item", "user"],
        agent=agent,
        model_name=f"clicks:ps_{number}",
        max_rpc_deadline_millis=LONG,
    )
    assert (found.status_code, found.status_error_message) == (StatusCode.OK, "")
    item, user = found.output_tensors
    assert torch.equal(user, local.lookup_entry("user", ids["user"]).values)
    assert torch.equal(item, local.lookup_entry("item", ids["item"]).values)


def test_raw_lookup_returns_one_vector(agent: AgentHeartbeat, local: Store) -> None:
    users, items = own_ids(0, 4), own_ids(0, 2)
    found = remote_predict(
        ["id", "id_split"],
        [torch.cat([users, items]), torch.tensor([0, 4, 6])],
        ["flat_emb"],
        agent=agent,
        model_name="clicks:ps_0",
        signature_name="raw_lookup",
        max_rpc_deadline_millis=LONG,
    )
    rows = [local.lookup_entry("user", users).values, local.lookup_entry("item", items).values]
    assert torch.equal(found.output_tensors[0], torch.cat([row.reshape(-1) for row in rows]))


@pytest.mark.parametrize("splits", [[0, 4], [0, 7, 6], [1, 4, 6], [0, 4, 5]])
def test_wrong_splits(agent: AgentHeartbeat, splits: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="id_split"):
        remote_predict(
            ["id", "id_split"],
            [IDS[:6], torch.tensor(splits)],
            ["flat_emb"],
            agent=agent,
            model_name="clicks:ps_0",
            signature_name="raw_lookup",
            max_rpc_deadline_millis=LONG,
        )


def test_versions(agent: AgentHeartbeat, servers: list[ShardServer]) -> None:
    def ask(version: int) -> StatusCode:
        return remote_predict(
            ["user"],
            [IDS[:1]],
            ["user"],
            agent=agent,
            model_name="clicks:ps_0",
            model_version=version,
            fail_op_on_rpc_error=False,
            max_rpc_deadline_millis=LONG,
        ).status_code

    served = servers[0].tables.description.version
    assert ask(served + 1) is StatusCode.NOT_FOUND
    assert ask(served) is StatusCode.OK
    assert ask(-1) is StatusCode.OK


def failing(agent: AgentHeartbeat, *, fail: bool, millis: int = LONG, **options: str) -> object:
    return remote_predict(
        ["user"],
        [IDS[:1]],
        ["user", "item"],
        agent=agent,
        model_name="clicks:ps_0",
        fail_op_on_rpc_error=fail,
        max_rpc_deadline_millis=millis,
        **options,
    )


def gone(address: str) -> Callable[[], Mapping[str, Sequence[str]]]:
    return lambda: {"clicks:ps_0": [address]}


def test_failures_are_raised_or_returned(export: Path) -> None:
    with shard_servers(export, 1) as (server,):
        address = server.address
    agent = AgentHeartbeat(gone(address))
    try:
        with pytest.raises(UnavailableError, match=address):
            failing(agent, fail=True)
        found = failing(agent, fail=False)
        assert found.status_code is StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert found.status_error_message  # type: ignore[attr-defined]
        assert [list(tensor.shape) for tensor in found.output_tensors] == [[], []]  # type: ignore[attr-defined]
    finally:
        agent.close()


def test_the_deadline_is_applied(agent: AgentHeartbeat) -> None:
    with pytest.raises(DeadlineExceededError):
        failing(agent, fail=True, millis=0)


def test_a_model_that_is_not_known(agent: AgentHeartbeat) -> None:
    with pytest.raises(UnavailableError, match="no address of 'other:ps_0' is known; known are clicks:ps_0"):
        remote_predict(["user"], [IDS[:1]], ["user"], agent=agent, model_name="other:ps_0")


def test_an_unknown_output(agent: AgentHeartbeat) -> None:
    with pytest.raises(InvalidArgumentError, match="lookup returns user, not 'item'"):
        failing(agent, fail=True)


def test_names_of_the_first_agents(servers: list[ShardServer], local: Store) -> None:
    agent = AgentHeartbeat(lambda: {f"ps:{at}": [server.address] for at, server in enumerate(servers)})
    try:
        assert agent.api_version == 0
        ids = own_ids(1, 3)
        found = remote_predict(
            ["user"],
            [ids],
            ["user"],
            agent=agent,
            model_name="clicks:ps_1",
            old_model_name="ps_1",
            max_rpc_deadline_millis=LONG,
        )
        assert torch.equal(found.output_tensors[0], local.lookup_entry("user", ids).values)
    finally:
        agent.close()


def test_a_failed_heartbeat_keeps_the_addresses(servers: list[ShardServer]) -> None:
    good = {"clicks:ps_0": [servers[0].address]}
    answers: list[Mapping[str, Sequence[str]] | Exception] = [good, DiscoveryError("down"), {}, {"clicks:ps_0": []}]
    now = [0.0]

    def query() -> Mapping[str, Sequence[str]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    agent = AgentHeartbeat(query, clock=lambda: now[0])
    try:
        while answers:
            now[0] += 15.0
            assert [replica.address for replica in agent.replicas("clicks:ps_0")] == [servers[0].address]
    finally:
        agent.close()


def test_another_replica_is_asked(export: Path, servers: list[ShardServer], local: Store) -> None:
    with shard_servers(export, 2) as (dead, _):
        address = dead.address
    agent = AgentHeartbeat(lambda: {"clicks:ps_0": [address, servers[0].address]})
    try:
        ids = own_ids(0, 3)
        for _ in range(4):
            (rows,) = remote_predict(
                ["user"], [ids], ["user"], agent=agent, model_name="clicks:ps_0", max_rpc_deadline_millis=LONG
            ).output_tensors
            assert torch.equal(rows, local.lookup_entry("user", ids).values)
    finally:
        agent.close()


def test_errors_have_a_class(agent: AgentHeartbeat) -> None:
    with pytest.raises(OwnershipChangedError, match="model_version"):
        remote_predict(
            ["user"],
            [IDS[:1]],
            ["user"],
            agent=agent,
            model_name="clicks:ps_0",
            model_version=1,
            max_rpc_deadline_millis=LONG,
        )
