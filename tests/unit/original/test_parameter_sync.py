"""Danger: rows that training has changed never reach a serving target, or reach it with values of an earlier moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from followed_tables import DIM, Buckets, rows_of, table, train
from monolith.errors import InvalidArgumentError
from monolith.follow import Feed
from monolith.original import ParameterSyncClient, ParameterSyncServer, assign_signatures, split_request
from monolith.original import parameter_sync as module
from monolith.proto.parameter_sync_pb2 import ClientConfig, DeltaEmbeddingHashTable, PushRequest, PushResponse
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.server import ListenConfig


class Sync:
    """A process that trains, and targets that serve what it pushes."""

    def __init__(self, stack: ExitStack, **options: int) -> None:
        self.stack, self.now = stack, 0.0
        self.tables = {"item": table(), "user": table("user")}
        self.buckets = Buckets()
        self.feed = Feed(lambda: self.tables, every=3600, owner=self.buckets)
        self.feed.start()
        stack.callback(self.feed.close)
        self.client = stack.enter_context(ParameterSyncClient(self.feed, clock=lambda: self.now, **options))

    def target(self, port: int = 0) -> tuple[ParameterSyncServer, dict[str, EmbeddingTable]]:
        tables = {name: table(name, mode="serving") for name in self.tables}
        server = ParameterSyncServer({name: [one] for name, one in tables.items()}, ListenConfig(port=port))
        return self.stack.enter_context(server), tables

    def push(self, *targets: str, signature: str = "hashtable_assign", timeout: int = 10_000) -> list[int]:
        self.feed.drain()
        config = ClientConfig(targets=targets, signature_name=signature, timeout_in_ms=timeout)
        return [response.status_code for response in self.client.sync(config).responses]

    def train(self, ids: list[int], seed: int = 0) -> None:
        for one in self.tables.values():
            train(one, ids, seed)

    def same(self, tables: dict[str, EmbeddingTable]) -> bool:
        return all(rows_of(tables[name]) == rows_of(one) for name, one in self.tables.items())


@pytest.fixture
def sync() -> Iterator[Sync]:
    with ExitStack() as stack:
        yield Sync(stack)


def test_a_new_target_gets_the_rows_from_before_it_came(sync: Sync) -> None:
    sync.train(list(range(100)))
    target, tables = sync.target()
    assert sync.push(target.address) == [0]
    assert sync.same(tables)


@pytest.mark.parametrize("signature", ["hashtable_assign", "multi/raw_assign"])
def test_touched_rows_are_pushed_and_nothing_else(sync: Sync, signature: str) -> None:
    target, tables = sync.target()
    sync.train(list(range(100)))
    sync.push(target.address, signature=signature)
    sync.train([3, 4], seed=1)
    sync.feed.drain()
    result = sync.client.sync(ClientConfig(targets=[target.address], signature_name=signature, timeout_in_ms=10_000))
    assert [response.update_num for response in result.responses] == [4]
    assert sync.same(tables)
    assert sync.push(target.address) == []


def test_the_pushed_value_is_the_newest_not_that_of_the_touch(sync: Sync) -> None:
    target, tables = sync.target()
    sync.push(target.address)
    train(sync.tables["item"], [7], seed=1)
    sync.feed.drain()
    train(sync.tables["item"], [7], seed=2)  # after the feed has taken the change
    sync.client.sync(ClientConfig(targets=[target.address], timeout_in_ms=10_000))
    assert sync.same(tables)


def test_removed_rows_leave_the_target(sync: Sync) -> None:
    target, tables = sync.target()
    sync.train([1, 2, 3])
    sync.push(target.address)
    sync.tables["item"].erase([2])
    sync.push(target.address)
    assert sorted(rows_of(tables["item"])) == [1, 3]


def test_a_failed_push_loses_nothing(sync: Sync) -> None:
    target, tables = sync.target()
    sync.train([1, 2])
    sync.push(target.address)
    config = target._listens.model_copy(update={"port": target.port})
    served = {name: [one] for name, one in tables.items()}
    target.close()
    sync.train([2, 3], seed=1)
    assert sync.push(target.address, timeout=50) == [14]
    assert sync.client.lacking == {target.address: True}
    sync.stack.enter_context(ParameterSyncServer(served, config))
    sync.train([4], seed=2)
    sync.now += 1.5
    for _ in range(2):  # the first says that it was started again
        sync.push(target.address)
    assert sync.same(tables)
    assert sync.client.lacking == {target.address: False}


def refuse_pushes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let targets accept so many pushes, and refuse all others."""
    applied = assign_signatures.apply_push
    left = iter(range(after))

    def apply(*arguments: Any) -> PushResponse:  # noqa: ANN401
        if next(left, None) is None:
            raise InvalidArgumentError("the test refuses it")
        return applied(*arguments)

    monkeypatch.setattr(assign_signatures, "apply_push", apply)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_target_that_refuses_a_push_gets_the_same_ids_later(
    sync: Sync, monkeypatch: pytest.MonkeyPatch, accepted: int
) -> None:
    target, tables = sync.target()
    sync.train(list(range(200)))
    sync.push(target.address)
    monkeypatch.setattr(module, "READ_BYTES", 2000)  # so that it takes several pushes
    sync.train(list(range(100)), seed=1)
    with monkeypatch.context() as refusing:
        refuse_pushes(refusing, accepted)
        assert sync.push(target.address) == [3]
    assert not sync.same(tables)
    sync.now += 1.5
    assert sync.push(target.address) == [0]
    assert sync.same(tables)


