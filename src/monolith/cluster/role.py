"""`ScheduledRole`: which process of a job this one is, as the scheduler or launcher that started it says in the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, cast, get_args

from pydantic import Field

from monolith.cluster.discovery import ServiceDiscoveryType
from monolith.cluster.tf_config_discovery import TfConfigServiceDiscovery
from monolith.config import Config
from monolith.errors import ConfigError
from monolith.original.mlp import MLPEnv

__all__ = ["DATA_ROLES", "ScheduledRole", "ServerType", "role_from_environment"]

_log = logging.getLogger(__name__)

ServerType = Literal["ps", "worker", "dispatcher", "dsworker"]
"""A process that holds tables, one that trains, or one of the data service: its dispatcher or a data worker."""
DATA_ROLES: tuple[ServerType, ...] = ("dispatcher", "dsworker")
"""The processes of a data service: they serve batches and never train."""

# A launcher of ranks, and the variables in which it says the rank of a process and how many there are.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class ScheduledRole(Config):
    """A process of a job, and how many there are of each kind."""

    server_type: ServerType
    index: Annotated[int, Field(ge=0)]
    """Its number among those of its kind; worker 0 is the chief."""
    num_ps: Annotated[int, Field(ge=0)]
    num_workers: Annotated[int, Field(ge=1)]
    discovery_type: ServiceDiscoveryType | None = None
    """How the processes find each other, where the scheduler itself says it. None if it does not."""


@dataclass(frozen=True)
class _Asked:
    """What the configuration says about roles before the environment is asked."""

    num_servers: int
    server_type: ServerType | None
    is_local: bool

    def alone(self, launcher: str, workers: int, remedy: str) -> None:
        """Return if this process is meant to train by itself. `ConfigError` if it is one of several that would.

        A job of `workers` without servers would be that many runs that know nothing of each other and save into one folder.
        """
        if workers > 1 and not self.is_local and self.server_type is None:
            raise ConfigError(
                f"{launcher} started {workers} workers and no parameter server: each would train alone, on all of the data. "
                f"{remedy}, or set MONOLITH_IS_LOCAL=true for {workers} independent runs"
            )


def role_from_environment(
    environ: Mapping[str, str],
    *,
    num_servers: int = 0,
    server_type: ServerType | None = None,
    is_local: bool = False,
) -> ScheduledRole | None:
    """Return the role that TF_CONFIG, the MLP scheduler, `mpirun`, `torchrun` or `srun` gave this process.

    Returns None if none of them started it, or if it is the only process that trains and there are no servers.

    Launchers of ranks (`mpirun`, `torchrun`, `srun`) know no kinds of processes: of their ranks the last `num_servers` are
    servers and those before them workers. Where `server_type` says that this process is a worker, all ranks are workers, and
    the servers were started separately.

    Raises:
        ConfigError: several processes would each train alone because the job has no servers, or the scheduler gave this
            process a role that does not exist here. With `is_local` the processes are independent runs on purpose.

    Example:
        >>> def role_of(rank):
        ...     mpirun = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "5"}
        ...     role = role_from_environment(mpirun, num_servers=2)
        ...     return role.server_type, role.index
        >>> [role_of(rank) for rank in range(5)]
        [('worker', 0), ('worker', 1), ('worker', 2), ('ps', 0), ('ps', 1)]
    """
    asked = _Asked(num_servers, server_type, is_local)
    if environ.get("TF_CONFIG"):
        return _of_tf_config(environ["TF_CONFIG"], asked)
    env = MLPEnv(environ)
    if env.available:
        return _of_mlp(env, asked)
    if (started := _ranks(environ)) is not None:
        return _of_ranks(*started, asked)
    if environ.get("PRIMUS_AM_RPC_HOST") and asked == _Asked(0, None, False):
        _log.warning("a Primus application runs this process, and TF_CONFIG does not say its role: it trains alone")
    return None


def _of_tf_config(text: str, asked: _Asked) -> ScheduledRole | None:
    job = TfConfigServiceDiscovery(text)
    if asked.is_local:
        return None
    kind = _kind("TF_CONFIG: task type", job.task.type, {"chief": "worker", "ps": "ps", "worker": "worker"}, asked)
    if kind is None:
        return None
    num_ps, num_workers = len(job.query("ps")), len(job.query("worker"))
    if num_ps or asked.num_servers:
        return _role(
            kind, job.index, num_ps, num_workers, asked, ServiceDiscoveryType.PRIMUS, "TF_CONFIG: cluster.worker"
        )
    asked.alone("the scheduler of TF_CONFIG", num_workers, 'Add addresses under "ps" to its cluster')
    return None


def _of_mlp(env: MLPEnv, asked: _Asked) -> ScheduledRole | None:
    if asked.is_local and env.role.lower() not in DATA_ROLES:
        return None
    kind = _kind("MLP_ROLE", env.role, {name.upper(): name for name in get_args(ServerType)}, asked)
    if kind is None:
        return None
    num_ps, num_workers = env.num_replicas("ps"), env.num_replicas("worker")
    if num_ps or asked.num_servers or kind in DATA_ROLES:
        return _role(kind, env.index, num_ps, num_workers, asked, ServiceDiscoveryType.MLP, "MLP_WORKER_NUM")
    asked.alone("the MLP scheduler", num_workers, "Give the job the role ps (MLP_PS_NUM is not set)")
    return None


def _kind(where: str, name: str, kinds: Mapping[str, str], asked: _Asked) -> ServerType | None:
    """Return the kind of process that a scheduler calls `name`. None if the configuration names the role instead."""
    if name in kinds:
        return cast("ServerType", kinds[name])
    if asked.server_type is not None:
        return None
    raise ConfigError(
        f"{where}: expected one of {', '.join(map(repr, kinds))}, got {name!r}: a process of another kind has no part in a "
        "training job. Do not run the training script there, or set MONOLITH_SERVER_TYPE and MONOLITH_INDEX yourself"
    )


def _role(
    kind: ServerType,
    index: int,
    num_ps: int,
    num_workers: int,
    asked: _Asked,
    found_by: ServiceDiscoveryType,
    field: str,
) -> ScheduledRole:
    if not num_workers:
        raise ConfigError(
            f"{field}: expected at least one worker in the job, got none; {kind} {index} would wait for ever"
        )
    return ScheduledRole(
        server_type=kind,
        index=index,
        num_ps=num_ps or asked.num_servers,
        num_workers=num_workers,
        # Servers that the scheduler does not know are found in the way that the configuration says.
        discovery_type=found_by if num_ps or kind in DATA_ROLES else None,
    )


def _ranks(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the launcher that started this process, its rank and the number of ranks. None if no launcher did."""
    found = [
        (launcher, _number(environ, rank), _number(environ, size))
        for launcher, rank, size in _LAUNCHERS
        if environ.get(size, "1") != "1"  # a launcher of one process has no roles to give
    ]
    # One launcher may start another: `srun` a `torchrun` on each machine. The one that counts all processes is right.
    return max(found, key=lambda ranks: ranks[2], default=None)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}: expected a number as the launcher sets it, got {text!r}")
    return int(text)


def _of_ranks(launcher: str, rank: int, size: int, asked: _Asked) -> ScheduledRole | None:
    servers = asked.num_servers
    if asked.is_local or not servers:
        asked.alone(launcher, size, f"Set MONOLITH_NUM_PS=n to turn the last n of the {size} ranks into servers")
        return None
    if asked.server_type is not None:
        workers = size if asked.server_type == "worker" else 1
        return ScheduledRole(server_type=asked.server_type, index=rank, num_ps=servers, num_workers=workers)
    workers = size - servers
    if workers < 1:
        raise ConfigError(
            f"{launcher}: expected more processes than the {servers} servers asked for, got {size}; start more, "
            "or set MONOLITH_SERVER_TYPE=worker if the servers were started separately"
        )
    kind: ServerType = "worker" if rank < workers else "ps"
    return ScheduledRole(
        server_type=kind, index=rank if kind == "worker" else rank - workers, num_ps=servers, num_workers=workers
    )
