"""`TfConfigServiceDiscovery`: a scheduler that knows all addresses in advance says them in TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Mapping

from monolith.cluster.cluster_spec import parse_tf_config
from monolith.cluster.discovery import ScheduledDiscovery
from monolith.errors import ConfigError

__all__ = ["TfConfigServiceDiscovery"]


class TfConfigServiceDiscovery(ScheduledDiscovery):
    """The job as TF_CONFIG describes it; registering changes nothing, because nothing can change.

    A chief is worker 0, and the workers count on from 1.

    Example:
        >>> discovery = TfConfigServiceDiscovery({
        ...     "cluster": {"chief": ["h0:1"], "ps": ["h1:1"], "worker": ["h2:1", "h3:1"]},
        ...     "task": {"type": "worker", "index": 1},
        ... })
        >>> discovery.query("worker"), discovery.server_type, discovery.index, discovery.addr
        ({0: 'h0:1', 1: 'h2:1', 2: 'h3:1'}, 'worker', 2, 'h3:1')
    """

    def __init__(self, tf_config: str | Mapping[str, object]) -> None:
        """Take the text of TF_CONFIG, or the object in it."""
        text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
        self.cluster, self.task = parse_tf_config(text)
        if self.task.type in ("chief", "ps", "worker") and self.index not in self.query(self.server_type):
            raise ConfigError(f"TF_CONFIG: expected task {self.task!r} to be one of the cluster, {self.cluster!r}")

    @property
    def server_type(self) -> str:
        """The service this process belongs to: `worker` for the chief."""
        return "worker" if self.task.type == "chief" else self.task.type

    @property
    def index(self) -> int:
        """The index of this process in its service."""
        behind_chief = self.task.type == "worker" and bool(self.cluster.chief)
        return self.task.index + behind_chief

    @property
    def addr(self) -> str:
        """The address this process should serve at."""
        return self.query(self.server_type)[self.index]

    def register(self, name: str, index: int, addr: str) -> None:
        """Do nothing: others know it already."""

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Do nothing."""

    def query(self, name: str) -> dict[int, str]:
        """Addresses of `ps` or `worker` by index; another name is an `InvalidArgumentError`."""
        return self.cluster.query(name)

    def deregister_all(self) -> None:
        """Do nothing."""
