"""`distributed_sync_train`: one rank of a synchronous run, whose tables are spread over all ranks."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from monolith.cluster.discovery.config import monolith_discovery
from monolith.cluster.discovery.file import HostServiceDiscovery
from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.cluster.launch.reporting import beating, tell_wrong_usage
from monolith.cluster.role import add_mpi_exception_hook, launched_rank
from monolith.console import log_to_stderr
from monolith.errors import ConfigError, RunInterruptedError
from monolith.features.batch import Batch
from monolith.nn import embedding_collections
from monolith.ranks.agreement import Agreement
from monolith.ranks.data_shards import DataShards
from monolith.ranks.formation import form_mesh
from monolith.ranks.mesh import LoneMesh, Mesh
from monolith.ranks.peers import MeshConfig
from monolith.ranks.rank_store import RankStore
from monolith.ranks.rendezvous import DiscoveryRendezvous, Rendezvous, torchrun_rendezvous
from monolith.state.storage import is_remote
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.data_service import service_dispatcher, service_source
from monolith.train.distributed.run import HeartBeat, tell_scheduler
from monolith.train.distributed.worker import tables_of_model
from monolith.train.hooks.hook import Hook
from monolith.train.synchronous import SynchronousSteps

if TYPE_CHECKING:
    from monolith.train.distributed.data_service import TrainingData
    from monolith.train.trainer import Trainer

__all__ = ["RankSession", "distributed_sync_train", "mesh_config", "rendezvous_of"]

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
    """

    def __init__(
        self,
        trainer: Trainer,
        config: RunnerConfig,
        discovery: ServiceDiscovery | None = None,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        """Wait for the other ranks, or use the `mesh` that connects them."""
        self._trainer, self._config = trainer, config
        self._open = ExitStack()
        self._left = False
        self._data: tuple[object, DataShards] | None = None
        try:
            self._prepare()
            self.mesh = self._formed(discovery) if mesh is None else mesh
            """The ranks."""
            self._open.callback(self.mesh.close)
            self.agreement = Agreement(self.mesh)
            """What they agree on."""
            self.store = RankStore(self.agreement, tables_of_model(trainer.model))
            """Their rows."""
            for collection in embedding_collections(trainer.model):
                collection.use_store(self.store)
            self.steps = SynchronousSteps(trainer, self.agreement, config, store=self.store)
        except BaseException:
            self._open.close()
            raise

    def _prepare(self) -> None:
        # Nobody sees what a process of many waits for unless it is said, and few scripts configure logging.
        log_to_stderr()
        if self._config.supervised:
            tell_wrong_usage()
        add_mpi_exception_hook()
        self._config.require_ranks()
        self._open.enter_context(beating(self._config.liveness.heartbeat_secs))

    def _formed(self, discovery: ServiceDiscovery | None) -> Mesh:
        config = self._config
        if config.num_workers == 1:
            return LoneMesh()
        if discovery is None and _names_discovery(config):
            discovery = self._open.enter_context(monolith_discovery(config))
        rendezvous = rendezvous_of(config) if discovery is None else DiscoveryRendezvous(discovery)
        return form_mesh(
            config.index,
            config.num_workers,
            rendezvous,
            config=mesh_config(config),
            min_ranks=config.min_ranks,
            replacement_secs=config.liveness.replacement_secs,
        )

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
        trainer, failure = self._trainer, None
        trainer.hooks = tuple(hooks)
        try:
            with ExitStack() as meanwhile:
                if self.is_chief:
                    meanwhile.enter_context(HeartBeat(trainer.on_save_metric))
                dispatcher = meanwhile.enter_context(service_dispatcher(self._config))
                given = source if isinstance(source, Iterable) else source()
                step = trainer.fit(
                    self._share(service_source(given, self._config, dispatcher)), steps=steps, max_steps=max_steps
                )
            if trainer.interrupted is not None:
                raise RunInterruptedError(
                    f"rank {self.mesh.rank} stopped at step {step} before its work was done: {trainer.interrupted}"
                )
            return step
        except BaseException as error:
            failure = error
            self._left = True
            self.mesh.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.is_chief:
                tell_scheduler(failure)

    def _share(self, source: Iterable[Batch]) -> Iterable[Batch]:
        """Return the data of this rank: what the steps of ranks read in place of batches."""
        # The same one for the same data, so that a second call continues where the first has stopped.
        if self._data is None or self._data[0] is not source:
            self._data = (source, self.steps.shards_of(source))
        return cast("Iterable[Batch]", self._data[1])

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
