"""A front end: the dense program of an export in this process, its rows on shards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from monolith.serve.follow import RunWriters
from monolith.serve.manifest import read_export_manifest, version_folder
from monolith.serve.predictor import load
from monolith.serve.replica import Replica
from monolith.serve.shards.addresses import FindShards, ShardAddresses
from monolith.serve.shards.following import FrontEndFollower
from monolith.serve.shards.shard_group import ShardGroup
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_store import open_shard_stores

__all__ = ["ShardedReplica", "sharded_replica"]


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