def test_a_push_of_all_rows_goes_on_where_it_failed(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", 1000)
    target, tables = sync.target()
    sync.train(list(range(500)))
    with monkeypatch.context() as refusing:
        refuse_pushes(refusing, 5)
        assert sync.push(target.address) == [3]
    before = len(tables["user"])
    assert 0 < before < 500
    sync.now += 1.5
    result = sync.client.sync(ClientConfig(targets=[target.address], timeout_in_ms=10_000))
    assert [response.update_num for response in result.responses] == [1000 - before]
    assert sync.same(tables)


def test_a_target_that_failed_is_left_alone_for_a_while(sync: Sync) -> None:
    target, _ = sync.target()
    target.close()
    sync.train([1])
    assert sync.push(target.address, timeout=50) == [14]
    assert sync.push(target.address, timeout=50) == []
    sync.now += 1.1
    assert sync.push(target.address, timeout=50) == [14]
    sync.now += 1.1
    assert sync.push(target.address, timeout=50) == []


def test_the_pause_is_short_again_after_a_push_that_succeeded(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = sync.target()
    for _ in range(3):
        sync.train([1], seed=int(sync.now))
        with monkeypatch.context() as refusing:
            refuse_pushes(refusing, 0)
            assert sync.push(target.address) == [3]
        sync.now += 1.1
        assert sync.push(target.address) == [0]


def test_a_target_that_was_started_again_gets_all_rows(sync: Sync) -> None:
    target, _ = sync.target()
    sync.train(list(range(50)))
    sync.push(target.address)
    port = target.port
    target.close()
    _, tables = sync.target(port=port)
    tables["item"].assign([999], np.ones((1, DIM), np.float32))  # of an old export: training has removed it since
    sync.train([1], seed=1)
    for _ in range(2):
        sync.push(target.address)
    assert sync.same(tables)


def test_one_dead_target_does_not_keep_rows_from_another(sync: Sync) -> None:
    dead, _ = sync.target()
    dead.close()
    target, tables = sync.target()
    sync.train([1, 2, 3])
    assert sorted(sync.push(dead.address, target.address, timeout=200)) == [0, 14]
    assert sync.same(tables)


def test_too_many_touched_ids_become_a_push_of_all_rows() -> None:
    with ExitStack() as stack:
        sync = Sync(stack, capacity=10)
        target, tables = sync.target()
        sync.push(target.address)
        for number in range(20):
            sync.train([number], seed=number)
            sync.feed.drain()
        sync.push(target.address)
        assert sync.same(tables)


def test_changes_that_the_feed_no_longer_keeps_become_a_push_of_all_rows(
    sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, tables = sync.target()
    sync.push(target.address)
    monkeypatch.setattr(sync.feed._kept, "_max_bytes", 1)
    for number in range(5):
        sync.train([number], seed=number)
        sync.feed.drain()
    sync.push(target.address)
    assert sync.same(tables)


def test_rows_that_another_process_owns_now_are_not_pushed(sync: Sync) -> None:
    target, tables = sync.target()
    sync.push(target.address)
    sync.train(list(range(100)))
    sync.feed.drain()
    sync.buckets.owned[: NUM_BUCKETS // 2] = False
    assert sync.push(target.address) == [0]
    assert 0 < len(tables["item"]) < 100


def test_a_large_push_is_read_and_sent_in_parts(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    target, tables = sync.target()
    sync.push(target.address)
    monkeypatch.setattr(module, "READ_BYTES", 1000)
    sync.train(list(range(500)))
    sync.push(target.address)
    assert sync.same(tables)


def test_a_vanished_target_is_forgotten(sync: Sync) -> None:
    one, _ = sync.target()
    other, tables = sync.target()
    sync.train([1])
    sync.push(one.address, other.address)
    sync.train([2])
    assert sync.push(other.address) == [0]
    assert list(sync.client.lacking) == [other.address]
    assert sync.same(tables)


def request(counts: list[int]) -> PushRequest:
    return PushRequest(
        model_name="ps_0",
        signature_name="hashtable_assign",
        timeout_in_ms=3000,
        delta_hash_tables=[
            DeltaEmbeddingHashTable(
                unique_id=f"t{n}", dim_size=2, fids=range(count), embeddings=np.arange(2 * count).tolist()
            )
            for n, count in enumerate(counts)
        ],
    )


def test_a_request_of_4_mib_is_one_part_and_a_larger_one_two() -> None:
    whole = request([7])
    assert split_request(whole, limit=whole.ByteSize()) == [whole]
    assert len(split_request(whole, limit=whole.ByteSize() - 1)) == 2
    assert module.MAX_REQUEST_BYTES == 4194304


def test_the_last_part_takes_the_remainder_and_every_part_has_all_tables() -> None:
    whole = request([11, 2])
    parts = split_request(whole, limit=whole.ByteSize() // 3 + 1)
    assert [[len(delta.fids) for delta in part.delta_hash_tables] for part in parts] == [[3, 0], [3, 0], [5, 2]]
    for part in parts:
        assert (part.model_name, part.signature_name, part.timeout_in_ms) == ("ps_0", "hashtable_assign", 3000)
    for table_at in range(2):
        joined = [value for part in parts for value in part.delta_hash_tables[table_at].embeddings]
        assert joined == list(whole.delta_hash_tables[table_at].embeddings)


def test_the_wire_is_the_originals() -> None:
    small = PushRequest(
        model_name="m",
        signature_name="s",
        timeout_in_ms=3000,
        delta_hash_tables=[DeltaEmbeddingHashTable(unique_id="t", dim_size=1, fids=[7], embeddings=[0.5])],
    )
    assert small.SerializeToString().hex() == "0a016d1201731a0e0a017410011a010722040000003f20b817"
