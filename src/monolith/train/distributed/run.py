"""`distributed_train`: one process of a run over servers and workers, whichever it is."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from monolith.cluster.coordination import Coordination
from monolith.cluster.discovery.service_discovery import ScheduledDiscovery, ServiceDiscovery
from monolith.cluster.discovery.zookeeper import ZKServiceDiscovery
from monolith.cluster.launch.reporting import beating
from monolith.cluster.role import add_mpi_exception_hook
from monolith.cluster.scheduler import DATA_ROLES, ServerType, schedulers_of
from monolith.cluster.zookeeper_coordination import ZKCoordination, ZKSession
from monolith.console import log_to_stderr
from monolith.errors import ConfigError, MonolithError, RunInterruptedError
from monolith.features.batch import Batch
from monolith.ps.client.benchmark import BenchmarkConfig, ServerKeys, choose_servers, measure_servers
from monolith.ps.client.coordination_client import HostLink, ServerSteps
from monolith.ps.client.server_group import ClientConfig, link_to
from monolith.ranks.mesh import Mesh
from monolith.state.storage import open_folder
from monolith.train.config import other_runs
from monolith.train.control_server import controlled
from monolith.train.distributed.config import ControllerConfig, RunnerConfig
from monolith.train.distributed.data_service import serve_data, service_dispatcher, service_source
from monolith.train.distributed.formation import Formation, run_with_retries
from monolith.train.distributed.server import serve
from monolith.train.distributed.worker import Meet, SynchronousAttempt, WorkerAttempt, client_config
from monolith.train.hooks.checkpoint import MetricSink
from monolith.train.hooks.hook import Hook
from monolith.transport.calls import BasicCall

if TYPE_CHECKING:
    from monolith.train.distributed.data_service import TrainingData
    from monolith.train.trainer import Trainer

__all__ = ["HeartBeat", "ServerListFile", "distributed_train", "shut_down", "tell_scheduler"]

SERVER_LISTS = "ps_cluster_dir"
"""The folder of the model_dir with one file for each job."""
DEFAULT_NAME = "ps_info"
"""The file of a job without a name."""
SHUTDOWN_SECS = 10.0
"""Seconds that a server has to confirm that it will stop. Then the run ends without it."""
BEAT_SECS = 30.0
"""Seconds between two heartbeats of the chief."""
_log = logging.getLogger(__name__)


def distributed_train(
    trainer: Trainer,
    source: TrainingData | Callable[[], TrainingData],
    config: RunnerConfig,
    discovery: ServiceDiscovery,
    *,
    steps: int | None = None,
    max_steps: int | None = None,
    hooks: Sequence[Hook] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Do the part of this process in a run, as `config` says. Returns the global step when that part is over.

    A server serves until the chief ends it, a process of the data service until worker 0 has ended.

    A worker waits for the servers, moves the rows of the model onto them, its dense parameters too if there are several workers,
    and trains its share of `source`: `source.shard(index, num_workers)`, or all of one that has no shards, with a warning. With
    `use_dataservice`, `source` is a `DatasetConfig` or a `DataServiceSource`. When servers fail it retries by the rules of
    `run_with_retries`. The chief, worker 0, lets the others begin when it has restored and waits at the end until they have
    finished. Then it ends the servers, unless a launcher does, and tells the scheduler. After a failure it leaves the servers to
    its successor. `source` may be a function: only workers call it.

    With several workers the global step counts the steps of all, and `steps` and `max_steps` mean those.

    Raises:
        RunInterruptedError: `Trainer.interrupt` was called before the work of this process was done.
        WorkerLostError: in the chief, a worker did not finish its work and was not replaced.
        ServerLostError: in the chief, a server lost what it held, and `config` does not accept that.
    """
    # Nobody sees what a process of many waits for unless it is said, and few scripts configure logging.
    log_to_stderr()
    add_mpi_exception_hook()
    with beating(config.liveness.heartbeat_secs):
        config = _as_discovered(config, discovery)
        if config.server_type in DATA_ROLES:
            serve_data(config)
            return trainer.step
        config.require_spread()
        if config.server_type == "ps":
            serve(config, discovery, restore_roots=other_runs(trainer.config))
            return trainer.step
        with (
            service_dispatcher(config) as dispatcher,
            _meeting(config, discovery) as meet,
            controlled(
                trainer,
                config.controller if config.is_chief else ControllerConfig(enabled=False),
                num_workers=config.num_workers,
                token=config.client.token,
            ) as controller,
        ):
            data = source if isinstance(source, Iterable) else source()
            worker = _Worker(config, discovery, trainer, sleep)
            common: dict[str, Any] = {
                "steps": steps,
                "max_steps": max_steps,
                "hooks": hooks,
                "find": worker.formation.announced,
                "controller": controller if config.is_chief else None,
                "sleep": sleep,
            }
            served = service_source(data, config, dispatcher)
            if config.is_synchronous:
                connect = _connection(config, discovery)
                return worker.train(SynchronousAttempt(trainer, served, config, connect=connect, **common))
            return worker.train(WorkerAttempt(trainer, _share(served, config), config, meet=meet, **common))


