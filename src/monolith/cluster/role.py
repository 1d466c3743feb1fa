"""`ScheduledRole`: which process of a job this one is, as the scheduler that started it says in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from monolith.cluster.discovery import ServiceDiscoveryType
from monolith.cluster.mlp import MLPEnv
from monolith.cluster.mpi import get_mpi_rank, get_mpi_size
from monolith.cluster.tf_config_discovery import TfConfigServiceDiscovery
from monolith.config import Config
from monolith.errors import ConfigError

__all__ = ["ScheduledRole", "ServerType", "role_from_environment"]

ServerType = Literal["ps", "worker"]
"""A process that holds tables, or one that trains."""


class ScheduledRole(Config):
    """A process of a job with servers, and how many there are of each kind."""

    server_type: ServerType
    index: Annotated[int, Field(ge=0)]
    """Its number among those of its kind; worker 0 is the chief."""
    num_ps: Annotated[int, Field(ge=1)]
    num_workers: Annotated[int, Field(ge=1)]
    discovery_type: ServiceDiscoveryType | None = None
    """The discovery that the scheduler is itself; None if it is none."""


def role_from_environment(
    environ: Mapping[str, str], *, num_servers: int = 0, server_type: ServerType | None = None
) -> ScheduledRole | None:
    """What TF_CONFIG, the MLP scheduler or `mpirun` say of this process; None without them, or without servers in the job.

    `mpirun` knows no kinds: of its processes the last `num_servers` are servers and those before them workers. Where
    `server_type` says that this process is a worker, all of them are, and the servers were started otherwise.

    Example:
        >>> def role_of(rank):
        ...     mpirun = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "5"}
        ...     role = role_from_environment(mpirun, num_servers=2)
        ...     return role.server_type, role.index
        >>> [role_of(rank) for rank in range(5)]
        [('worker', 0), ('worker', 1), ('worker', 2), ('ps', 0), ('ps', 1)]
    """
    if environ.get("TF_CONFIG"):
        return _of_tf_config(environ["TF_CONFIG"])
    env = MLPEnv(environ)
    if env.available:
        return _of_mlp(env)
    if "OMPI_COMM_WORLD_RANK" in environ and num_servers:
        return _of_mpirun(get_mpi_rank(environ), get_mpi_size(environ), num_servers, server_type)
    return None


def _of_tf_config(text: str) -> ScheduledRole | None:
    job = TfConfigServiceDiscovery(text)
    num_ps = len(job.query("ps"))
    if not num_ps or job.server_type not in ("ps", "worker"):
        return None
    return ScheduledRole(
        server_type="ps" if job.server_type == "ps" else "worker",
        index=job.index,
        num_ps=num_ps,
        num_workers=len(job.query("worker")),
        discovery_type=ServiceDiscoveryType.PRIMUS,
    )


def _of_mlp(env: MLPEnv) -> ScheduledRole | None:
    num_ps, num_workers = env.num_replicas("ps"), env.num_replicas("worker")
    if not num_ps or not num_workers:
        return None
    return ScheduledRole(
        # The roles of a data service are handed over before anything is trained; see `mlp_pass`.
        server_type="ps" if env.role == "PS" else "worker",
        index=env.index,
        num_ps=num_ps,
        num_workers=num_workers,
        discovery_type=ServiceDiscoveryType.MLP,
    )


def _of_mpirun(rank: int, size: int, num_servers: int, server_type: ServerType | None) -> ScheduledRole:
    if server_type is not None:
        workers = size if server_type == "worker" else 1
        return ScheduledRole(server_type=server_type, index=rank, num_ps=num_servers, num_workers=workers)
    workers = size - num_servers
    if workers < 1:
        raise ConfigError(
            f"mpirun: expected more processes than the {num_servers} servers asked for, got {size}; start more, "
            "or set MONOLITH_SERVER_TYPE=worker if the servers were started otherwise"
        )
    kind: ServerType = "worker" if rank < workers else "ps"
    return ScheduledRole(
        server_type=kind, index=rank if kind == "worker" else rank - workers, num_ps=num_servers, num_workers=workers
    )
