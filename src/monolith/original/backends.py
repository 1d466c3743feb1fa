"""Where the targets of parameter sync are: the original's `SyncBackend`, over the service discovery of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.errors import InvalidArgumentError
from monolith.original.assign_signatures import HASHTABLE_ASSIGN
from monolith.proto.parameter_sync_pb2 import ClientConfig
from monolith.serve.shards.addresses import open_discovery

__all__ = ["DiscoveryBackend", "SYNC_SERVICE", "SyncBackend", "SyncTargets", "refresh_sync_config"]

SYNC_SERVICE = "sync"
"""Name of the service. Replica r of the target of ps i is entry r of `sync_ps_<i>`."""
SYNC_TIMEOUT_MS = 3000
"""Milliseconds that a push may take."""

SyncTargets = tuple[str, Sequence[str] | Mapping[str, ClientConfig.TargetExtraInfo]]
"""The model that targets serve, and their addresses, host:port, perhaps with what is known about each."""


class SyncBackend(Protocol):
    """Knows the processes that serve a sub-model."""

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        """Return the model name and the targets of a sub-model such as `ps_0`."""


class DiscoveryBackend:
    """Finds targets by any service discovery: files, ZooKeeper, Consul or Ray.

    Args:
        discovery: a discovery, or its name as `monolith serve --shards` takes it: `file=FOLDER`, `zk=NAME[@SERVERS]`.
        model_name: what the sub-models belong to. Targets then serve `<model_name>:ps_<i>`, as in the original's unified agent.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, DiscoveryBackend(f"file={folder}") as backend:
        ...     with backend.announced("ps_0", 0, "10.0.0.1:7300"):
        ...         backend.get_sync_targets("ps_0")
        ('ps_0', ('10.0.0.1:7300',))
    """

    def __init__(self, discovery: ServiceDiscovery | str, model_name: str = "") -> None:
        self._discovery = open_discovery(discovery) if isinstance(discovery, str) else discovery
        self.model_name = model_name

    def subscribe_model(self, model_name: str) -> None:
        """Say which model the sub-models belong to."""
        self.model_name = model_name

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        """Return the targets that were announced."""
        found = self._discovery.query_now(f"{SYNC_SERVICE}_{sub_graph}")
        name = f"{self.model_name}:{sub_graph}" if self.model_name else sub_graph
        return name, tuple(dict.fromkeys(found.values()))

    @contextmanager
    def announced(self, sub_graph: str, replica: int, address: str) -> Iterator[None]:
        """Let processes that train find a target within a block."""
        name = f"{SYNC_SERVICE}_{sub_graph}"
        self._discovery.register(name, replica, address)
        try:
            yield
        finally:
            self._discovery.deregister(name, replica, address)

    def close(self) -> None:
        """Close the discovery."""
        self._discovery.close()

    def __enter__(self) -> DiscoveryBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refresh_sync_config(
    sync_backend: SyncBackend, ps_index: int, *, signature_name: str = HASHTABLE_ASSIGN
) -> ClientConfig:
    """Return where the rows of `ps_index` are pushed to now.

    Example:
        >>> class One:
        ...     def get_sync_targets(self, sub_graph):
        ...         return sub_graph, ["10.0.0.1:7300"]
        >>> config = refresh_sync_config(One(), 3)
        >>> config.model_name, list(config.targets), config.signature_name, config.timeout_in_ms
        ('ps_3', ['10.0.0.1:7300'], 'hashtable_assign', 3000)
    """
    if ps_index < 0:
        raise InvalidArgumentError(f"ps_index: expected a number from 0, got {ps_index}")
    model_name, targets = sync_backend.get_sync_targets(f"ps_{ps_index}")
    return ClientConfig(
        model_name=model_name,
        signature_name=signature_name,
        targets=list(targets),
        timeout_in_ms=SYNC_TIMEOUT_MS,
        targets_extra_info=list(targets.values()) if isinstance(targets, Mapping) else [],
    )
