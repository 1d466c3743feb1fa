"""`Scheduler`: the scheduler that started this process, which may give it a role and is notified when the job ends.

`SCHEDULERS` lists the schedulers by name. Each is recognised by a variable that it sets in the environment of its processes,
and its module is loaded only where that variable is present. Packages below the scheduler's module never import it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field

from monolith.cluster.discovery.service_discovery import ServiceDiscovery, ServiceDiscoveryType
from monolith.config import Config
from monolith.errors import ConfigError
from monolith.transport.server import ListenConfig

__all__ = [
    "DATA_ROLES",
    "DataServicePart",
    "RoleRequest",
    "ScheduledRole",
    "Scheduler",
    "ServerType",
    "load_scheduler",
    "schedulers_of",
]

ServerType = Literal["ps", "worker", "dispatcher", "dsworker"]
"""A process that holds tables, one that trains, or one of the data service: its dispatcher or a data worker."""
DATA_ROLES: tuple[ServerType, ...] = ("dispatcher", "dsworker")
"""The processes of a data service. They serve batches and never train."""

SCHEDULERS = {
    "mlp": (r"MLP_[A-Z][A-Z0-9_]*_NUM", "monolith.original.mlp_scheduler:MlpScheduler"),
    "primus": (r"PRIMUS_AM_RPC_HOST", "monolith.original.yarn:PrimusScheduler"),
}
"""By name: a pattern of a variable that the scheduler sets, and its `Scheduler` as "module:class"."""


class ScheduledRole(Config):
    """The role of this process in a job, and how many processes of each kind the job has."""

    server_type: ServerType
    index: Annotated[int, Field(ge=0)]
    """Its number among those of its kind. Worker 0 is the chief."""
    num_ps: Annotated[int, Field(ge=0)]
    num_workers: Annotated[int, Field(ge=1)]
    discovery_type: ServiceDiscoveryType | None = None
    """How the processes find each other, or None if the scheduler leaves that open."""


@dataclass(frozen=True)
class RoleRequest:
    """What the configuration says about roles before the environment is read."""

    num_servers: int = 0
    server_type: ServerType | None = None
    is_local: bool = False

    def kind(self, variable: str, name: str, kinds: Mapping[str, str]) -> ServerType | None:
        """Return the kind of process that a scheduler calls `name`, or None if the configuration names the role instead."""
        if name in kinds:
            return cast("ServerType", kinds[name])
        if self.server_type is not None:
            return None
        raise ConfigError(
            f"{variable}: expected one of {', '.join(map(repr, kinds))}, got {name!r}: a process of another kind has no part in "
            "a training job. Do not run the training script there, or set MONOLITH_SERVER_TYPE and MONOLITH_INDEX yourself"
        )

    def role(
        self,
        kind: ServerType,
        index: int,
        *,
        num_ps: int,
        num_workers: int,
        found_by: ServiceDiscoveryType,
        workers_field: str,
    ) -> ScheduledRole | None:
        """Return the role that a scheduler with `num_ps` servers and `num_workers` workers gave this process.

        Returns None for the only worker of a job without servers, which trains alone. Several are ranks of a synchronous run.

        Raises:
            ConfigError: the job has no worker. `workers_field` is where the scheduler says how many there are.
        """
        if not num_workers:
            raise ConfigError(
                f"{workers_field}: expected at least one worker in the job, got none; {kind} {index} would wait for ever"
            )
        if kind == "worker" and num_workers == 1 and not (num_ps or self.num_servers):
            return None
        return ScheduledRole(
            server_type=kind,
            index=index,
            num_ps=num_ps or self.num_servers,
            num_workers=num_workers,
            # Servers that the scheduler does not know, and ranks, find each other in the way that the configuration says.
            discovery_type=found_by if num_ps or kind in DATA_ROLES else None,
        )


@dataclass(frozen=True, kw_only=True)
class DataServicePart:
    """The part of this process in the data service that the scheduler runs for the job."""

    finished: bool = False
    """The process was part of the data service and has served to the end of the job."""
    dispatcher: str = ""
    """`host:port` or URL of the dispatcher to read from, empty if the scheduler runs none."""


class Scheduler:
    """A scheduler that started this process. Override the methods for the matters in which the scheduler has a say."""

    title: ClassVar[str] = "a scheduler"
    """Its name in log messages."""
    gives_roles: ClassVar[bool] = False
    """Whether `role` decides what this process is."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def role(self, request: RoleRequest) -> ScheduledRole | None:
        """Return the role of this process, or None if it trains alone."""
        return None

    def discovery(self) -> ServiceDiscovery:
        """Return how the processes of the job find each other."""
        raise ConfigError(f"DiscoveryConfig.discovery_type: {self.title} has no discovery of its own")

    def data_service(
        self, *, listen: ListenConfig, folder: Path | None, reads: bool, num_extra_workers: int
    ) -> AbstractContextManager[DataServicePart]:
        """Take this process's part in the data service for the time of a block, before training or instead of it.

        A process of the data service serves with `listen` and returns when the job has ended. Its dispatcher keeps a journal in
        `folder`. A worker that `reads` from the data service waits for it, and runs `num_extra_workers` data workers of its own.
        """
        return nullcontext(DataServicePart())

    def job_ended(self, failure: BaseException | None) -> None:
        """Report the end of the job. Called by the chief with the error that broke the job, or None."""


def schedulers_of(environ: Mapping[str, str]) -> Iterator[Scheduler]:
    """Yield the schedulers that started the process with `environ`, in the order of `SCHEDULERS`.

    Example:
        >>> [scheduler.title for scheduler in schedulers_of({"MLP_WORKER_NUM": "1"})]
        ['the MLP scheduler']
    """
    for name, (variable, _) in SCHEDULERS.items():
        if any(value and re.fullmatch(variable, given) for given, value in environ.items()):
            yield load_scheduler(name, environ)


def load_scheduler(name: str, environ: Mapping[str, str]) -> Scheduler:
    """Return the scheduler `name` of `SCHEDULERS`, whether or not it started the process with `environ`."""
    module, _, attribute = SCHEDULERS[name][1].partition(":")
    made: Scheduler = getattr(import_module(module), attribute)(environ)
    return made
