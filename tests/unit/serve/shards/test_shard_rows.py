"""Danger: a shard holds rows of other shards, or lacks some of its own, so that ids read as unseen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, OwnershipChangedError
from monolith.ps.protocol.calls import CHANGES, Call
from monolith.ps.protocol.messages import TableRead
from monolith.serve import load
from monolith.serve.shards.messages import ShardCall, ShardDescription, ShardLookup, ShardRead
from monolith.serve.shards.shard_server import ShardCalls, ShardConfig, load_shard
from monolith.table.buckets import bucket_of, bucket_ranges
from monolith.transport.calls import BasicCall
from monolith.transport.errors import decode_error
from monolith.transport.frames import Frame, decode, encode
from serving_shards import IDS, export_rows


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("exports"))


def answer(calls: ShardCalls, call: int, text: str = "{}", arrays: tuple[np.ndarray, ...] = ()) -> Frame:
    frame = decode(calls.answer(encode(call=call, request=1, text=text, arrays=arrays)))
    if frame.call == BasicCall.ERROR:
        raise decode_error(frame.text, "the shard")
    return frame


@pytest.mark.parametrize("shards", [1, 3])
def test_each_shard_has_the_rows_of_its_buckets_and_no_others(export: Path, shards: int) -> None:
    (local,) = load(export).stores.values()
    for shard, buckets in enumerate(bucket_ranges(shards)):
        held = load_shard(export, shard, shards)
        (tables,) = held.collections
        for table in tables.all():
            mine = IDS[torch.from_numpy(np.isin(bucket_of(IDS), np.arange(buckets.start, buckets.stop)))]
            found = torch.cat([entries.ids for entries in table.iter_batches(1000)])
            assert sorted(found.tolist()) == mine.tolist()
            assert len(mine) > 0
            expected = local.lookup_entry(table.name, mine)
            assert torch.equal(table.lookup_entry(mine).values, expected.values)
        assert held.rows == sum(len(table) for table in tables.all())


def test_health_says_what_it_serves(export: Path) -> None:
    calls = ShardCalls(load_shard(export, 1, 4))
    health = json.loads(answer(calls, BasicCall.HEALTH).text)
    described = ShardDescription.from_json(answer(calls, ShardCall.DESCRIBE).text)
    assert (health["version"], health["export"]) == (described.version, described.export)
    assert health["ranges"] == [[1024, 2048]]
    assert (health["shard"], health["shards"], health["tables"], health["lag"]) == (1, 4, 2, None)
    assert health["rows"] == calls.tables.rows > 0


@pytest.mark.parametrize("call", sorted(CHANGES))
def test_every_change_is_refused(export: Path, call: int) -> None:
    calls = ShardCalls(load_shard(export))
    before = calls.tables.rows
    with pytest.raises(InvalidArgumentError, match=f"{Call(call).name.lower()} changes rows"):
        answer(calls, call, '{"table": "user"}', (np.arange(3), np.ones((3, 4), dtype=np.float32)))
    assert calls.tables.rows == before


def lookup_of(export: str, collection: int = 0) -> str:
    read = ShardLookup(tables=(TableRead(table="user", pooling="none"),), export=export, collection=collection)
    return read.model_dump_json()


def test_a_lookup_for_another_export_is_refused(export: Path) -> None:
    calls = ShardCalls(load_shard(export))
    mine = calls.tables.description.export
    ids = np.arange(3)
    assert answer(calls, ShardCall.LOOKUP, lookup_of(mine), (ids,)).arrays[0].shape == (3, 4)
    with pytest.raises(OwnershipChangedError, match="the request is for 000000000000"):
        answer(calls, ShardCall.LOOKUP, lookup_of("0" * 64), (ids,))
    with pytest.raises(OwnershipChangedError):
        answer(calls, ShardCall.STATS, ShardRead(export="0" * 64, collection=0).model_dump_json())
    with pytest.raises(InvalidArgumentError, match="collection: expected below 1, got 7"):
        answer(calls, ShardCall.LOOKUP, lookup_of(mine, 7), (ids,))


def test_a_damaged_export_is_refused(export: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError):
        load_shard(tmp_path)
    with pytest.raises(InvalidArgumentError, match="expected the folder of an export"):
        load_shard(tmp_path / "nothing")


def test_a_shard_that_there_is_not(export: Path) -> None:
    with pytest.raises(ConfigError, match="shard must be below shards"):
        ShardConfig(export=export, shard=2, shards=2)
