"""Workers begin when the chief has restored, and the chief ends when they have ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from monolith.cluster.coordination import Coordination
from monolith.console import Reminder
from monolith.errors import DeadlineExceededError, InvalidArgumentError, WorkerLostError
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.cluster.coordination import Coordination
    from monolith.train.trainer import StepResult, Trainer

__all__ = [
    "ChiefSyncHook",
    "GlobalStepHook",
    "RemoteStates",
    "SyncHelper",
    "TrainingHooksHelper",
    "WorkerStates",
    "WorkerSyncHook",
]

_log = logging.getLogger(__name__)


class WorkerStates(Protocol):
    """Whether the chief has restored, and which workers are at work."""

    def mark_restore_done(self) -> None:
        """Called by the chief: let the workers begin."""

    def is_restore_done(self) -> bool:
        """Whether workers may begin."""

    def start_worker(self, index: int) -> None:
        """Worker `index`: wait for me at the end."""

    def finish_worker(self, index: int) -> None:
        """Worker `index`: do not wait for me any more."""

    def get_unfinished_workers(self) -> dict[int, bool]:
        """The workers that have not finished, in order and without the chief: whether each is alive."""

    def get_progress(self) -> int:
        """A number that grows with every step of any worker."""


class SyncHelper:
    """The `WorkerStates` of threads of one process.

    Example:
        >>> states = SyncHelper(3)
        >>> states.start_worker(2)
        >>> states.get_alive_workers(), states.is_restore_done()
        ([2], False)
    """

    def __init__(self, num_workers: int) -> None:
        self._states = [False] * num_workers
        self._lock = threading.Lock()

    def mark_restore_done(self) -> None:
        """Let workers begin."""
        self._states[0] = True

    def is_restore_done(self) -> bool:
        """Whether workers may begin."""
        return self._states[0]

    def start_worker(self, index: int) -> None:
        """Wait for `index` at the end."""
        self._set(index, True)

    def finish_worker(self, index: int) -> None:
        """Wait for `index` no more."""
        self._set(index, False)

    def get_alive_workers(self) -> list[int]:
        """The workers that have started and not finished."""
        with self._lock:
            return [index for index, alive in enumerate(self._states) if alive and index]

    def get_unfinished_workers(self) -> dict[int, bool]:
        """The same, all of them alive: a thread that dies ends the process."""
        return dict.fromkeys(self.get_alive_workers(), True)

    def get_progress(self) -> int:
        """Return 0: threads of one process do not report their steps."""
        return 0

    def _set(self, index: int, alive: bool) -> None:
        require_worker(index, len(self._states))
        with self._lock:
            self._states[index] = alive


class ChiefSyncHook(Hook):
    """In the chief: let workers begin once the state is restored, and at the end wait until all of them have finished.

    A worker that is dead may be replaced: it is waited for as long as a replacement may take. The run is saved first, since
    the launcher may have to end the job instead. After an error, or if the chief itself was asked to stop, nobody is waited
    for: the successor of the chief waits for them.

    Args:
        states: how far the workers are.
        timeout_seconds: longest wait for workers that are alive, counted from the last step that any of them made.
        replacement_seconds: longest wait for the successor of a worker that is dead or never came.

    Raises:
        WorkerLostError: a wait was too long. The job has failed, since data is left untrained.

    Example:
        >>> hook = ChiefSyncHook(SyncHelper(2), timeout_seconds=60)
    """

    poll_seconds = 1.0

    def __init__(
        self,
        states: WorkerStates,
        *,
        timeout_seconds: float = 1800,
        replacement_seconds: float = 0,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timeout_seconds, self.replacement_seconds = timeout_seconds, replacement_seconds
        self._states, self._monotonic, self._sleep = states, monotonic, sleep

    def after_start(self, trainer: Trainer) -> None:
        """Let workers begin."""
        self._states.mark_restore_done()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Wait for workers."""
        if error is not None:
            return
        reminder = Reminder(_log, who="the chief", clock=self._monotonic)
        progress, moved_at, saved = self._states.get_progress(), self._monotonic(), False
        dead_since: dict[int, float] = {}
        while trainer.interrupted is None and (unfinished := self._states.get_unfinished_workers()):
            now = self._monotonic()
            if (newest := self._states.get_progress()) != progress:
                progress, moved_at = newest, now
            dead_since = {index: dead_since.get(index, now) for index, alive in unfinished.items() if not alive}
            if dead_since and not saved:
                saved = True
                trainer.save()
                continue
            left = self._seconds_left(dead_since, moved_at, now)
            if left <= 0:
                raise WorkerLostError(self._loss(unfinished, dead_since))
            reminder.waiting(_described(unfinished), left_secs=left)
            self._sleep(self.poll_seconds)

    def _seconds_left(self, dead_since: dict[int, float], moved_at: float, now: float) -> float:
        of_dead = [since + self.replacement_seconds - now for since in dead_since.values()]
        return min([moved_at + self.timeout_seconds - now, *of_dead])

    def _loss(self, unfinished: dict[int, bool], dead_since: dict[int, float]) -> str:
        who, why = list(unfinished), f"alive, but made no step for {self.timeout_seconds:g} s"
        if dead_since:
            who, why = list(dead_since), f"dead, and not replaced within {self.replacement_seconds:g} s"
        return (
            f"{_workers(who)} of the run {'is' if len(who) == 1 else 'are'} {why}, so the data is not trained to its end; "
            "what is trained is saved. Look into the log of that worker, then start the job again with the same model_dir"
        )