def _connection(config: RunnerConfig, discovery: ServiceDiscovery) -> Callable[[int], Mesh]:
    """Return a function that connects this rank of a run with rows on servers to the other ranks, after a generation."""
    from monolith.train.distributed.ranks import connect_ranks

    return lambda after: connect_ranks(config, discovery, after=after)


class _Worker:
    def __init__(
        self, config: RunnerConfig, discovery: ServiceDiscovery, trainer: Trainer, sleep: Callable[[float], None]
    ) -> None:
        self._config, self._trainer, self._sleep = config, trainer, sleep
        spares = config.num_redundant_ps > 0
        self.formation = Formation(
            discovery,
            config.num_required_ps,
            is_chief=config.is_chief,
            shared=ServerListFile(config.model_dir, uuid=config.uuid) if spares else None,
            sleep=sleep,
        )
        self._servers: tuple[str, ...] = ()

    def train(self, attempt: WorkerAttempt) -> int:
        failure: BaseException | None = None
        try:
            with ExitStack() as meanwhile:
                if self._config.is_chief:
                    meanwhile.enter_context(HeartBeat(self._trainer.on_save_metric))
                step = run_with_retries(
                    attempt,
                    self._form,
                    max_losses=self._config.max_losses,
                    wait_secs=self._config.retry_wait_in_secs,
                    on_failover=lambda count: self._trainer.on_save_metric("failover", count, {}),
                    sleep=self._sleep,
                )
            if attempt.cut_short:
                raise RunInterruptedError(
                    f"worker {self._config.index} stopped at step {step} before its work was done: "
                    f"{self._trainer.interrupted}; a process that takes its place continues with the next batch"
                )
            return step
        except BaseException as error:
            failure = error
            raise
        finally:
            if self._config.is_chief:
                self._end(failure)

    def _form(self) -> tuple[str, ...]:
        servers = self.formation.servers()
        self._servers = self._fastest(servers) if self._config.num_extra_ps else servers
        return self._servers

    def _fastest(self, servers: tuple[str, ...]) -> tuple[str, ...]:
        config = self._config
        talking = client_config(config, time.time_ns())
        round_of_all = BenchmarkConfig(
            ps_list=servers,
            num_ps_required=config.num_ps,
            num_workers=config.num_workers,
            index=config.index,
            benchmark_secs=config.benchmark_secs,
            ps_str_overridden=config.ps_str_overridden,
        )
        with closing(ServerKeys(servers[0], talking)) as board:
            return choose_servers(
                round_of_all,
                board,
                measure=lambda addresses, seconds: measure_servers(addresses, seconds=seconds, config=talking),
                sleep=self._sleep,
            )

    def _end(self, failure: BaseException | None) -> None:
        """End the servers after a success only: after a failure of the chief its successor and the workers need them."""
        config = self._config
        if failure is not None:
            _log.warning("the chief failed, and leaves the servers to its successor: %s", type(failure).__name__)
        elif config.supervised:
            _log.debug("the launcher ends the servers when all workers have ended")
        elif config.enable_realtime_training and not config.force_shutdown_ps:
            _log.info("the servers stay: they feed a service")
        else:
            everyone = dict.fromkeys([*self._servers, *self.formation.announced()])
            shut_down(list(everyone), client_config(config, 0))
        tell_scheduler(failure)


