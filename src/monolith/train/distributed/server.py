"""A parameter server as a process of a run: where it listens, what it keeps, and that others find it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.cluster.discovery.file import HostServiceDiscovery
from monolith.cluster.discovery.ray import RayServiceDiscovery
from monolith.cluster.discovery.service_discovery import ScheduledDiscovery, ServiceDiscovery
from monolith.cluster.net import concat_ip_and_port, get_local_host, split_address
from monolith.console import Reminder
from monolith.errors import ConfigError, WorkerLostError
from monolith.ps.client.server_store import ServerStore
from monolith.ps.server.parameter_server import ParameterServer, ServerConfig
from monolith.state.model_dir import SERVERS
from monolith.train.config import RunConfig, other_runs
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.worker import Placement, client_config
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["LocalServers", "announced", "place_server", "serve", "wait_for_end"]

_ANY_ADDRESS = ("0.0.0.0", "::")
_REMIND_SECS = 600.0

_log = logging.getLogger(__name__)


def place_server(config: ServerConfig, runner: RunnerConfig, discovery: ServiceDiscovery) -> ServerConfig:
    """`config` with what the run decides: the address a scheduler expects the server at, and its folder in the model_dir.

    Fields that were given to `config` stay as they are.
    A server that was started again takes the port of its predecessor if nobody has it: workers then find it without asking.

    Example:
        >>> runner = RunnerConfig(server_type="ps", index=1, num_ps=2, model_dir="/mnt/run")
        >>> place_server(ServerConfig(), runner, HostServiceDiscovery("/mnt/run/discovery")).folder
        PosixPath('/mnt/run/ps/1')
    """
    decided: dict[str, object] = {}
    if isinstance(discovery, ScheduledDiscovery):
        decided["host"], decided["port"] = split_address(discovery.addr)
    elif isinstance(discovery, HostServiceDiscovery | RayServiceDiscovery):
        decided["port"] = _earlier_port(config.host, discovery.query("ps").get(runner.index))
    if runner.model_dir and not is_remote(runner.model_dir):
        # Who is started in a place takes it: a predecessor that only hangs must not keep it.
        decided |= {"folder": Path(runner.model_dir, SERVERS, str(runner.index)), "take_over": True}
    if runner.model_dir:
        decided["restore_roots"] = (*config.restore_roots, runner.model_dir)
    return config.model_copy(
        update={name: value for name, value in decided.items() if name not in config.model_fields_set}
    )


@contextmanager
def announced(server: ParameterServer, runner: RunnerConfig, discovery: ServiceDiscovery) -> Iterator[str]:
    """Announce `server` during a block. Yields its address as others know it."""
    host = get_local_host() if server.config.host in _ANY_ADDRESS else server.config.host
    address = concat_ip_and_port(host, server.port)
    discovery.register("ps", runner.index, address)
    try:
        yield address
    finally:
        discovery.deregister("ps", runner.index, address)


def serve(
    runner: RunnerConfig, discovery: ServiceDiscovery, *, restore_roots: Sequence[str] = (), grace: float = 5.0
) -> None:
    """Be server `runner.index` until a client, the chief at the end, asks it to stop. See `wait_for_end`.

    `restore_roots` are other runs that the chief may let it restore from, in addition to those that `runner.server` names.
    """
    config = place_server(runner.server, runner, discovery)
    roots = (*config.restore_roots, *restore_roots)
    with ParameterServer(config.model_copy(update={"restore_roots": roots})) as server:
        with announced(server, runner, discovery) as address:
            _log.info("parameter server %d serves at %s", runner.index, address)
            wait_for_end(server, runner)
        server.close(grace=grace)


def wait_for_end(server: ParameterServer, runner: RunnerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Return when `server` was asked to stop.

    When no worker has called for longer than a replacement takes, that is logged. After `liveness.orphan_secs` the server gives
    up, unless a launcher supervises the job, or the servers are to stay without workers (`enable_realtime_training`).

    Raises:
        WorkerLostError: no worker has called for `liveness.orphan_secs`. What the server holds is in its folder.
    """
    liveness = runner.liveness
    gives_up = not runner.supervised and not runner.enable_realtime_training
    reminder = Reminder(_log, who=f"parameter server {runner.index}", every_secs=_REMIND_SECS, clock=clock)
    while not server.wait(timeout=liveness.heartbeat_secs):
        silence = server.silence
        if silence >= liveness.orphan_secs and gives_up:
            raise WorkerLostError(
                f"no worker has called parameter server {runner.index} for {silence:.0f} s (liveness.orphan_secs): the run was "
                "left without ending its servers; start the job again, the server continues from its folder"
            )
        if silence >= liveness.replacement_secs:
            left = liveness.orphan_secs - silence if gives_up else None
            reminder.waiting("a worker to call, none has for longer than a restart takes", left_secs=left)


def _earlier_port(host: str, address: str | None) -> int:
    """Return the port of `address` if it was on this host and is free, else 0."""
    if address is None:
        return 0
    earlier_host, port = split_address(address)
    if earlier_host != host:
        return 0
    try:
        # By itself, without the options by which servers share a port: someone who only hangs still has it.
        socket.create_server((host, port), reuse_port=False).close()
    except OSError:
        return 0
    return port


class LocalServers:
    """`runner.num_ps` servers in threads of this process, which hold the rows of a trainer's model.

    Every lookup and update goes through the frames, sockets and handlers of a run over processes. Dense parameters stay in the
    model, as with one worker. With a model_dir the servers keep their parts in it, where servers of a run over processes, or a
    run without any, find them.

    Example:
        >>> import torch
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.train import RunnerConfig, Trainer
        >>> model = torch.nn.Sequential(EmbeddingBagCollection([Feature(name="user", dim=8)]))
        >>> servers = LocalServers(Trainer(model), RunnerConfig(is_local=True, num_ps=2))
        >>> len(servers.store.addresses)
        2
        >>> servers.close()
    """

    def __init__(self, trainer: Trainer, runner: RunnerConfig) -> None:
        self._open = ExitStack()
        try:
            self.servers = [
                self._open.enter_context(ParameterServer(_server_config(runner, trainer.config, index)))
                for index in range(runner.num_ps)
            ]
            placement = Placement(trainer, dense=False)
            self.store = self._open.enter_context(
                ServerStore(
                    [server.address for server in self.servers],
                    placement.tables,
                    config=client_config(runner, time.time_ns()),
                )
            )
            """The rows of the model."""
            placement.use(self.store)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """Stop the servers. What they hold is in the model_dir, or lost."""
        self._open.close()


def _server_config(runner: RunnerConfig, config: RunConfig, index: int) -> ServerConfig:
    model_dir = config.model_dir
    server = runner.server.model_copy(update={"restore_roots": (*runner.server.restore_roots, *other_runs(config))})
    if model_dir is None:
        return server
    if is_remote(model_dir):
        raise ConfigError(
            f"RunConfig.model_dir: servers in this process keep their rows on a local disk, got {model_dir!r}; or num_ps=0"
        )
    return server.model_copy(update={"folder": Path(model_dir, SERVERS, str(index)), "take_over": True})
