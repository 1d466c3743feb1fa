"""`MlpScheduler` and `mlp_pass`: let a process take the role that the MLP scheduler gave it, before any training code runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

from monolith.cluster.discovery.service_discovery import ServiceDiscoveryType
from monolith.cluster.net import concat_ip_and_port
from monolith.cluster.scheduler import (
    DATA_ROLES,
    DataServicePart,
    RoleRequest,
    ScheduledRole,
    Scheduler,
    ServerType,
)
from monolith.dataservice.dataset import EVERYTHING, Kinds
from monolith.dataservice.dispatcher import DataDispatcher, DispatcherConfig
from monolith.dataservice.protocol import DataClientConfig
from monolith.dataservice.worker import DataWorker, DataWorkerConfig
from monolith.errors import InvalidArgumentError
from monolith.original.mlp import MLPEnv, MLPServiceDiscovery
from monolith.transport.server import ListenConfig

__all__ = ["DataServers", "HandOver", "MlpDataServers", "MlpScheduler", "mlp_pass"]

_logger = logging.getLogger(__name__)


class Server(Protocol):
    """A running server."""

    def close(self) -> object:
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
    """In upper case. Empty if the scheduler did not start this process."""
    index: int = 0
    finished: bool = False
    """The role has been served to its end, and the process should exit."""
    dispatcher: str = ""
    """URL of the data service to read from, empty without one."""
    servers: tuple[Server, ...] = field(default=(), repr=False)
    """Data workers that run in this process. The caller closes them at the end."""


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
    """Do what the role of this process asks for. Returns what is left for it to do.

    The dispatcher and the data workers serve here until worker 0 has ended. A worker that uses the data service waits for
    them and starts `num_extra_dsworkers` data workers of its own. For every other process, also a parameter server, the
    function returns at once.

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
        _needed(data_servers, env)  # raised before the waiting, not after it
    # The SSH port answers as soon as a machine is up, before the servers do, so their own ports are tried.
    env.wait(dispatcher_role, use_ssh=False)
    for index in range(env.num_replicas(dsworker_role)):
        env.wait(dsworker_role, index, use_ssh=False)
    target = env.dispatcher_target(dispatcher_role)
    # After the ports of all processes that `mpirun` started here. The range of each worker follows that of the one before.
    processes = env.num_replicas() if env.enable_mpi else 1
    first = env.port - env.index + processes + env.index * extra
    servers = tuple(
        _needed(data_servers, env).start_worker(concat_ip_and_port(env.host, port), target)
        for port in range(first, first + extra)
    )
    return HandOver(role=env.role, index=env.index, dispatcher=target, servers=servers)


def _needed(data_servers: DataServers | None, env: MLPEnv) -> DataServers:
    if data_servers is None:
        raise InvalidArgumentError(f"data_servers: expected a DataServers, which role {env.role} needs, got None")
    return data_servers


class MlpDataServers:
    """Starts the servers for `mlp_pass`: `mlp_pass(data_servers=MlpDataServers(listen=..., folder=...))`.

    `listen` has the host, TLS files and token of the servers. The scheduler gives the ports. `client` is how data workers
    reach the dispatcher. `roots` are the folders or URLs that may be read, by default any, as all processes belong to one
    job.

    Example:
        >>> servers = MlpDataServers()
        >>> dispatcher = servers.start_dispatcher(0)
        >>> worker = servers.start_worker("127.0.0.1:0", f"grpc://{dispatcher.address}")
        >>> worker.close(), dispatcher.close()
        (True, True)
    """

    def __init__(
        self,
        *,
        listen: ListenConfig | None = None,
        client: DataClientConfig | None = None,
        folder: Path | None = None,
        kinds: Kinds | None = None,
        roots: Sequence[str] = (EVERYTHING,),
    ) -> None:
        self._listen = listen or ListenConfig()
        self._client = client or DataClientConfig(token=self._listen.token)
        self._folder, self._kinds, self._roots = folder, kinds, tuple(roots)

    def start_dispatcher(self, port: int) -> DataDispatcher:
        """Start a dispatcher on `port`, with its journal in `folder`."""
        fields = {**self._fields(), "port": port, "max_message_bytes": 2**22}
        return DataDispatcher(DispatcherConfig(**fields, folder=self._folder, roots=self._roots))

    def start_worker(self, address: str, dispatcher: str) -> DataWorker:
        """Start a data worker for `dispatcher`, which may be a URL, on the port of `address`, where trainers reach it."""
        port = address.rpartition(":")[2]
        if not port.isdecimal():
            raise InvalidArgumentError(f"address: expected host:port, got {address!r}")
        config = DataWorkerConfig(
            **{**self._fields(), "port": int(port)},
            dispatcher=dispatcher.removeprefix("grpc://"),
            # Port 0 stands for a free port, known only when the server listens.
            advertise=address if int(port) else None,
            client=self._client,
            roots=self._roots,
        )
        return DataWorker(config, self._kinds)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self._listen, name) for name in ListenConfig.model_fields}


class MlpScheduler(Scheduler):
    """The MLP scheduler, for processes that it started."""

    title = "the MLP scheduler"
    gives_roles = True

    def role(self, request: RoleRequest) -> ScheduledRole | None:
        """Return the role that MLP_ROLE gives this process, or None if it trains alone."""
        env = MLPEnv(self.environ)
        if request.is_local and env.role.lower() not in DATA_ROLES:
            return None
        kind = request.kind("MLP_ROLE", env.role, {name.upper(): name for name in get_args(ServerType)})
        if kind is None:
            return None
        num_ps, num_workers = env.num_replicas("ps"), env.num_replicas("worker")
        return request.role(
            kind,
            env.index,
            num_ps=num_ps,
            num_workers=num_workers,
            found_by=ServiceDiscoveryType.MLP,
            workers_field="MLP_WORKER_NUM",
        )

    def discovery(self) -> MLPServiceDiscovery:
        """Return the addresses that the scheduler put into the environment."""
        return MLPServiceDiscovery(MLPEnv(self.environ))

    @contextmanager
    def data_service(
        self, *, listen: ListenConfig, folder: Path | None, reads: bool, num_extra_workers: int
    ) -> Iterator[DataServicePart]:
        """Do what `mlp_pass` does, and close at the end of the block the data workers that it started."""
        left = mlp_pass(
            MLPEnv(self.environ),
            MlpDataServers(listen=listen, folder=folder),
            use_dataservice=reads,
            num_extra_dsworkers=num_extra_workers,
        )
        try:
            yield DataServicePart(finished=left.finished, dispatcher=left.dispatcher)
        finally:
            for server in left.servers:
                server.close()
