"""`ClusterSpec` and `TfConfigServiceDiscovery`: the addresses of a job as a scheduler lists them in TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from monolith.cluster.discovery.service_discovery import ScheduledDiscovery
from monolith.cluster.net import split_address
from monolith.config import Config
from monolith.errors import ConfigError, InvalidArgumentError

__all__ = ["ClusterSpec", "Task", "TfConfigServiceDiscovery", "parse_tf_config"]

Addresses = tuple[str, ...]


class Task(Config):
    """Which process of the job this one is."""

    type: str
    """Name of its job: `chief`, `ps`, `worker`, or one that only its scheduler knows."""
    index: Annotated[int, Field(ge=0)] = 0
    """Its index in the list of addresses of that job."""


class ClusterSpec(Config):
    """The addresses of a job.

    Example:
        >>> cluster = ClusterSpec(chief=("h0:1",), ps=("h1:1", "h2:1"), worker=("h3:1",))
        >>> cluster.query("worker")
        {0: 'h0:1', 1: 'h3:1'}
    """

    chief: Annotated[Addresses, Field(max_length=1)] = ()
    """Worker 0, if the scheduler lists it separately."""
    ps: Addresses = ()
    """Parameter servers, by index."""
    worker: Addresses = ()
    """The other workers, by index. All workers if there is no chief."""

    @model_validator(mode="after")
    def _addresses_are_addresses(self) -> Self:
        for address in (*self.chief, *self.ps, *self.worker):
            split_address(address)
        return self

    def query(self, name: str) -> dict[int, str]:
        """Return the addresses of the `ps` or the `worker`s by index. The chief is worker 0."""
        if name not in ("ps", "worker"):
            raise InvalidArgumentError(f"name: expected 'ps' or 'worker', got {name!r}")
        return dict(enumerate(self.ps if name == "ps" else self.chief + self.worker))

    def tf_config(self, task: Task) -> str:
        """Return the text of TF_CONFIG for the process `task`, which `parse_tf_config` reads."""
        jobs = {name: list(addresses) for name, addresses in self if addresses}
        return json.dumps({"cluster": jobs, "task": task.model_dump()}, sort_keys=True)


def parse_tf_config(text: str) -> tuple[ClusterSpec, Task]:
    """Parse a TF_CONFIG. Unknown jobs and keys are ignored, invalid values raise `ConfigError`.

    Example:
        >>> parse_tf_config('{"cluster": {"ps": ["h1:1"], "worker": ["h2:1"]}, "task": {"type": "ps", "index": 0}}')
        (ClusterSpec(chief=(), ps=('h1:1',), worker=('h2:1',)), Task(type='ps', index=0))
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG: expected JSON, {error}; got {text[:200]!r}") from None
    cluster, task = (_part(values, name) for name in ("cluster", "task"))
    _require_index(cluster, task)
    jobs = {name: cluster[name] for name in ClusterSpec.model_fields if name in cluster}
    own = {name: task[name] for name in Task.model_fields if name in task}
    return ClusterSpec.from_json(json.dumps(jobs)), Task.from_json(json.dumps(own))


def _require_index(cluster: dict[str, object], task: dict[str, object]) -> None:
    """Raise `ConfigError` if one of several tasks has no index: each of them would take itself for the first."""
    addresses = cluster.get(str(task.get("type")))
    if "index" not in task and isinstance(addresses, list) and len(addresses) > 1:
        raise ConfigError(
            f"TF_CONFIG: task.index: expected which of the {len(addresses)} {task['type']!r} tasks this process is, got none"
        )


def _part(values: object, name: str) -> dict[str, object]:
    part = values.get(name) if isinstance(values, dict) else None
    if not isinstance(part, dict):
        raise ConfigError(f'TF_CONFIG: expected an object with the keys "cluster" and "task", got {values!r}')
    return part


class TfConfigServiceDiscovery(ScheduledDiscovery):
    """The job as TF_CONFIG describes it. Registering changes nothing, because all addresses are known in advance.

    A chief is worker 0, and the other workers count from 1.

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
        """Do nothing: other processes know the address already."""

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Do nothing."""

    def query(self, name: str) -> dict[int, str]:
        """Return the addresses of `ps` or `worker` by index. Raises `InvalidArgumentError` for another name."""
        return self.cluster.query(name)

    def deregister_all(self) -> None:
        """Do nothing."""