class ServerListFile:
    """An `AddressList`: addresses with commas in `<model_dir>/ps_cluster_dir/<uuid>`, written as a whole.

    Example:
        >>> servers = ServerListFile("memory://run", uuid="job-7")
        >>> servers.read()
        ()
        >>> servers.write(["10.0.0.7:2222", "10.0.0.8:2222"])
        >>> ServerListFile("memory://run", uuid="job-7").read()
        ('10.0.0.7:2222', '10.0.0.8:2222')
    """

    def __init__(self, model_dir: str, *, uuid: str = "") -> None:
        self._name = uuid or DEFAULT_NAME
        # It becomes the name of a file: nothing that leads elsewhere.
        if not re.fullmatch(r"[\w.:@+-]+", self._name) or not self._name.strip("."):
            raise ConfigError(f"RunnerConfig.uuid: expected letters, digits and _.:@+-, got {uuid!r}")
        self._folder = f"{model_dir.rstrip('/')}/{SERVER_LISTS}"

    def read(self) -> tuple[str, ...]:
        """Return the addresses, none if there is no file."""
        folder = open_folder(self._folder)
        if folder.size(self._name) is None:
            return ()
        return tuple(filter(None, folder.read(self._name).decode(errors="replace").strip().split(",")))

    def write(self, addresses: Sequence[str]) -> None:
        """Replace the file."""
        open_folder(self._folder).write(self._name, ",".join(addresses).encode())


def shut_down(addresses: Sequence[str], config: ClientConfig, *, timeout: float = SHUTDOWN_SECS) -> list[str]:
    """Ask all servers to stop, in parallel and once. Returns those that did not answer, which are not waited for.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server:
        ...     shut_down([server.address], ClientConfig()), server.wait(timeout=10)
        ([], True)
    """
    patient = config.model_copy(update={"timeout": timeout})

    def hears(address: str) -> bool:
        link = link_to(address, patient)
        try:
            link.call(BasicCall.SHUTDOWN)
        except MonolithError as error:
            _log.warning("server %s did not confirm that it stops: %s", address, error)
            return False
        finally:
            link.close()
        return True

    # A thread for each: a server that accepts a connection and never answers must not delay the others.
    with ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="monolith-shut-down") as threads:
        heard = list(threads.map(hears, addresses))
    return [address for address, answered in zip(addresses, heard, strict=True) if not answered]


def tell_scheduler(error: BaseException | None, *, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the schedulers that started this process, if any, that the run has succeeded or which error broke it."""
    for scheduler in schedulers_of(environ):
        scheduler.job_ended(error)


class HeartBeat:
    """Reports to `metric` at intervals that the run is alive, and at the end that it has stopped.

    Example:
        >>> with HeartBeat(lambda name, value, tags: print(name, dict(tags))):
        ...     pass
        training_heart_beat {'type': 'running'}
        training_heart_beat {'type': 'stopped'}
    """

    def __init__(self, metric: MetricSink, *, every_secs: float = BEAT_SECS) -> None:
        self._metric, self._every_secs = metric, every_secs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monolith-training-heart-beat", daemon=True)

    def __enter__(self) -> Self:
        self._tell("running")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        self._tell("stopped")

    def _run(self) -> None:
        while not self._stopped.wait(self._every_secs):
            self._tell("running")

    def _tell(self, state: str) -> None:
        self._metric("training_heart_beat", 1, {"type": state})


@contextmanager
def _meeting(config: RunnerConfig, discovery: ServiceDiscovery) -> Iterator[Meet | None]:
    """How a worker becomes a member of the run in ZooKeeper, if the job has one. None: at the parameter servers."""
    if not isinstance(discovery, ZKServiceDiscovery):
        yield None
        return
    session = ZKSession(discovery.job_name, discovery.zk_server, run=config.uuid, liveness=config.liveness)

    def meet(servers: Sequence[str], talking: ClientConfig, find: Callable[[], Sequence[str]]) -> Coordination:
        steps = ServerSteps(HostLink(servers, config=talking, find=find))
        return ZKCoordination(session, index=config.index, epoch=talking.epoch or 0, steps=steps)

    with closing(session):
        yield meet


def _share(data: Iterable[Batch], config: RunnerConfig) -> Iterable[Batch]:
    if config.num_workers == 1:
        return data
    if hasattr(data, "shard"):
        share: Iterable[Batch] = data.shard(config.index, config.num_workers)
        return share
    _log.warning(
        "%s cannot be divided among workers, it has no shard(index, count): worker %d of %d trains on all of it",
        type(data).__name__,
        config.index,
        config.num_workers,
    )
    return data


def _as_discovered(config: RunnerConfig, discovery: ServiceDiscovery) -> RunnerConfig:
    """Return `config` with the role that the discovery of a scheduler gives this process."""
    if not isinstance(discovery, ScheduledDiscovery):
        return config
    kinds = get_args(ServerType)
    if discovery.server_type not in kinds:
        expected = ", ".join(map(repr, kinds))
        raise ConfigError(
            f"RunnerConfig.server_type: expected one of {expected}, the scheduler says {discovery.server_type!r}"
        )
    return config.model_copy(update={"server_type": discovery.server_type, "index": discovery.index})
