"""Danger: replicas of shards fail, or rows are missing in answers, and no metric shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith.serve import load
from monolith.serve.metrics import ServingMetrics
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.shards.front_end import ShardCollector, sharded_replica
from monolith.serve.shards.lookup_scope import lookup_scope
from monolith.serve.shards.shard_replica import ShardClientConfig
from serving_shards import export_rows, shard_servers

BATCH = {"user": torch.arange(100), "item": torch.arange(100)}


def test_what_is_asked_of_shards_is_counted(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    export = export_rows(tmp_path)
    repository = ModelRepository()
    repository.add(Replica("plain", load(export)))
    config = ShardClientConfig(start_secs=0.0, timeout=10.0, partial="initial")
    with shard_servers(export, 2) as (one, two):
        repository.add(sharded_replica("clicks", export, f"{one.address};{two.address}", config=config))
        try:
            metrics = ServingMetrics(repository)
            metrics.collectors.append(ShardCollector(repository))
            served = repository.get("clicks")
            served.predict(BATCH)
            two.close()
            with lookup_scope() as report:
                served.predict(BATCH)
            assert report.parameters() == {"monolith_missing_ids": report.missing_ids}
            text = metrics.exposition()[0].decode()
        finally:
            repository.close()
    samples = {
        (sample.name.removeprefix("monolith_shard_"), *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("monolith_shard_")
    }
    model = (("model", "clicks"), ("version", export.name))
    assert all(model[0] in labels for labels in samples), "the other model has no shards"
    assert samples["events_total", *model, ("what", "missing_ids")] == report.missing_ids > 0
    assert samples["events_total", *model, ("what", "unanswered")] >= 1
    for shard, (server, healthy) in enumerate(((one, 1.0), (two, 0.0))):
        labels = (("address", server.address), model[0], ("shard", str(shard)), model[1])
        assert samples["replica_healthy", *labels] == healthy
        assert samples["replica_requests", *labels] == 0
