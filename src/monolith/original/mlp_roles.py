"""`mlp_pass`: hand a process over to the role the MLP scheduler gave it, before any training code runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from monolith.cluster.net import concat_ip_and_port
from monolith.errors import InvalidArgumentError
from monolith.original.mlp import MLPEnv

__all__ = ["DataServers", "HandOver", "mlp_pass"]

_logger = logging.getLogger(__name__)


class Server(Protocol):
    """A running server."""

    def close(self) -> None:
        """Stop serving."""


class DataServers(Protocol):
    """Starts the two kinds of servers of a data service in this process."""

    def start_dispatcher(self, port: int) -> Server:
        """Hand out batches of data workers to trainers, on `port`."""

    def start_worker(self, address: str, dispatcher: str) -> Server:
        """Read and prepare batches for `dispatcher`, at `address`."""


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """What is left for this process to do."""

    role: str
    """Upper case; empty if the scheduler did not start this process."""
    index: int = 0
    finished: bool = False
    """The role has been served to its end, and the process should exit."""
    dispatcher: str = ""
    """URL of the data service to read from, empty without one."""
    servers: tuple[Server, ...] = field(default=(), repr=False)
    """Data workers running in this process; close them at the end."""


def mlp_pass(
    env: MLPEnv | None = None,
    data_servers: DataServers | None = None,
    *,
    dispatcher_role: str = "dispatcher",
    dsworker_role: str = "dsworker",
    worker_role: str = "worker",
    use_dataservice: bool = False,
    num_extra_dsworkers: int = 0,
) -> HandOver:
    """Do what the role of this process asks for.

    The dispatcher and the data workers serve here until worker 0 is gone. A worker that uses the data service waits for them
    and starts `num_extra_dsworkers` data workers of its own. Every other process, a parameter server too, goes on at once.

    Example:
        >>> mlp_pass(MLPEnv({}))
        HandOver(role='', index=0, finished=False, dispatcher='')
    """
    env = MLPEnv() if env is None else env
    if not env.available:
        return HandOver(role="")
    dispatcher_role, dsworker_role, worker_role = dispatcher_role.upper(), dsworker_role.upper(), worker_role.upper()
    _logger.info("this process is %s %d of %s", env.role, env.index, env.all_roles)
    if env.role in (dispatcher_role, dsworker_role):
        return _serve(env, data_servers, dispatcher_role, worker_role)
    if env.role == worker_role and use_dataservice:
        return _prepare_worker(env, data_servers, dispatcher_role, dsworker_role, num_extra_dsworkers)
    return HandOver(role=env.role, index=env.index)


def _serve(env: MLPEnv, data_servers: DataServers | None, dispatcher_role: str, worker_role: str) -> HandOver:
    starter = _needed(data_servers, env)
    if env.role == dispatcher_role:
        server = starter.start_dispatcher(env.port)
    else:
        env.wait(dispatcher_role, use_ssh=False)
        address = env.get_addr() or concat_ip_and_port(env.host, env.port)
        server = starter.start_worker(address, env.dispatcher_target(dispatcher_role))
    try:
        env.join(worker_role)
    finally:
        server.close()
    return HandOver(role=env.role, index=env.index, finished=True)


def _prepare_worker(
    env: MLPEnv, data_servers: DataServers | None, dispatcher_role: str, dsworker_role: str, extra: int
) -> HandOver:
    if extra:
        _needed(data_servers, env)  # said before the waiting, not after it
    # The SSH port answers as soon as a machine is up, which is too early: the servers themselves must answer.
    env.wait(dispatcher_role, use_ssh=False)
    for index in range(env.num_replicas(dsworker_role)):
        env.wait(dsworker_role, index, use_ssh=False)
    target = env.dispatcher_target(dispatcher_role)
    # Behind the ports of all processes that `mpirun` started here, each worker's own after those of the worker before it.
    processes = env.num_replicas() if env.enable_mpi else 1
    first = env.port - env.index + processes + env.index * extra
    servers = tuple(
        _needed(data_servers, env).start_worker(concat_ip_and_port(env.host, port), target)
        for port in range(first, first + extra)
    )
    return HandOver(role=env.role, index=env.index, dispatcher=target, servers=servers)


def _needed(data_servers: DataServers | None, env: MLPEnv) -> DataServers:
    if data_servers is None:
        raise InvalidArgumentError(f"data_servers: expected what starts them, role {env.role} needs it; got None")
    return data_servers
