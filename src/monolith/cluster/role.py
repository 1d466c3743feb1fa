"""The role that a scheduler or a launcher of ranks gave this process in its environment."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from monolith.cluster.discovery.service_discovery import ServiceDiscoveryType
from monolith.cluster.discovery.tf_config import TfConfigServiceDiscovery
from monolith.cluster.scheduler import RoleRequest, ScheduledRole, ServerType, schedulers_of
from monolith.errors import ConfigError

__all__ = [
    "LOCAL_RANK_VARIABLE",
    "LOCAL_SIZE_VARIABLE",
    "LaunchedRank",
    "add_mpi_exception_hook",
    "get_mpi_local_rank",
    "get_mpi_local_size",
    "get_mpi_rank",
    "get_mpi_size",
    "launched_rank",
    "ranks_on_this_machine",
    "role_from_environment",
]

_PREFIX = "OMPI_COMM_WORLD_"
_log = logging.getLogger(__name__)
LOCAL_RANK_VARIABLE = "MONOLITH_LOCAL_RANK"
LOCAL_SIZE_VARIABLE = "MONOLITH_LOCAL_SIZE"
"""What `monolith launch` tells a process: its number among the training processes of the job on its machine, and their number."""


@dataclass(frozen=True)
class _Launcher:
    """A launcher of ranks and the names of its variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Launcher("mpirun", f"{_PREFIX}RANK", f"{_PREFIX}SIZE", f"{_PREFIX}LOCAL_RANK", f"{_PREFIX}LOCAL_SIZE"),
    # MPICH, Intel MPI and others that use Hydra.
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """What a launcher of ranks says about this process."""

    launcher: str
    """`mpirun`, `torchrun` or `srun`."""
    rank: int
    """Its number among all processes of the job."""
    size: int
    """The number of all processes of the job."""
    local_rank: int = 0
    """Its number among those on its machine."""
    local_size: int = 1
    """The number of those on its machine. 1 if the launcher does not say it."""


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
    the servers were started separately. Several workers without servers are the ranks of a synchronous run.

    Args:
        is_local: the processes are independent runs on purpose.

    Raises:
        ConfigError: the scheduler gave this process a role that does not exist here.

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
    if (started := launched_rank(environ)) is not None:
        return _of_rank(started, request)
    if not is_local:
        _warn_of_half_a_rank(environ)
    if schedulers and request == RoleRequest():
        _log.warning("%s runs this process, and TF_CONFIG does not say its role: it trains alone", schedulers[0].title)
    return None


def _warn_of_half_a_rank(environ: Mapping[str, str]) -> None:
    for launcher in _LAUNCHERS:
        rank = environ.get(launcher.rank, "0")
        if rank.isdecimal() and int(rank) and launcher.size not in environ:
            _log.warning(
                "%s is %s, but %s is not set: this process trains alone; set both, as %s does",
                launcher.rank,
                rank,
                launcher.size,
                launcher.name,
            )


def _of_tf_config(text: str, request: RoleRequest) -> ScheduledRole | None:
    job = TfConfigServiceDiscovery(text)
    if request.is_local:
        return None
    kinds = {"chief": "worker", "ps": "ps", "worker": "worker"}
    kind = request.kind("TF_CONFIG: task type", job.task.type, kinds)
    if kind is None:
        return None
    return request.role(
        kind,
        job.index,
        num_ps=len(job.query("ps")),
        num_workers=len(job.query("worker")),
        found_by=ServiceDiscoveryType.PRIMUS,
        workers_field="TF_CONFIG: cluster.worker",
    )


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Return what `mpirun`, `torchrun` or `srun` says about this process, or None if none of them started several.

    Example:
        >>> launched_rank({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
        LaunchedRank(launcher='torchrun', rank=5, size=8, local_rank=1, local_size=4)
    """
    environ = os.environ if environ is None else environ
    # A launcher of one process gives no roles.
    found = [_launched_by(launcher, environ) for launcher in _LAUNCHERS if environ.get(launcher.size, "1") != "1"]
    # One launcher may start another: `srun` a `torchrun` on each machine. The one that counts all processes is right.
    return max(found, key=lambda rank: rank.size, default=None)


def ranks_on_this_machine(environ: Mapping[str, str] | None = None) -> int:
    """Return how many training processes of the job share this machine, as its launcher says. 1 without one.

    Example:
        >>> ranks_on_this_machine({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
        4
    """
    environ = os.environ if environ is None else environ
    if LOCAL_SIZE_VARIABLE in environ:
        return max(1, _number(environ, LOCAL_SIZE_VARIABLE))
    rank = launched_rank(environ)
    return 1 if rank is None else max(1, rank.local_size)


def _launched_by(launcher: _Launcher, environ: Mapping[str, str]) -> LaunchedRank:
    rank, size = _number(environ, launcher.rank), _number(environ, launcher.size)
    if rank >= size:
        raise ConfigError(f"{launcher.rank}: expected a number less than {launcher.size}, {size}, got {rank}")
    return LaunchedRank(
        launcher=launcher.name,
        rank=rank,
        size=size,
        local_rank=_number(environ, launcher.local_rank, "0"),
        local_size=_number(environ, launcher.local_size, "1") if launcher.local_size else _slurm_local_size(environ),
    )


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Read the number of tasks on this node from a list such as `4(x2),3`: 4 on nodes 0 and 1, 3 on node 2."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _number(environ, "SLURM_NODEID", "0")
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE: expected a list such as 4(x2),3, got {text!r}")
        nodes = int(found[2] or 1)
        if node < nodes:
            return int(found[1])
        node -= nodes
    return 1


def _number(environ: Mapping[str, str] | None, name: str, default: str = "") -> int:
    text = (os.environ if environ is None else environ).get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}: expected a number as the launcher sets it, got {text!r}")
    return int(text)


def _of_rank(started: LaunchedRank, request: RoleRequest) -> ScheduledRole | None:
    launcher, size, servers = started.launcher, started.size, request.num_servers
    if request.is_local:
        return None
    if request.server_type is not None:
        workers = size if request.server_type == "worker" else 1
        return ScheduledRole(server_type=request.server_type, index=started.rank, num_ps=servers, num_workers=workers)
    workers = size - servers
    if workers < 1:
        raise ConfigError(
            f"{launcher}: expected more processes than the {servers} servers asked for, got {size}; start more, "
            "or set MONOLITH_SERVER_TYPE=worker if the servers were started separately"
        )
    kind: ServerType = "worker" if started.rank < workers else "ps"
    return ScheduledRole(
        server_type=kind,
        index=started.rank if kind == "worker" else started.rank - workers,
        num_ps=servers,
        num_workers=workers,
    )
