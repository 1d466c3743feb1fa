"""`distributed_sync_train`: one rank of a synchronous run, whose tables are spread over all ranks."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, cast

from pydantic import JsonValue

from monolith.cluster.discovery.config import monolith_discovery
from monolith.cluster.discovery.file import HostServiceDiscovery
from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.cluster.launch.reporting import beating
from monolith.cluster.role import add_mpi_exception_hook, launched_rank
from monolith.console import log_to_stderr
from monolith.errors import ConfigError, RankLostError, RunInterruptedError
from monolith.nn import embedding_collections
from monolith.ranks.agreement import Agreement
from monolith.ranks.data_shards import DataStart
from monolith.ranks.dense import AllReduce
from monolith.ranks.formation import form_mesh
from monolith.ranks.gloo_mesh import GlooMesh, gloo_store
from monolith.ranks.mesh import LoneMesh, Mesh
from monolith.ranks.peers import MeshConfig
from monolith.ranks.process_group import all_reduce_over
from monolith.ranks.rank_store import RankStore
from monolith.ranks.rendezvous import DiscoveryRendezvous, Rendezvous, torchrun_rendezvous
from monolith.ranks.socket_mesh import SocketMesh
from monolith.train.control import Controller
from monolith.train.control_server import controlled
from monolith.train.distributed.barrier import RankBarrier
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.data_service import service_dispatcher, service_source
from monolith.train.distributed.rank_feed import RankFeed, announced_feed
from monolith.train.distributed.rank_recovery import FailureRecord, RankRecovery, loss_in
from monolith.train.distributed.run import HeartBeat, tell_scheduler
from monolith.train.distributed.worker import tables_of_model
from monolith.train.hooks.hook import Hook
from monolith.train.synchronous import SynchronousSteps
from monolith.transport.server import is_loopback
from monolith.urls import is_remote

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from monolith.train.distributed.data_service import TrainingData
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["RankSession", "connect_ranks", "distributed_sync_train", "mesh_config", "rendezvous_of"]

JOINED = "another rank joins the run"
"""Why ranks stop between two steps, to continue as more than they are."""
_KNOCK_SECS = 0.5
"""Seconds after which the chief looks again whether a rank wants to join."""
Result = TypeVar("Result")
_CHIEF = "chief"
RENDEZVOUS = "ranks"
"""The folder of the model_dir in which ranks find each other, if nothing else says how."""
# What launchers call the job, for processes that share nothing but a machine.
_JOBS = ("MONOLITH_UUID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_STEP_ID", "SLURM_JOB_ID")

_log = logging.getLogger(__name__)


def distributed_sync_train(
    trainer: Trainer,
    source: TrainingData | Callable[[], TrainingData],
    config: RunnerConfig,
    discovery: ServiceDiscovery | None = None,
    *,
    steps: int | None = None,
    max_steps: int | None = None,
    hooks: Sequence[Hook] = (),
) -> int:
    """Train as rank `config.index` of `config.num_workers`. Returns the global step when all ranks have ended.

    Every step is one step of all ranks on a global batch. Each rank reads its share of `source`, holds its part of the rows, and
    has all dense parameters. The chief, rank 0, restores and saves. With `use_dataservice`, `source` is a `DatasetConfig` or a
    `DataServiceSource`. `source` may be a function.

    Args:
        trainer: with a model_dir in the chief only.
        source: of all ranks together.
        config: which rank this is, and how the run is made.
        discovery: through which ranks find each other. None: as `rendezvous_of` says.
        steps: of all ranks together, more than were made.
        max_steps: the global step at which the run ends.
        hooks: of this rank.

    Raises:
        RankLostError: another rank has died, has failed or has fallen silent.
        RanksDisagreeError: ranks do not do the same.
        RunInterruptedError: `Trainer.interrupt` was called on some rank before the work was done.
    """
    with RankSession(trainer, config, discovery) as session:
        return session.train(source, steps=steps, max_steps=max_steps, hooks=hooks)


class RankSession:
    """This process as one of the ranks of a run, from their formation to their end.

    Between two calls of `train` ranks keep their rows. All ranks make the same calls. Whatever the chief does alone in between,
    such as an evaluation, the others serve in `serve`.

    If a rank is lost in `train`, the others wait for the process that takes its place. All restore the last state that they have
    in common and continue from there. With `RunnerConfig.min_ranks` they continue without it after a while, and when it comes
    back later, they save and continue with it.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: RunnerConfig,
        discovery: ServiceDiscovery | None = None,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        """Wait for the other ranks, or use the `mesh` that connects them. Then a lost rank is not waited for."""
        self._trainer, self._config, self._given = trainer, config, mesh
        self._open = ExitStack()
        self._left = self._trains = False
        self._shared: JsonValue = None
        self._formation = ExitStack()
        self._recovery = RankRecovery(FailureRecord(config.model_dir or None, rank=config.index))
        self._generation = 0
        self._store_of_gloo: Store | None = None
        self.mesh: Mesh = LoneMesh()
        """The ranks."""
        self.store: RankStore
        """Their rows."""
        try:
            self._prepare()
            self._rendezvous = self._found_by(discovery)
            # Where a run without a saved state starts again.
            self._initial = deepcopy(trainer.state_dict())
            self._join()
        except BaseException:
            self._open.close()
            raise

    def _prepare(self) -> None:
        # Nobody sees what a process of many waits for unless it is said, and few scripts configure logging.
        log_to_stderr()
        add_mpi_exception_hook()
        self._config.require_ranks()
        self._open.enter_context(beating(self._config.liveness.heartbeat_secs))
        self._open.callback(self._disconnect)

    def _found_by(self, discovery: ServiceDiscovery | None) -> Rendezvous | None:
        """Return how this rank finds the others. None if there are none, or if they are connected already."""
        config = self._config
        if self._given is not None or config.num_workers == 1:
            return None
        if discovery is None and _names_discovery(config):
            discovery = self._open.enter_context(monolith_discovery(config))
        return rendezvous_of(config) if discovery is None else DiscoveryRendezvous(discovery)

    def _join(self) -> None:
        """Connect to the other ranks, and make the parts of this process that belong to one formation of the run."""
        self._formation = ExitStack()
        self.mesh = self._formed()
        self._generation = self.mesh.generation
        self.agreement = Agreement(self.mesh)
        """What they agree on."""
        self.agreement.actions[_CHIEF] = self._take_result
        self.store = RankStore(self.agreement, tables_of_model(self._trainer.model), wire=self._config.client.wire)
        for collection in embedding_collections(self._trainer.model):
            collection.use_store(self.store)
        group = self._group()
        self.steps = SynchronousSteps(self._trainer, self.agreement, self._config, store=self.store, group=group)
        """How they train."""

    def _group(self) -> AllReduce | None:
        """Return what adds dense gradients in place of the mesh, if anything does."""
        backend, device = self._config.dense_backend, self._trainer.device
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "frames"
        if backend == "frames" or self.mesh.size == 1:
            return None
        if not is_loopback(self._config.server.host):
            _warn_of_plain("dense gradients", f"dense_backend={backend!r}")
        with self.agreement.acting():
            return self._formation.enter_context(
                all_reduce_over(
                    self.mesh,
                    backend,
                    device,
                    timeout_secs=self._config.rank_timeout_secs,
                    host=mesh_config(self._config).host,
                )
            )

    def _take_result(self, result: JsonValue) -> None:
        self._shared = result

    def _formed(self) -> Mesh:
        config, settings = self._config, mesh_config(self._config)
        if self._rendezvous is None:
            return self._given or LoneMesh()
        if config.rank_transport == "gloo":
            return self._over_gloo(self._rendezvous, settings)
        while True:
            try:
                return form_mesh(
                    config.index,
                    config.num_workers,
                    self._rendezvous,
                    config=settings,
                    after=self._generation,
                    min_ranks=config.min_ranks,
                    replacement_secs=config.liveness.replacement_secs,
                    while_waiting=self._stop_waiting,
                )
            except RankLostError as lost:
                # A rank that dies while the run is formed is waited for like one that dies later.
                if self._recovery.seconds > settings.formation_secs:
                    raise
                self._recovery.lost(lost, step=self._trainer.step)

    def _over_gloo(self, rendezvous: Rendezvous, settings: MeshConfig) -> GlooMesh:
        config = self._config
        if not is_loopback(settings.host):
            _warn_of_plain("rows and gradients", "rank_transport='gloo'")
        if self._store_of_gloo is None or config.index:
            # That of rank 0 lives as long as rank 0. The others look for it again: rank 0 may have been replaced.
            self._store_of_gloo = gloo_store(
                rendezvous, rank=config.index, host=settings.host, timeout=settings.formation_secs
            )
        return GlooMesh(
            self._store_of_gloo,
            rank=config.index,
            size=config.num_workers,
            timeout=settings.rank_timeout_secs,
            formation_secs=settings.formation_secs,
        )

    def _stop_waiting(self) -> None:
        if self._trainer.interrupted is not None:
            raise RunInterruptedError(
                f"rank {self._config.index} stopped while it waited for other ranks: {self._trainer.interrupted}"
            )

    def _disconnect(self) -> None:
        self._formation.close()
        self.mesh.close()
        if hasattr(self, "store"):
            self.store.close()

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.mesh.rank == 0

    def train(
        self,
        source: TrainingData | Callable[[], TrainingData],
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> int:
        """Train until the data or the steps end on all ranks. Returns the global step."""
        if steps is not None and self._config.supervised:
            _log.warning(
                "steps=%d counts from the start of this process: after a restart there are more; max_steps is exact",
                steps,
            )
        failure: BaseException | None = None
        limits = _Limits(steps, max_steps)
        self._trains = True
        try:
            while True:
                try:
                    step = self._train_once(source, limits, hooks)
                except Exception as error:
                    lost = loss_in(error)
                    if lost is None or self._rendezvous is None or self.steps.needs_whole_group:
                        raise
                    self._recovery.lost(lost, step=self._trainer.step)
                else:
                    if not self._is_joined_by_another:
                        return step
                self._start_over()
        except BaseException as error:
            failure = error
            self._left = True
            self.mesh.fail(f"{type(error).__name__}: {error}")
            self._recovery.failed(error, step=self._trainer.step)
            raise
        finally:
            self._trains = False
            if self._config.is_chief:
                tell_scheduler(failure)

    def _train_once(
        self, source: TrainingData | Callable[[], TrainingData], limits: _Limits, hooks: Sequence[Hook]
    ) -> int:
        trainer = self._trainer
        trainer.hooks = (*hooks, _Joining(self._recovery, limits, self.mesh, self._config))
        with ExitStack() as meanwhile:
            feed = RankFeed(trainer, self.store)
            folder = self._config.model_dir or trainer.config.model_dir
            meanwhile.enter_context(announced_feed(feed, folder, self._config.controller))
            if self.is_chief:
                meanwhile.enter_context(HeartBeat(trainer.on_save_metric))
                trainer.hooks = (*trainer.hooks, self._controller(meanwhile, feed))
            else:
                trainer.hooks = (*trainer.hooks, feed)
            dispatcher = meanwhile.enter_context(service_dispatcher(self._config))
            given = source if isinstance(source, Iterable) else source()
            data = service_source(given, self._config, dispatcher)
            limits.data.rewind(data)
            step = trainer.fit(data, steps=limits.steps, max_steps=limits.last)
        if trainer.interrupted is not None:
            raise RunInterruptedError(
                f"rank {self.mesh.rank} stopped at step {step} before its work was done: {trainer.interrupted}"
            )
        return step

    @property
    def _is_joined_by_another(self) -> bool:
        return JOINED in (self._trainer.stop_reason or "")

    def _start_over(self) -> None:
        """Form the run again. Everything that this process had from it is restored from what is saved, or starts again."""
        self._disconnect()
        self._trainer.start_over(self._initial)
        self._join()

    def _controller(self, meanwhile: ExitStack, feed: RankFeed) -> Controller:
        """Return what does in the chief what operators ask of all ranks."""
        config = self._config
        controller = meanwhile.enter_context(
            controlled(
                self._trainer, config.controller, num_workers=self.mesh.size, token=config.client.token, feed=feed
            )
        )
        controller.attach(RankBarrier(self.agreement))
        return controller

    def by_chief(self, work: Callable[[], Result]) -> Result:
        """Let the chief do something alone, such as an evaluation, while the other ranks serve it. Returns its result on all.

        `work` returns what JSON can hold.
        """
        with self.chief_alone() as does_it:
            if does_it:
                result = work()
                if not self._trains:
                    self.agreement.run(_CHIEF, cast("JsonValue", result))
                return result
        return cast("Result", self._shared)

    @contextmanager
    def chief_alone(self) -> Iterator[bool]:
        """Let the chief do something alone in a block that all ranks enter. Yields whether this rank does it.

        The others have served it when they enter. During `train` they serve anyway, and the caller does it.
        """
        if self._trains:
            yield True
            return
        if not self.is_chief:
            self.agreement.serve(_CHIEF)
            yield False
            return
        try:
            yield True
        except Exception as error:
            self._left = True
            self.mesh.fail(f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            # A generator of predictions that is closed early has done its work.
            self.agreement.release(_CHIEF)
            raise
        self.agreement.release(_CHIEF)

    def close(self) -> None:
        """Leave the other ranks, once all of them want to. Until then this one serves those that still ask for something."""
        with self._open:
            if not self._left:
                self._left = True
                self.agreement.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._left = True
            self.mesh.fail(f"{type(error).__name__}: {error}")
        self.close()


@dataclass
class _Limits:
    """Where a call of `train` begins and ends, however often the run is formed."""

    steps: int | None
    last: int | None
    data: DataStart = field(default_factory=DataStart)

    def begin(self, step: int) -> None:
        if self.steps is not None:
            self.last, self.steps = step + self.steps, None


class _Joining(Hook):
    """Logs that the run continues, and lets the chief stop it when a rank that was given up has come back."""

    def __init__(self, recovery: RankRecovery, limits: _Limits, mesh: Mesh, config: RunnerConfig) -> None:
        self._recovery, self._limits, self._mesh, self._config = recovery, limits, mesh, config
        self._next = 0.0

    def after_start(self, trainer: Trainer) -> None:
        self._limits.begin(trainer.step)
        self._recovery.continued(step=trainer.step, ranks=self._mesh.size)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._let_in(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        self._let_in(trainer)

    def _let_in(self, trainer: Trainer) -> None:
        if not isinstance(self._mesh, SocketMesh) or self._mesh.size == self._config.num_workers:
            return
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _KNOCK_SECS
        late = ", ".join(map(str, self._mesh.newcomers()))
        if late and trainer.config.model_dir is not None:
            trainer.request_stop(f"{JOINED}: {late}")
        elif late:
            # With them the run would start from its beginning.
            self._next = math.inf
            _log.warning(
                "ranks %s wait until the run ends: it has no model_dir, from which it could continue with them", late
            )


def connect_ranks(config: RunnerConfig, discovery: ServiceDiscovery, *, after: int = 0) -> Mesh:
    """Connect the ranks of a run whose rows are on servers. They find each other as under `torchrun`, or by `discovery`.

    `after` is the last generation that this process was part of.
    """
    config.require_ranks()
    if config.num_workers == 1:
        return LoneMesh()
    launched = launched_rank()
    by_torchrun = launched is not None and launched.launcher == "torchrun" and launched.size == config.num_workers
    rendezvous = rendezvous_of(config) if by_torchrun else DiscoveryRendezvous(discovery)
    return form_mesh(config.index, config.num_workers, rendezvous, config=mesh_config(config), after=after)


def mesh_config(config: RunnerConfig) -> MeshConfig:
    """Return how a rank listens: as a server of the run would, with the same token and certificates.

    Example:
        >>> mesh_config(RunnerConfig(num_workers=2, rank_timeout_secs=5.0)).rank_timeout_secs
        5.0
    """
    return MeshConfig(
        host=config.server.host,
        token=config.server.token or config.client.token,
        tls_cert=config.server.tls_cert,
        tls_key=config.server.tls_key,
        tls_root_certs=config.client.tls_root_certs,
        rank_timeout_secs=config.rank_timeout_secs,
        exchange_timeout_secs=config.rank_exchange_secs,
        formation_secs=config.rank_formation_secs,
    )


def _warn_of_plain(what: str, setting: str) -> None:
    _log.warning(
        "%s: torch.distributed sends %s without encryption and checks no token; use a network that nobody else reaches",
        setting,
        what,
    )


def _names_discovery(config: RunnerConfig) -> bool:
    return "discovery_type" in config.model_fields_set and not config.is_local


def rendezvous_of(config: RunnerConfig, environ: Mapping[str, str] = os.environ) -> Rendezvous:
    """Return how ranks find each other when no discovery is named.

    Under `torchrun`, through its store. Otherwise through files in the model_dir, or if all ranks are on one machine and their
    launcher names the job, in a folder for temporary files.

    Raises:
        ConfigError: none of these is possible.
    """
    launched = launched_rank(environ)
    if launched is not None and launched.launcher == "torchrun" and environ.get("MASTER_ADDR"):
        return torchrun_rendezvous(job=config.uuid or environ.get("TORCHELASTIC_RUN_ID", "ranks"), environ=environ)
    if config.model_dir and not is_remote(config.model_dir):
        return DiscoveryRendezvous(HostServiceDiscovery(Path(config.model_dir, RENDEZVOUS)))
    job = config.uuid or next((environ[name] for name in _JOBS if environ.get(name)), "")
    if job and launched is not None and launched.local_size == launched.size:
        name = f"monolith-ranks-{os.getuid()}-{''.join(c if c.isalnum() else '-' for c in job)}"
        return DiscoveryRendezvous(HostServiceDiscovery(Path(tempfile.gettempdir(), name)))
    raise ConfigError(
        "RunnerConfig.discovery_type: the ranks need something through which they find each other: start them with torchrun, set "
        "model_dir or discovery_folder to a folder that all of them see, or name a discovery_type"
    )
