"""One attempt of a worker to train over servers, with all that it and the others need to know of each other."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from monolith.cluster.coordination import Coordination
from monolith.console import Reminder
from monolith.errors import ConfigError, InvalidArgumentError, ServerError
from monolith.features.batch import Batch
from monolith.nn import embedding_collections
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.ps.client.server_group import ClientConfig
from monolith.ps.client.server_parameters import CachedParameters, ServerOptimizer
from monolith.ps.client.server_store import ServerStore
from monolith.ps.protocol.dense_optimizers import group_optimizers
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ranks.agreement import Agreement
from monolith.ranks.data_shards import DataStart
from monolith.ranks.mesh import Mesh
from monolith.train.control import Controller
from monolith.train.distributed.barrier import (
    BarrierHook,
    BarrierSaverListener,
    LocalBarrier,
    RankBarrier,
    RemoteBarrier,
    WorkerBarrier,
)
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.formation import TEMPORARY
from monolith.train.distributed.health import ServerHealthHook
from monolith.train.distributed.sync import GlobalStepHook, RemoteStates, TrainingHooksHelper
from monolith.train.hooks.cached_parameters import FetchCachedVariablesHook
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.tide import CustomGlobalStepWaiterHook
from monolith.train.preconditions import is_resumable
from monolith.train.synchronous import SynchronousSteps
from monolith.train.trainer import DATA_ENDED

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["Placement", "SynchronousAttempt", "WorkerAttempt", "client_config", "tables_of_model"]

_POLL_SECS = 0.2

Meet = Callable[[Sequence[str], ClientConfig, Callable[[], Sequence[str]]], Coordination]
"""Becomes a member of the run, in the epoch of a configuration. Arguments: the addresses of the servers, how to talk to them, and
where they are now."""
_log = logging.getLogger(__name__)


def tables_of_model(model: nn.Module) -> list[DeclaredTable]:
    """Return the tables that all collections of `model` need. Raises `ConfigError` if two have one of the same name.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> model = nn.Sequential(EmbeddingBagCollection([Feature(name="user", dim=8)]))
        >>> [table.config.name for table in tables_of_model(model)]
        ['user']
    """
    tables: dict[str, DeclaredTable] = {}
    for collection in embedding_collections(model):
        for table in collection.declaration.tables:
            name = table.config.name
            if name in tables:
                raise ConfigError(
                    f"table {name!r}: two collections of the model have it, and would share its rows on servers; name the "
                    "features of one otherwise"
                )
            tables[name] = DeclaredTable(config=table.config, admission=table.admission)
    return list(tables.values())


class Placement:
    """Moves what `trainer` trains onto servers, and after a failure onto others."""

    def __init__(self, trainer: Trainer, *, dense: bool) -> None:
        self._trainer = trainer
        self.tables: Sequence[DeclaredTable] = tables_of_model(trainer.model)
        """What has to be declared to the servers."""
        self._optimizer = trainer.dense.optimizer if dense else None
        if self._optimizer is not None:
            trainer.dense.declare()
            # What servers do not have is refused before any of them is asked.
            group_optimizers(self._optimizer)

    def use(self, store: ServerStore) -> list[Hook]:
        """Train on `store` from now on. Returns the hooks that this needs."""
        for collection in embedding_collections(self._trainer.model):
            # What a failed step has left would be applied a second time, or never.
            collection.discard_gradients()
            collection.use_store(store)
        if self._optimizer is None:
            return []
        cached = CachedParameters(
            self._trainer.model,
            store,
            self._optimizer,
            declared=self._trainer.dense.declared,
            replace_other=self._trainer.config.clear_nn,
        )
        self._trainer.optimizer = ServerOptimizer(cached)
        return [FetchCachedVariablesHook(cached), _AdoptSettings()]


class _AdoptSettings(Hook):
    """Lets a worker continue with the learning rates that the chief has restored, or that others have reached."""

    def after_start(self, trainer: Trainer) -> None:
        # A scheduler of the trainer knows the rate of every step by itself.
        if trainer.scheduler is None and isinstance(trainer.optimizer, ServerOptimizer):
            trainer.optimizer.adopt_settings()


def client_config(config: RunnerConfig, epoch: int, *, launch: str = "") -> ClientConfig:
    """How this worker talks to servers in one of its incarnations.

    Args:
        config: the process.
        epoch: the incarnation.
        launch: makes the worker's name one of this launch alone, for a launch that has data of its own.

    Example:
        >>> found = client_config(RunnerConfig(index=2, num_workers=3, operation_timeout_in_ms=500), epoch=7)
        >>> found.worker, found.epoch, found.timeout
        ('worker-2-of-3', 7, 0.5)
    """
    # Of how many: servers keep how far a worker of this name is, and with another number its share of the data is another.
    changes: dict[str, object] = {
        "worker": f"worker-{config.index}-of-{config.num_workers}" + (f"-{launch}" if launch else ""),
        "epoch": epoch,
        "run": config.uuid,
    }
    if config.operation_timeout_in_ms > 0:
        changes["timeout"] = config.operation_timeout_in_ms / 1000
    return config.client.model_copy(update=changes)


class WorkerAttempt:
    """Trains `trainer` as worker `config.index`. Called with the addresses of the servers, and again after a failure.

    Args:
        find: returns where the servers are now, so that one that was restarted elsewhere is found without another attempt.
        meet: makes this worker a member of the run. By default it joins at the servers.
        controller: in the chief, does what operators ask for.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: Iterable[Batch],
        config: RunnerConfig,
        *,
        steps: int | None,
        max_steps: int | None,
        hooks: Sequence[Hook],
        find: Callable[[], Sequence[str]],
        meet: Meet | None = None,
        controller: Controller | None = None,
        epoch: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._trainer, self._config = trainer, config
        # Data that cannot be rewound continues with the next batch after a failure, and not with the first.
        self._source: Iterable[Batch] = source if is_resumable(source) else iter(source)
        self._steps, self._max_steps, self._hooks = steps, max_steps, tuple(hooks)
        self._find, self._epoch, self._clock, self._sleep = find, epoch, clock, sleep
        self._meet = meet or self._embedded
        self._several = config.num_workers > 1
        self._controller = controller
        self._placement = Placement(trainer, dense=self._several and not config.is_synchronous)
        self._guards = trainer.save_guards
        trainer.accepts_lost_servers = config.recovers
        # Workers that make every step together count it once.
        trainer.num_workers = 1 if config.is_synchronous else config.num_workers
        # The data of another launch is other data, that of this one is not: a restarted worker must not train it twice.
        trainer.named_by_launch = bool(config.uuid) and not trainer.config.resume_data
        if steps is not None and config.supervised:
            _log.warning(
                "steps=%d counts from the start of this process: after a restart there are more; max_steps counts from the first",
                steps,
            )
        self._last: int | None = max_steps
        self._first = True

    def __call__(self, servers: Sequence[str]) -> int:
        """Train on `servers` until the data or the steps end. Returns the global step."""
        epoch = self._epoch()
        talking = client_config(self._config, epoch, launch=self._config.uuid if self._trainer.named_by_launch else "")
        with ExitStack() as open_now:
            common = open_now.enter_context(closing(self._meet(servers, talking, self._find)))
            store = open_now.enter_context(self._store(servers, talking))
            self._require_folders(store)
            placed = self._placement.use(store)
            controls = [] if self._controller is None else [self._controller]
            self._trainer.hooks = (*self._common_hooks(common, store), *placed, *self._hooks, *controls)
            if self._first and self._config.is_chief:
                self._wait_for_workers(common)
            with self._waited_for(common):
                return self._fit()

    def _embedded(
        self, servers: Sequence[str], talking: ClientConfig, find: Callable[[], Sequence[str]]
    ) -> Coordination:
        liveness = self._config.liveness
        return CoordinationClient(
            servers,
            index=self._config.index,
            epoch=talking.epoch or 0,
            run=self._config.uuid,
            lease=liveness.lease_secs,
            heartbeat=liveness.heartbeat_secs,
            config=talking,
            find=find,
        )

    def _store(self, servers: Sequence[str], talking: ClientConfig) -> ServerStore:
        return ServerStore(servers, self._placement.tables, config=talking, find=lambda: list(self._find()))

    def _require_folders(self, store: ServerStore) -> None:
        """Raise before the first step, and not when the first checkpoint cannot be written."""
        if self._trainer.config.model_dir is None:
            return
        without = [a for a, one in zip(store.addresses, store.health(), strict=True) if not one["folder"]]
        if without:
            raise ConfigError(
                f"RunConfig.model_dir: servers {', '.join(without)} have no folder to save their part in; start them with "
                "MONOLITH_MODEL_DIR, `monolith launch --model-dir` or `monolith ps --folder`"
            )

    @contextmanager
    def _waited_for(self, common: Coordination) -> Iterator[None]:
        """Report after the block that this worker has finished, so that the chief need not wait for it.

        `WorkerSyncHook.end` is too early for that: hooks that end after it would call servers that may have ended by then. A
        worker that failed, or was asked to stop, has not finished: its successor will. The lease of one that retries itself must
        outlast the pause before the retry.
        """
        try:
            yield
        except TEMPORARY:
            with suppress(ServerError):
                common.stay(self._config.retry_wait_in_secs + self._config.liveness.lease_secs)
            raise
        if not self._several or self.cut_short:
            return
        if self._config.is_chief:
            # A chief that is killed from here on is restarted by its launcher, and must still know who has finished. The
            # members of a launch are forgotten by the next one.
            if not self._config.supervised:
                common.end_run()
        else:
            RemoteStates(common, num_workers=self._config.num_workers).finish_worker(self._config.index)

    @property
    def cut_short(self) -> bool:
        """Whether this worker was asked to stop before its work was done. That of the chief includes waiting for the others."""
        reason = self._trainer.interrupted
        return reason is not None and (self._config.is_chief or self._trainer.stop_reason == reason)

    def _fit(self) -> int:
        self._first = False
        self._trainer.hooks = (*self._trainer.hooks, _AtEnds(self._count_from, self._note_end))
        if self._last is None and self._steps is not None:
            return self._trainer.fit(self._source, steps=self._steps)
        return self._trainer.fit(self._source, max_steps=self._last)

    def _count_from(self, trainer: Trainer) -> None:
        if self._last is None and self._steps is not None:
            # So many steps in all, however many attempts they take.
            self._last = trainer.step + self._steps

    def _note_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason == DATA_ENDED:
            # Should the end itself fail, another attempt must not train on the data a second time.
            self._source = ()

    def _common_hooks(self, common: Coordination, store: ServerStore) -> list[Hook]:
        config = self._config
        barrier: WorkerBarrier = LocalBarrier(1)
        if self._several:
            barrier = RemoteBarrier(common, capacity=config.num_workers, sleep=self._sleep)
        if self._controller is not None:
            self._controller.attach(barrier, servers=lambda: store.addresses)
        health: list[Hook] = []
        if config.is_chief and config.server_health_secs:
            health = [ServerHealthHook(store.health, every_secs=config.server_health_secs)]
        if not self._several:
            return health
        sync = TrainingHooksHelper(
            _StatesOfAttempt(
                common, num_workers=config.num_workers, restored=lambda: store.count_from(self._trainer.step)
            ),
            num_workers=config.num_workers,
            index=config.index,
            chief_timeout_seconds=config.chief_timeout_secs,
            replacement_seconds=config.liveness.replacement_secs,
            worker_timeout_seconds=config.session_creation_timeout_secs,
            monotonic=time.monotonic if self._controller is None else self._controller.running_clock,
            sleep=self._serving_sleep,
        )
        if config.is_chief:
            listener = BarrierSaverListener(
                barrier,
                max_pending_seconds=config.max_pending_seconds_for_barrier,
                step=lambda: common.members().step,
                sleep=self._sleep,
            )
            self._trainer.save_guards = (*self._guards, listener)
            return [*sync.training_chief_hooks, GlobalStepHook(common), *health]
        hooks: list[Hook] = [*sync.training_hooks, GlobalStepHook(common), BarrierHook(barrier, index=config.index)]
        if config.slow_start_steps:
            hooks.append(self._slow_start(common))
        return hooks

    def _serving_sleep(self, seconds: float) -> None:
        """Wait, and do meanwhile what operators ask of the chief: it may have trained its data long before the others."""
        if self._controller is not None:
            self._controller.serve()
        self._sleep(seconds)

    def _slow_start(self, common: Coordination) -> Hook:
        return CustomGlobalStepWaiterHook(
            int(self._config.slow_start_steps * math.log(1 + self._config.index)),
            lambda: common.members().step,
            max_non_tide_wait_minute=self._config.max_slow_start_wait_minute,
            sleep=self._sleep,
        )

    def _wait_for_workers(self, common: Coordination) -> None:
        """A short run must not end, and stop its servers, before the last worker has joined."""
        reminder = Reminder(_log, who="the chief", clock=self._clock)
        deadline = self._clock() + self._config.start_timeout_secs
        while (missing := self._missing(common)) and self._clock() < deadline:
            reminder.waiting(f"workers {missing} to join the run", left_secs=deadline - self._clock())
            self._sleep(_POLL_SECS)
        finished = {member.index for member in common.members().members if member.phase == "finished"}
        if missing := [index for index in missing if index not in finished]:
            _log.warning("starting without workers %s; the end waits for them", missing)

    def _missing(self, common: Coordination) -> list[int]:
        # A worker that has finished and ended may have done so before the whole job was restarted, and may come back.
        there = {member.index for member in common.members().members if member.alive}
        return [index for index in range(self._config.num_workers) if index not in there]


