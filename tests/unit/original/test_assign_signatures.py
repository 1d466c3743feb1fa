"""Danger: a push that a serving table takes in part, into the wrong table, or after a newer one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.errors import InvalidArgumentError, ProtocolError
from monolith.original import hashtable_assign, raw_assign
from monolith.original.assign_signatures import ParameterSyncServer, PushHeader, SyncCall, apply_push
from monolith.proto.parameter_sync_pb2 import DeltaEmbeddingHashTable, PushRequest, PushResponse
from monolith.table import EmbeddingTable, Segment, TableConfig
from monolith.table.buckets import NUM_BUCKETS, bucket_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link


def table(name: str, dim: int = 2, *, skip_zero_rows: bool = False) -> EmbeddingTable:
    config = TableConfig(
        name=name, segments=(Segment(dim=dim),), mode="serving", unseen="zeros", skip_zero_rows=skip_zero_rows
    )
    return EmbeddingTable(config)


def delta(name: str, rows: dict[int, list[float]], dim: int = 2, **more: object) -> DeltaEmbeddingHashTable:
    values = [value for row in rows.values() for value in row]
    return DeltaEmbeddingHashTable(unique_id=name, dim_size=dim, fids=list(rows), embeddings=values, **more)


def rows_of(one: EmbeddingTable) -> dict[int, list[float]]:
    entries = one.entries()
    return dict(zip(entries.ids.tolist(), entries.values.tolist(), strict=True))


def test_rows_of_several_tables_are_assigned_by_name() -> None:
    user, item = table("user"), table("item", 1)
    item.assign([7], [[5.0]])
    results = hashtable_assign(
        {"user": [user], "item": [item]},
        {
            "user_id": torch.tensor([1, 2]),
            "user_value": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "item_id": torch.tensor([7]),
            "item_value": torch.tensor([[6.0]]),
        },
    )
    assert {name: int(count) for name, count in results.items()} == {"user_result": 2, "item_result": 1}
    assert rows_of(user) == {1: [1.0, 2.0], 2: [3.0, 4.0]}
    assert rows_of(item) == {7: [6.0]}


def test_a_multi_table_is_divided_by_its_splits() -> None:
    user, item = table("user"), table("item", 1)
    raw_assign(
        {"user": [user], "item": [item]},
        ["item", "user"],
        id=torch.tensor([7, 8, 1]),
        id_split=torch.tensor([0, 2, 3]),
        flat_value=torch.tensor([0.5, 0.25, 1.0, 2.0]),
    )
    assert rows_of(item) == {7: [0.5], 8: [0.25]}
    assert rows_of(user) == {1: [1.0, 2.0]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"user_id": torch.tensor([1])},
        {"user_id": torch.tensor([1]), "user_value": torch.ones(2, 2)},
        {"user_id": torch.tensor([1]), "user_value": torch.ones(1, 3)},
        {"nobody_id": torch.tensor([1]), "nobody_value": torch.ones(1, 2)},
        {"user": torch.tensor([1])},
    ],
)
def test_wrong_inputs_are_refused(wrong: dict[str, torch.Tensor]) -> None:
    user = table("user")
    with pytest.raises(InvalidArgumentError):
        hashtable_assign({"user": [user]}, wrong)
    assert len(user) == 0


@pytest.mark.parametrize(("splits", "numbers"), [([0, 1], 2), ([0, 2, 1], 2), ([1, 1, 1], 2), ([0, 0, 1], 3)])
def test_wrong_splits_change_nothing(splits: list[int], numbers: int) -> None:
    tables = {name: [table(name)] for name in ("user", "item")}
    with pytest.raises(InvalidArgumentError):
        raw_assign(
            tables,
            ["user", "item"],
            id=torch.tensor([1]),
            id_split=torch.tensor(splits),
            flat_value=torch.ones(numbers),
        )
    assert all(len(one[0]) == 0 for one in tables.values())


def test_a_row_of_zeros_is_removed_where_the_table_skips_them() -> None:
    skips, keeps = table("item", skip_zero_rows=True), table("item")
    for one in (skips, keeps):
        one.assign([7], [[1.0, 1.0]])
        apply_push({"item": [one]}, PushRequest(delta_hash_tables=[delta("item", {7: [0.0, 0.0]})]))
    assert len(skips) == 0
    assert rows_of(keeps) == {7: [0.0, 0.0]}


def test_ids_that_training_has_removed_are_removed() -> None:
    item = table("item")
    item.assign([7, 8], np.ones((2, 2), np.float32))
    apply_push({"item": [item]}, PushRequest(delta_hash_tables=[delta("item", {}, erased_fids=[7])]))
    assert list(rows_of(item)) == [8]


def test_a_push_of_whole_buckets_removes_what_it_does_not_have_there() -> None:
    item = table("item")
    ids = np.arange(1, 200)
    item.assign(ids, np.ones((len(ids), 2), np.float32))
    half = NUM_BUCKETS // 2
    below = ids[bucket_of(ids) < half]
    push = delta("item", {int(below[0]): [2.0, 2.0]}, first_bucket=0, end_bucket=half)
    apply_push({"item": [item]}, PushRequest(delta_hash_tables=[push]))
    assert set(rows_of(item)) == {int(below[0]), *ids[bucket_of(ids) >= half].tolist()}
    assert rows_of(item)[int(below[0])] == [2.0, 2.0]


def test_copies_of_a_table_all_get_the_rows() -> None:
    copies = [table("item"), table("item")]
    apply_push({"item": copies}, PushRequest(delta_hash_tables=[delta("item", {7: [1.0, 2.0]})]))
    assert rows_of(copies[0]) == rows_of(copies[1]) == {7: [1.0, 2.0]}


def test_a_table_that_is_not_served_is_reported_and_does_not_stop_the_others() -> None:
    item = table("item")
    request = PushRequest(delta_hash_tables=[delta("new", {1: [0.0, 0.0]}), delta("item", {7: [1.0, 2.0]})])
    response = apply_push({"item": [item]}, request)
    assert (response.update_num, response.error_message) == (1, "tables that are not served here: new")
    assert rows_of(item) == {7: [1.0, 2.0]}


def test_a_push_of_another_dim_changes_no_table() -> None:
    user, item = table("user"), table("item")
    request = PushRequest(delta_hash_tables=[delta("user", {1: [1.0, 1.0]}), delta("item", {7: [1.0]}, dim=1)])
    with pytest.raises(InvalidArgumentError, match="item: expected 1 rows of 2 numbers"):
        apply_push({"user": [user], "item": [item]}, request)
    assert len(user) == len(item) == 0


class Sender:
    """Sends raw pushes to a target."""

    def __init__(self, address: str) -> None:
        self.link = Link(address, timeout=10, max_streams=1)

    def send(self, sequence: int, data: bytes, sender: int = 1) -> Frame:
        header = PushHeader(sender=sender, sequence=sequence).model_dump_json()
        return self.link.call(SyncCall.PUSH, header, [np.frombuffer(data, np.uint8)])


def test_a_late_push_does_not_replace_newer_rows() -> None:
    item = table("item")
    old, new = (PushRequest(delta_hash_tables=[delta("item", {7: [n, n]})]).SerializeToString() for n in (1.0, 2.0))
    with ParameterSyncServer({"item": [item]}) as target:
        sender = Sender(target.address)
        answer = sender.send(2, new)
        assert PushResponse.FromString(answer.arrays[0].tobytes()).update_num == 1
        with pytest.raises(InvalidArgumentError, match="its rows are older"):
            sender.send(1, old)
        assert rows_of(item) == {7: [2.0, 2.0]}
        sender.send(1, old, sender=2)
        sender.link.close()
    assert rows_of(item) == {7: [1.0, 1.0]}


def test_bytes_that_are_no_push_are_refused_and_the_target_stays() -> None:
    item = table("item")
    with ParameterSyncServer({"item": [item]}) as target:
        sender = Sender(target.address)
        with pytest.raises(ProtocolError, match="not a PushRequest"):
            sender.send(1, b"\xff\xff\xff")
        sender.send(2, PushRequest(delta_hash_tables=[delta("item", {7: [1.0, 1.0]})]).SerializeToString())
        sender.link.close()
    assert len(item) == 1
