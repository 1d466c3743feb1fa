"""Danger: a front end answers otherwise than one process would, needs the table files, or serves shards of another export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from monolith.errors import ConfigError, UnavailableError
from monolith.serve import load
from monolith.serve.shards.front_end import sharded_replica
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_server import ShardConfig, ShardServer
from serving_shards import export_rows, shard_servers

BATCH = {"user": torch.arange(2990, 3010), "item": torch.arange(20)}
QUICK = ShardClientConfig(start_secs=0.0, timeout=5.0)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_rows(tmp_path_factory.mktemp("exports"))


def test_predictions_equal_those_of_one_process_without_table_files(export: Path, tmp_path: Path) -> None:
    expected = load(export).predict(BATCH)["ctr"]
    small = tmp_path / "export"
    shutil.copytree(export, small, ignore=shutil.ignore_patterns("*.table"))
    with shard_servers(export, 2) as (one, two):
        replica = sharded_replica("clicks", small, f"{one.address},{two.address}", config=QUICK)
        try:
            assert torch.equal(replica.predict(BATCH)["ctr"], expected)
            assert replica.stats()["user"].rows == 3000
            assert replica.version == int(export.name)
            two.close()
            with pytest.raises(UnavailableError, match=two.address):
                replica.predict(BATCH)
        finally:
            replica.close()


def test_shards_of_another_export_are_refused(export: Path, tmp_path: Path) -> None:
    other = export_rows(tmp_path, seed=6)
    with (
        ShardServer(ShardConfig(export=other)) as server,
        pytest.raises(ConfigError, match="expected export"),
    ):
        sharded_replica("clicks", export, server.address, config=QUICK)
