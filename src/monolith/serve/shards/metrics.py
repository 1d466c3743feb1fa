"""`ShardCollector`: what a front end asks of its shards, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from monolith.cluster.optional_packages import import_extra
from monolith.errors import ModelNotFoundError
from monolith.serve.repository import ModelRepository
from monolith.serve.shards.front_end import ShardedReplica
from monolith.serve.shards.shard_group import ShardGroup

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["ShardCollector"]


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