class WorkerSyncHook(Hook):
    """In worker `index`: begin when the chief has restored, and let the chief wait until this worker has ended.

    The chief ends the servers when all workers have finished, and hooks that end after this one may still need the servers. Where
    that is so, `states` reports the end of the worker only when its last hook has ended, as `WorkerAttempt` does.

    Raises `DeadlineExceededError` if the chief has not restored within `timeout_seconds`.

    Example:
        >>> hook = WorkerSyncHook(SyncHelper(2), index=1)
    """

    poll_seconds = 1.0

    def __init__(
        self,
        states: WorkerStates,
        *,
        index: int,
        timeout_seconds: float = 7200,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.index, self.timeout_seconds = index, timeout_seconds
        self._states, self._monotonic, self._sleep = states, monotonic, sleep

    def after_start(self, trainer: Trainer) -> None:
        """Wait for the chief."""
        self._states.start_worker(self.index)
        deadline = self._monotonic() + self.timeout_seconds
        reminder = Reminder(_log, who=f"worker {self.index}", clock=self._monotonic)
        while not self._states.is_restore_done():
            if self._monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"the chief has not restored within {self.timeout_seconds:g} s; is it running?"
                )
            reminder.waiting("the chief to restore the model", left_secs=deadline - self._monotonic())
            self._sleep(self.poll_seconds)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Mark the worker as finished. One that failed has not finished: the chief waits for its successor."""
        if error is None:
            self._states.finish_worker(self.index)


class TrainingHooksHelper:
    """The hooks of one worker: none where there is nobody to wait for.

    Example:
        >>> helper = TrainingHooksHelper(SyncHelper(3), num_workers=3, index=0)
        >>> len(helper.training_hooks), len(helper.training_chief_hooks)
        (0, 1)
    """

    def __init__(
        self,
        states: WorkerStates,
        *,
        num_workers: int,
        index: int,
        chief_timeout_seconds: float = 1800,
        replacement_seconds: float = 0,
        worker_timeout_seconds: float = 7200,
        enable_sync: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.training_hooks: tuple[Hook, ...] = ()
        """For workers other than the chief."""
        self.training_chief_hooks: tuple[Hook, ...] = ()
        """For the chief."""
        if not enable_sync or num_workers == 1:
            return
        if index == 0:
            chief_hook = ChiefSyncHook(
                states,
                timeout_seconds=chief_timeout_seconds,
                replacement_seconds=replacement_seconds,
                monotonic=monotonic,
                sleep=sleep,
            )
            self.training_chief_hooks = (chief_hook,)
        else:
            require_worker(index, num_workers)
            hook = WorkerSyncHook(states, index=index, timeout_seconds=worker_timeout_seconds, sleep=sleep)
            self.training_hooks = (hook,)


def require_worker(index: int, num_workers: int) -> None:
    """`InvalidArgumentError` unless `index` is a worker that is not the chief."""
    if not 0 < index < num_workers:
        raise InvalidArgumentError(f"index: expected a worker from 1 to {num_workers - 1}, got {index}")


def _described(unfinished: dict[int, bool]) -> str:
    """The workers that the chief waits for, in words."""
    groups = [
        ([index for index, alive in unfinished.items() if alive], "still training"),
        ([index for index, alive in unfinished.items() if not alive], "dead and to be replaced"),
    ]
    return ", and for ".join(f"{_workers(who)}, {how}" for who, how in groups if who)


def _workers(indexes: Iterable[int]) -> str:
    *others, last = map(str, indexes)
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"


class RemoteStates:
    """The `WorkerStates` of processes, each of which reports its own state. Workers whose lease is over are not alive.

    Args:
        client: this worker's view of the run.
        num_workers: how many workers the run has, the chief included.
        restored: called in the chief when it has restored and before the other workers begin.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as client:
        ...     states = RemoteStates(client, num_workers=2)
        ...     states.mark_restore_done()
        ...     states.is_restore_done(), states.get_unfinished_workers()  # worker 1 has not come yet
        (True, {1: False})
    """

    def __init__(self, client: Coordination, *, num_workers: int, restored: Callable[[], None] = lambda: None) -> None:
        self._client, self._num_workers, self._restored = client, num_workers, restored

    def mark_restore_done(self) -> None:
        """In the chief: let the workers begin."""
        self._restored()
        self._client.enter("running")

    def is_restore_done(self) -> bool:
        """Whether there is a chief, alive, that has restored."""
        return any(m.index == 0 and m.alive and m.phase != "joined" for m in self._client.members().members)

    def start_worker(self, index: int) -> None:
        """Count as a worker that trains."""
        self._client.enter("running")

    def finish_worker(self, index: int) -> None:
        """Report that the worker's data is trained. A `ServerError` means that the chief still waits for it: report again."""
        self._client.enter("finished")

    def get_unfinished_workers(self) -> dict[int, bool]:
        """The workers that have not finished: whether each is alive. One that never came is not."""
        members = {member.index: member for member in self._client.members().members}
        finished = {index for index, member in members.items() if member.phase == "finished"}
        waited_for = [index for index in range(1, self._num_workers) if index not in finished]
        return {index: index in members and members[index].alive for index in waited_for}

    def get_progress(self) -> int:
        """The global step."""
        return self._client.members().step


class GlobalStepHook(Hook):
    """Makes `trainer.step` the number of steps of all workers together.

    During training it is that of the step before, so that no step waits for the answer. At the start and at the end it is
    exact. In the chief the hook must come after `ChiefSyncHook`, which waits until nobody makes further steps.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as client:
        ...     hook = GlobalStepHook(client)
    """

    def __init__(self, client: Coordination) -> None:
        self._client = client

    def after_start(self, trainer: Trainer) -> None:
        """Begin with what the servers have counted."""
        trainer.step = self._client.members().step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Follow the steps of the others, without waiting."""
        self._follow(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """Follow the steps of the others, which may reach the last one."""
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        # Never more than there are: the trainer has counted its own step, and the answer what was applied when it was given.
        trainer.step = max(trainer.step, self._client.report().step)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Take over the exact number."""
        if error is None:
            trainer.step = max(trainer.step, self._client.members().step)
