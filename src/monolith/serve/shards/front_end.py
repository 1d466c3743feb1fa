"""A front end: the dense program of an export in this process, its rows on shards, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.errors import ModelNotFoundError
from monolith.optional_packages import import_extra
from monolith.serve.follow import RunWriters
from monolith.serve.manifest import read_export_manifest, version_folder
from monolith.serve.predictor import load
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.shards.addresses import FindShards, ShardAddresses
from monolith.serve.shards.following import FrontEndFollower
from monolith.serve.shards.shard_group import ShardGroup
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_store import open_shard_stores

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["ShardCollector", "ShardedReplica", "sharded_replica"]


class ShardedReplica(Replica):
    """A replica whose rows are on shards."""

    group: ShardGroup
    """Its shards, and how each of them does."""


def sharded_replica(
    name: str,
    export: str | Path,
    shards: str | ShardAddresses | FindShards,
    *,
    config: ShardClientConfig | None = None,
    run: RunWriters | None = None,
) -> ShardedReplica:
    """Load the dense part of an export, with its rows on shards of the same export. Table files are not read.

    Args:
        name: Name of the model.
        export: Folder of an export, or of numbered exports, of which the newest complete one is served.
        shards: Where the shards are, as `open_shard_stores` takes it.
        config: How to ask them.
        run: Follow the dense weights of this run. The shards must follow the same one. None: they stay as exported.

    Raises:
        ConfigError: shards serve another export, or some buckets belong to none or to two of them.
        UnavailableError: some shards did not answer in time.

    Example:
        >>> replica = sharded_replica("clicks", "exported_models", "10.0.0.1:7200,10.0.0.2:7200")  # doctest: +SKIP
        >>> replica.predict({"user": [3], "item": [4]})["ctr"]  # doctest: +SKIP
        tensor([0.0312])
    """
    folder = version_folder(Path(export))
    identity = read_export_manifest(folder, tables=False).checksum
    with ExitStack() as opened:
        stores = opened.enter_context(open_shard_stores(shards, export=identity, config=config))
        predictor = load(folder, store=lambda spec: stores[spec.path])
        follower = None if run is None else FrontEndFollower(predictor, run, stores.group)
        opened.pop_all()
        replica = ShardedReplica(name, predictor, follower=follower, on_close=stores.close)
        replica.group = stores.group
        return replica


class ShardCollector:
    """The metrics of models whose rows are on shards, for `ServingMetrics.collectors`. Other models have none.

    `monolith_shard_events_total` counts requests, retries on other replicas, failures of attempts, requests that no replica
    answered (unanswered) and ids that were read as unseen (missing_ids). `monolith_shard_replica_healthy` is 1 for a replica that
    gets requests, and `monolith_shard_replica_requests` has those that wait for its answer.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Prometheus' client calls it for each scrape."""
        core = import_extra("prometheus_client.metrics_core", extra="serve", purpose="/metrics")
        model = ("model", "version")
        events = core.CounterMetricFamily(
            "monolith_shard_events", "Requests to embedding shards, and what became of them", labels=("what", *model)
        )
        replica = (*model, "shard", "address")
        healthy = core.GaugeMetricFamily(
            "monolith_shard_replica_healthy", "Whether a replica of a shard gets requests", labels=replica
        )
        waiting = core.GaugeMetricFamily(
            "monolith_shard_replica_requests", "Requests that wait for a replica of a shard", labels=replica
        )
        for name, version, group in self._groups():
            for what, count in vars(group.counters).items():
                events.add_metric((what, name, version), count)
            for one in group.status():
                labels = (name, version, "" if one.shard is None else str(one.shard), one.address)
                healthy.add_metric(labels, float(one.healthy))
                waiting.add_metric(labels, one.outstanding)
        yield from (events, healthy, waiting)

    def _groups(self) -> Iterator[tuple[str, str, ShardGroup]]:
        for name in self._repository.names():
            for version in self._repository.versions(name):
                try:
                    served = self._repository.get(name, version)
                except ModelNotFoundError:
                    continue  # it was removed meanwhile
                if isinstance(served, ShardedReplica):
                    yield name, str(version), served.group
