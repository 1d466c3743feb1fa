"""The role that a scheduler or a launcher of ranks gave this process in its environment."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType

from monolith.cluster.discovery.service_discovery import ServiceDiscoveryType
from monolith.cluster.discovery.tf_config import TfConfigServiceDiscovery
from monolith.cluster.scheduler import RoleRequest, ScheduledRole, ServerType, schedulers_of
from monolith.errors import ConfigError

__all__ = [
    "add_mpi_exception_hook",
    "get_mpi_local_rank",
    "get_mpi_local_size",
    "get_mpi_rank",
    "get_mpi_size",
    "role_from_environment",
]

_PREFIX = "OMPI_COMM_WORLD_"
_log = logging.getLogger(__name__)
# A launcher of ranks, and the variables with the rank of a process and the number of ranks.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def get_mpi_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process among all that `mpirun` started, or 0 without it.

    Example:
        >>> get_mpi_rank({"OMPI_COMM_WORLD_RANK": "3"}), get_mpi_rank({})
        (3, 0)
    """
    return _number(environ, _PREFIX + "RANK", "0")


def get_mpi_size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that `mpirun` started, or 1 without it."""
    return _number(environ, _PREFIX + "SIZE", "1")


def get_mpi_local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process among those on its machine, or 0 without `mpirun`."""
    return _number(environ, _PREFIX + "LOCAL_RANK", "0")


def get_mpi_local_size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that `mpirun` started on this machine, or 1 without it."""
    return _number(environ, _PREFIX + "LOCAL_SIZE", "1")


def _abort_all() -> None:
    """End every process of the job, through MPI if this process uses it, else by exiting in a way that `mpirun` notices."""
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        # Initialising MPI now would wait for the others to do the same.
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)
    finally:
        os._exit(1)


def add_mpi_exception_hook(*, environ: Mapping[str, str] | None = None, abort: Callable[[], None] = _abort_all) -> bool:
    """Under `mpirun`, let an uncaught exception end all processes instead of leaving the others waiting.

    The exception is printed first. Returns False and changes nothing without `mpirun`. Calling it again is harmless.
    """
    environ = os.environ if environ is None else environ
    if _PREFIX + "RANK" not in environ:
        return False
    rank = get_mpi_rank(environ)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = traceback.format_exception(kind, error, trace)
        sys.stderr.write(f"Uncaught exception on MPI rank {rank}, ending all processes:\n{''.join(lines)}")
        sys.stderr.flush()
        abort()

    sys.excepthook = hook
    return True


def role_from_environment(
    environ: Mapping[str, str],
    *,
    num_servers: int = 0,
    server_type: ServerType | None = None,
    is_local: bool = False,
) -> ScheduledRole | None:
    """Return the role that TF_CONFIG, a scheduler of `SCHEDULERS`, `mpirun`, `torchrun` or `srun` gave this process.

    Returns None if none of them started it, or if it is the only process that trains and there are no servers.

    Launchers of ranks (`mpirun`, `torchrun`, `srun`) know no kinds of processes: the last `num_servers` ranks are servers and
    those before them workers. Where `server_type` says that this process is a worker, all ranks are workers, and
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
    request = RoleRequest(num_servers, server_type, is_local)
    if environ.get("TF_CONFIG"):
        return _of_tf_config(environ["TF_CONFIG"], request)
    schedulers = list(schedulers_of(environ))
    for scheduler in schedulers:
        if scheduler.gives_roles:
            return scheduler.role(request)
    if (started := _ranks(environ)) is not None:
        return _of_ranks(*started, request)
    if schedulers and request == RoleRequest():
        _log.warning("%s runs this process, and TF_CONFIG does not say its role: it trains alone", schedulers[0].title)
    return None


def _of_tf_config(text: str, request: RoleRequest) -> ScheduledRole | None:
    job = TfConfigServiceDiscovery(text)
    if request.is_local:
        return None
    kinds = {"chief": "worker", "ps": "ps", "worker": "worker"}
    kind = request.kind("TF_CONFIG: task type", job.task.type, kinds)
    if kind is None:
        return None
    num_ps, num_workers = len(job.query("ps")), len(job.query("worker"))
    if num_ps or request.num_servers:
        return request.role(
            kind,
            job.index,
            num_ps=num_ps,
            num_workers=num_workers,
            found_by=ServiceDiscoveryType.PRIMUS,
            workers_field="TF_CONFIG: cluster.worker",
        )
    request.require_alone("the scheduler of TF_CONFIG", num_workers, 'Add addresses under "ps" to its cluster')
    return None


def _ranks(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the launcher that started this process, its rank and the number of ranks. None if no launcher did."""
    found = [
        (launcher, _number(environ, rank), _number(environ, size))
        for launcher, rank, size in _LAUNCHERS
        if environ.get(size, "1") != "1"  # a launcher of one process gives no roles
    ]
    # One launcher may start another: `srun` a `torchrun` on each machine. The one that counts all processes is right.
    return max(found, key=lambda ranks: ranks[2], default=None)


def _number(environ: Mapping[str, str] | None, name: str, default: str = "") -> int:
    text = (os.environ if environ is None else environ).get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}: expected a number as the launcher sets it, got {text!r}")
    return int(text)


def _of_ranks(launcher: str, rank: int, size: int, request: RoleRequest) -> ScheduledRole | None:
    servers = request.num_servers
    if request.is_local or not servers:
        request.require_alone(
            launcher, size, f"Set MONOLITH_NUM_PS=n to turn the last n of the {size} ranks into servers"
        )
        return None
    if request.server_type is not None:
        workers = size if request.server_type == "worker" else 1
        return ScheduledRole(server_type=request.server_type, index=rank, num_ps=servers, num_workers=workers)
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
