"""Danger: a request that was split by an old map is applied, or a transfer takes effect twice, late, or where it must not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, InvalidArgumentError, OwnershipChangedError, ServerError
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ps.client.server_group import ServerGroup
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets, InstallBuckets, InstalledTable, MoveBuckets
from monolith.ps.protocol.messages import Apply, DeclaredTable, Lookup, Push, TableGradient, TableRead, TableWrite
from monolith.ps.server.ledger_state import ledger_text
from monolith.ps.server.pushes import PushLedger
from monolith.table import Bags
from monolith.table.buckets import bucket_of
from monolith.testing import sgd_table_config
from monolith.transport.link import Link

TABLE = sgd_table_config(1, name="t")
IDS = np.arange(300)


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    with ParameterServer() as made:
        yield made


@pytest.fixture
def store(server: ParameterServer) -> Iterator[ServerStore]:
    with ServerStore([server.address], [TABLE]) as made:
        yield made


def asked(link: Link) -> Buckets:
    return Buckets.from_json(link.call(Call.BUCKETS).text)


def values(link: Link, ids: np.ndarray = IDS) -> np.ndarray:
    text = Lookup(tables=(TableRead(table="t", pooling="none"),)).model_dump_json()
    return link.call(Call.LOOKUP, text, [ids]).arrays[0][:, 0]


def pushed(store: ServerStore, sequence: int) -> Push:
    return Push(worker=store.worker, epoch=store.epoch, sequence=sequence)


@pytest.mark.parametrize("version", [0, 2, 2**63 - 1])
def test_a_change_of_another_version_is_refused_and_changes_nothing(store: ServerStore, version: int) -> None:
    (link,) = store.links
    ones = np.ones((len(IDS), 1), dtype=np.float32)
    gradient = (TableGradient(table="t", pooling="none"),)
    write = TableWrite(push=pushed(store, 1000), table="t", map=version)
    apply = Apply(push=pushed(store, 1001), tables=gradient, map=version)
    for call, text, arrays in [
        (Call.ASSIGN, write, [IDS, ones]),
        (Call.ASSIGN_ADD, write, [IDS, ones]),
        (Call.REINITIALIZE, write, [IDS]),
        (Call.APPLY_GRADIENTS, apply, [IDS, ones]),
    ]:
        with pytest.raises(OwnershipChangedError, match="version 1"):
            link.call(call, text.model_dump_json(), arrays)
    assert store.stats()["t"].rows == 0
    # The number is taken: the same push can never count later, whatever the version is then.
    right = TableWrite(push=pushed(store, 1000), table="t", map=1)
    with pytest.raises(OwnershipChangedError):
        link.call(Call.ASSIGN, right.model_dump_json(), [IDS, ones])


def test_a_lookup_of_another_version_is_refused_and_one_without_is_answered(store: ServerStore) -> None:
    (link,) = store.links
    text = Lookup(tables=(TableRead(table="t", pooling="none"),), map=7).model_dump_json()
    with pytest.raises(OwnershipChangedError):
        link.call(Call.LOOKUP, text, [IDS])
    assert len(values(link)) == len(IDS)


def test_rows_that_are_given_away_while_they_are_read_are_not_answered(
    server: ParameterServer, store: ServerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned, tables = server._dispatcher._owned, server._dispatcher._state.tables
    read = tables.lookup

    def read_slowly(*arguments: object) -> None:
        owned.begin_giving(destination="127.0.0.1:9", server=5, durable=False, buckets=(0, 10))
        read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "lookup", read_slowly)
    text = Lookup(tables=(TableRead(table="t", pooling="none"),), map=1).model_dump_json()
    with pytest.raises(OwnershipChangedError):
        store.links[0].call(Call.LOOKUP, text, [IDS])


def test_who_does_not_know_of_the_group_may_read_but_not_write(server: ParameterServer, store: ServerStore) -> None:
    store.assign("t", [1], torch.ones(1, 1))
    with ServerGroup([server.address]) as alone:
        (link,) = alone.links
        assert values(link, np.array([1])) == 1.0
        write = TableWrite(push=alone.next_push(), table="t")
        with pytest.raises(OwnershipChangedError):
            link.call(Call.ASSIGN, write.model_dump_json(), [np.array([1]), np.zeros((1, 1), np.float32)])


def test_an_answer_that_was_lost_is_given_again_also_if_buckets_have_moved_since(store: ServerStore) -> None:
    (link,) = store.links
    text = TableWrite(push=pushed(store, 500), table="t", map=1).model_dump_json()
    arrays = [IDS, np.ones((len(IDS), 1), dtype=np.float32)]
    link.call(Call.ASSIGN_ADD, text, arrays)
    with ParameterServer() as other:
        store.rebalance([link.address, other.address])
        # Refusing it would make the worker send it again to the new owner, where it has arrived with the rows.
        link.call(Call.ASSIGN_ADD, text, arrays)
        (seen,) = store.lookup([Bags(table="t", ids=IDS, offsets=np.arange(301))])
        assert seen.eq(1.0).all()


def test_servers_that_own_something_else_than_asked_for_are_taken_as_they_are(server: ParameterServer) -> None:
    with ParameterServer() as other:
        both = [server.address, other.address]
        with ServerStore(both, [TABLE], ranges=[range(100), range(100, 4096)]) as first, ServerStore(both) as second:
            assert second.ownership == first.ownership
        with pytest.raises(ConfigError, match=r"none of .* owns the buckets \[\(100, 4096\)\]"):
            ServerStore([server.address])


def transfer(
    server: ParameterServer, number: int, row: float, giver: int = 77
) -> tuple[InstallBuckets, list[np.ndarray]]:
    """The ids of the first half of the buckets with the value `row`."""
    with ServerGroup([server.address]) as store:
        told = asked(store.links[0])
    ids = IDS[bucket_of(IDS) < 2048]
    table = InstalledTable(declared=DeclaredTable(config=TABLE), max_event_time=5, updates=0, hashnet_scales=(1.0,))
    install = InstallBuckets(
        giver=giver,
        number=number,
        server=told.server,
        rebalance=0,
        buckets=(0, 2048),
        tables=(table,),
        positions=ledger_text(PushLedger()),
    )
    rows = np.full((len(ids), 1), row, dtype=np.float32).view(np.uint8).reshape(len(ids), -1)
    return install, [ids, np.full(len(ids), 5), rows]


def test_a_transfer_counts_once_however_often_and_late_it_comes(server: ParameterServer) -> None:
    with ServerGroup([server.address]) as alone:
        (link,) = alone.links
        first, arrays = transfer(server, 1, 3.0)
        answers = [link.call(Call.INSTALL_BUCKETS, first.model_dump_json(), arrays).text for _ in range(3)]
        assert [json.loads(text)["again"] for text in answers] == [False, True, True]
        assert asked(link).ranges == ((0, 2048),)
        write = TableWrite(push=Push(worker=alone.worker, epoch=alone.epoch, sequence=1), table="t", map=1)
        link.call(Call.ASSIGN, write.model_dump_json(), [arrays[0], np.full((len(arrays[0]), 1), 9, np.float32)])
        # Rows that were trained since, and rows that were given away since: what comes late brings neither back.
        link.call(Call.INSTALL_BUCKETS, first.model_dump_json(), arrays)
        assert (values(link, arrays[0]) == 9).all()
        with ParameterServer() as other:
            move = MoveBuckets(buckets=(0, 2048), taker=other.address, rebalance=5, wait=30.0)
            link.call(Call.MOVE_BUCKETS, move.model_dump_json())
            link.call(Call.INSTALL_BUCKETS, first.model_dump_json(), arrays)
            assert asked(link).ranges == ()
            assert alone.stats()["t"].rows == 0


def test_a_transfer_that_was_refused_stays_refused(server: ParameterServer) -> None:
    with ServerGroup([server.address]) as alone:
        (link,) = alone.links
        good, arrays = transfer(server, 4, 3.0)
        wrong = good.model_copy(update={"buckets": (0, 10)})
        with pytest.raises(InvalidArgumentError, match="expected ids of the buckets"):
            link.call(Call.INSTALL_BUCKETS, wrong.model_dump_json(), arrays)
        with pytest.raises(InvalidArgumentError, match="refused before"):
            link.call(Call.INSTALL_BUCKETS, good.model_dump_json(), arrays)
        assert asked(link).ranges == ()
        assert alone.stats()["t"].rows == 0
        later, arrays = transfer(server, 5, 3.0)
        link.call(Call.INSTALL_BUCKETS, later.model_dump_json(), arrays)


@pytest.mark.parametrize("wrong", ["rows", "times", "dtype", "count", "scales", "table"])
def test_a_malformed_transfer_is_refused_as_a_whole(server: ParameterServer, wrong: str) -> None:
    with ServerGroup([server.address], [TABLE]) as alone:
        (link,) = alone.links
        install, (ids, times, rows) = transfer(server, 1, 3.0)
        arrays = {
            "rows": [ids, times, rows[:, :2]],
            "times": [ids, times + 2**40, rows],
            "dtype": [ids, times, rows.astype(np.float32)],
            "count": [ids, times],
        }.get(wrong, [ids, times, rows])
        (table,) = install.tables
        if wrong == "scales":
            table = table.model_copy(update={"hashnet_scales": (1.0, 1.0)})
        if wrong == "table":
            table = table.model_copy(update={"declared": DeclaredTable(config=sgd_table_config(2, name="t"))})
        text = install.model_copy(update={"tables": (table,)}).model_dump_json()
        with pytest.raises((InvalidArgumentError, ConfigError)):
            link.call(Call.INSTALL_BUCKETS, text, arrays)
        assert asked(link).ranges == ()
        assert alone.stats()["t"].rows == 0


def test_buckets_that_are_owned_are_not_installed_over(store: ServerStore, server: ParameterServer) -> None:
    store.assign("t", IDS, torch.ones(len(IDS), 1))
    (link,) = store.links
    install, arrays = transfer(server, 1, 3.0)
    with pytest.raises(InvalidArgumentError, match="owned here"):
        link.call(Call.INSTALL_BUCKETS, install.model_dump_json(), arrays)
    assert (values(link) == 1).all()


@pytest.mark.parametrize(
    "text",
    [
        '{"ranges": [[0, 4097]]}',
        '{"ranges": [[0, 10], [5, 20]]}',
        '{"ranges": [[0, 9223372036854775808]]}',
        '{"ranges": "all"}',
        "{}",
    ],
)
def test_hostile_claims_and_moves_get_an_error(server: ParameterServer, text: str) -> None:
    with ServerGroup([server.address]) as alone:
        (link,) = alone.links
        for call in (Call.OWN_BUCKETS, Call.MOVE_BUCKETS, Call.INSTALL_BUCKETS):
            with pytest.raises(ConfigError):
                link.call(call, text)
        assert asked(link).version == 0


def test_moving_what_is_not_owned_or_to_nobody_or_to_oneself(store: ServerStore, server: ParameterServer) -> None:
    (link,) = store.links

    def move(taker: str, buckets: tuple[int, int] | None = (0, 10)) -> str:
        asked_for = MoveBuckets(buckets=buckets, taker=taker, rebalance=5, wait=30.0)
        return link.call(Call.MOVE_BUCKETS, asked_for.model_dump_json()).text

    with pytest.raises(InvalidArgumentError, match="source itself"):
        move(server.address)
    assert "127.0.0.1:9" in json.loads(move("127.0.0.1:9"))["missing"]
    assert asked(link).version == 1
    with ParameterServer() as other:
        assert json.loads(move(other.address))["buckets"] == [0, 10]
        assert json.loads(move(other.address))["buckets"] is None
        assert asked(link).ranges == ((10, 4096),)
        # What is delayed until whoever moved has done moves nothing any more.
        assert json.loads(move(other.address, None))["buckets"] is None
        with pytest.raises(InvalidArgumentError, match="has ended"):
            move(other.address, (0, 20))
        assert asked(link).ranges == ((10, 4096),)


def test_a_taker_without_room_leaves_everything_with_the_giver(store: ServerStore) -> None:
    store.assign("t", IDS, torch.ones(len(IDS), 1))
    with ParameterServer(ServerConfig(memory_limit=1)) as small, pytest.raises(ServerError, match="limit"):
        store.rebalance([store.links[0].address, small.address])
    (seen,) = store.lookup([Bags(table="t", ids=IDS, offsets=np.arange(301))])
    assert seen.eq(1.0).all()
    assert store.ownership.holes() == ()
    store.assign_add("t", IDS, torch.ones(len(IDS), 1))
    assert store.stats()["t"].rows == len(IDS)