class SynchronousAttempt(WorkerAttempt):
    """Trains as one of the ranks of a run whose rows are on servers: all make every step together and add dense gradients.

    The rows of a step are changed by each rank for itself, as workers do that do not wait for each other. Data, saves and the end
    are those of ranks. Every attempt begins with what is saved: dense parameters, positions in the data, and the rows of servers.

    Args:
        connect: connects this rank with the others, given the last generation that it was part of.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: Iterable[Batch],
        config: RunnerConfig,
        *,
        connect: Callable[[int], Mesh],
        **settings: Any,  # noqa: ANN401 - as of its base
    ) -> None:
        super().__init__(trainer, source, config, **settings)
        self._source = source
        self._connect, self._generation = connect, 0
        trainer.rewinds_servers = True
        self._initial = deepcopy(trainer.state_dict(position=None))
        self._start = DataStart()

    def __call__(self, servers: Sequence[str]) -> int:
        """Train on `servers` until the data or the steps end on all ranks. Returns the global step."""
        if not self._first:
            self._start_over()
        self._start.rewind(self._source)
        with ExitStack() as open_now:
            store = open_now.enter_context(self._store(servers, client_config(self._config, self._epoch())))
            self._require_folders(store)
            self._placement.use(store)
            # All ranks have joined the servers before the chief restores these: nothing of earlier processes reaches them later.
            mesh = open_now.enter_context(closing(self._connect(self._generation)))
            self._generation = mesh.generation
            agreement = Agreement(mesh)
            SynchronousSteps(self._trainer, agreement, self._config)
            self._trainer.hooks = (*self._hooks, *self._controls(agreement, store))
            try:
                step = self._fit()
                agreement.leave()
            except BaseException as error:
                mesh.fail(f"{type(error).__name__}: {error}")
                raise
            return step

    def _start_over(self) -> None:
        """Forget what the last attempt has trained here: the chief restores what is saved, and gives it to all."""
        if self._initial["step"] and self._config.is_chief and self._trainer.config.model_dir is None:
            raise InvalidArgumentError(
                f"RunConfig.model_dir: without one the run cannot go back to step {self._initial['step']}, at which this call of "
                "train began; give a model_dir, and start the job again"
            )
        # At step 0 the trainer restores.
        self._trainer.start_over({**self._initial, "step": 0})

    def _note_end(self, trainer: Trainer) -> None:
        """Do nothing: whether the data has ended is saved with the position in it."""

    def _controls(self, agreement: Agreement, store: ServerStore) -> list[Hook]:
        if self._controller is None:
            return []
        self._controller.attach(RankBarrier(agreement), servers=lambda: store.addresses)
        every_secs = self._config.server_health_secs
        health = [ServerHealthHook(store.health, every_secs=every_secs)] if every_secs else []
        return [*health, self._controller]


class _StatesOfAttempt(RemoteStates):
    """What the hooks of an attempt see. Their end is not the worker's: that is reported by `WorkerAttempt._waited_for`."""

    def finish_worker(self, index: int) -> None:
        """Do nothing yet."""


class _AtEnds(Hook):
    """Calls `start` when an attempt starts and `end` when all its steps were made."""

    def __init__(self, start: Callable[[Trainer], None], end: Callable[[Trainer], None]) -> None:
        self._start, self._end = start, end

    def after_start(self, trainer: Trainer) -> None:
        self._start(trainer)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        if error is None:
            self._end(trainer)
