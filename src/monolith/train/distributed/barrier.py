"""Hold all workers between two steps, so that what the chief does meanwhile sees none of them halfway."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from monolith.cluster.coordination import Coordination
from monolith.errors import InvalidArgumentError, MonolithError
from monolith.ranks.agreement import Agreement
from monolith.train.hooks.hook import CheckpointSaverListener, Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = [
    "BarrierAlreadyPlacedError",
    "BarrierHook",
    "BarrierSaverListener",
    "HOLD",
    "LocalBarrier",
    "RankBarrier",
    "RemoteBarrier",
    "SAVE",
    "STOP",
    "WorkerBarrier",
]

SAVE = "Save"
"""The action of a barrier that is placed for a save."""
HOLD = "Hold"
"""The action of a barrier that an operator has placed."""
STOP = "Stop"
"""The action of a barrier that holds nobody: workers that reach it end their run."""
_log = logging.getLogger(__name__)

Callback = Callable[[str], None]
"""Called with the action a barrier was placed for."""


class BarrierAlreadyPlacedError(MonolithError):
    """Another caller holds the workers. Wait until it releases them."""


@runtime_checkable
class WorkerBarrier(Protocol):
    """A barrier for worker 0, the chief, and workers 1 to `capacity - 1`.

    The chief places and removes it and is never held itself. Every other worker calls `wait` between steps.
    """

    @property
    def capacity(self) -> int:
        """Workers, the chief included."""

    def place(self, action: str = "") -> None:
        """Hold every worker that arrives. Raises `BarrierAlreadyPlacedError` if they are held already."""

    def remove(self) -> None:
        """Release all workers. Harmless without a barrier."""

    def is_placed(self) -> bool:
        """Whether workers are being held."""

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Worker `index` arrives: if there is a barrier, call `callbacks` with its action and wait until it is removed.

        Nobody waits behind a barrier for `STOP`. Returns whether there was a barrier.
        """

    def unblocked(self) -> list[int]:
        """Return the workers that have not arrived yet, with the chief (0) if there is no barrier."""

    def held(self) -> list[int]:
        """Return the workers that are held, with the chief (0), which placed the barrier. Nobody if there is none."""

    def keep(self) -> None:
        """Called by the chief again and again while it holds the others. Those that are held may wait for a sign of life."""


class LocalBarrier:
    """A `WorkerBarrier` between threads of one process.

    Example:
        >>> barrier = LocalBarrier(2)
        >>> barrier.wait(1)
        False
        >>> barrier.place("Save")
        >>> barrier.unblocked()
        [1]
        >>> barrier.remove()
    """

    def __init__(self, capacity: int, callbacks: Sequence[Callback] = ()) -> None:
        """`callbacks` are called by `place`, in the chief."""
        if capacity < 1:
            raise InvalidArgumentError(f"capacity: expected at least the chief, 1, got {capacity}")
        self._blocked = [False] * capacity
        self._callbacks = tuple(callbacks)
        self._action = ""
        self._changed = threading.Condition()

    @property
    def capacity(self) -> int:
        """Workers, the chief included."""
        return len(self._blocked)

    def place(self, action: str = "") -> None:
        """Hold every worker that arrives, then call the chief's callbacks."""
        with self._changed:
            if self._blocked[0]:
                raise BarrierAlreadyPlacedError(f"there is a barrier already, for {self._action!r}")
            self._blocked[0], self._action = True, action
            self._changed.notify_all()
        for callback in self._callbacks:
            callback(action)

    def remove(self) -> None:
        """Release all workers."""
        with self._changed:
            self._blocked[0] = False
            self._changed.notify_all()

    def is_placed(self) -> bool:
        """Whether workers are being held."""
        return self._blocked[0]

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Worker `index` arrives. Returns when it may continue."""
        if not 0 < index < self.capacity:
            raise InvalidArgumentError(f"index: expected a worker from 1 to {self.capacity - 1}, got {index}")
        with self._changed:
            if not self._blocked[0]:
                return False
            action = self._action
        # Before it counts as blocked: a caller that waits for all to be blocked may rely on the effects of their callbacks.
        for callback in callbacks:
            callback(action)
        if action == STOP:
            return True
        with self._changed:
            self._blocked[index] = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._blocked[0])
            self._blocked[index] = False
            self._changed.notify_all()
        return True

    def unblocked(self) -> list[int]:
        """Return the workers that have not arrived yet, with the chief (0) if there is no barrier."""
        with self._changed:
            return [index for index, blocked in enumerate(self._blocked) if not blocked]

    def held(self) -> list[int]:
        """Return the workers that are held, with the chief (0). Nobody if there is no barrier."""
        with self._changed:
            return [index for index, blocked in enumerate(self._blocked) if blocked and self._blocked[0]]

    def keep(self) -> None:
        """Do nothing: a thread is held until the barrier is removed."""

    def wait_all_blocked(self, timeout: float | None = None) -> bool:
        """Wait until every worker is held, at most `timeout` seconds. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: all(self._blocked), timeout)

    def wait_none_blocked(self, timeout: float | None = None) -> bool:
        """Wait until no worker is held, at most `timeout` seconds. Returns whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._blocked), timeout)


class RemoteBarrier:
    """A `WorkerBarrier` between processes. Each has one of its own, over its own `client`.

    Workers that are not heard of any more, have ended or never came are not waited for. The barrier falls when its chief is
    gone, so that no worker is held for ever.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as chief:
        ...     barrier = RemoteBarrier(chief, capacity=2)
        ...     barrier.place("Save")
        ...     barrier.is_placed(), barrier.unblocked()
        (True, [])
    """

    poll_seconds = 1.0

    def __init__(
        self,
        client: Coordination,
        *,
        capacity: int,
        callbacks: Sequence[Callback] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`callbacks` are called by `place`, in the chief."""
        self._client, self._capacity, self._sleep = client, capacity, sleep
        self._callbacks = tuple(callbacks)

    @property
    def capacity(self) -> int:
        """Workers, the chief included."""
        return self._capacity

    def place(self, action: str = "") -> None:
        """Hold every worker that arrives, then call the chief's callbacks."""
        placed, barrier = self._client.place_barrier(action)
        if not placed:
            raise BarrierAlreadyPlacedError(f"there is a barrier already, for {barrier.action!r}")
        for callback in self._callbacks:
            callback(action)

    def remove(self) -> None:
        """Release all workers."""
        self._client.remove_barrier()

    def is_placed(self) -> bool:
        """Whether workers are being held."""
        return self._client.members().barrier is not None

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Worker `index` arrives. Returns when it may continue."""
        if not 0 < index < self._capacity:
            raise InvalidArgumentError(f"index: expected a worker from 1 to {self._capacity - 1}, got {index}")
        barrier = self._client.newest().barrier
        if barrier is None:
            return False
        # Before it counts as held: a caller that waits for all to be held may rely on the effects of their callbacks.
        for callback in callbacks:
            callback(barrier.action)
        while barrier.action != STOP and self._client.hold(barrier.number):
            self._sleep(self.poll_seconds)
        return True

    def unblocked(self) -> list[int]:
        """Workers that train and have not come by yet, the chief (0) if there is no barrier."""
        found = self._client.members()
        chief = [] if found.barrier is not None else [0]
        return chief + [m.index for m in found.members if m.index and m.alive and m.phase == "running" and not m.held]

    def held(self) -> list[int]:
        """Return the workers that are held, with the chief (0). Nobody if there is no barrier."""
        found = self._client.members()
        return [] if found.barrier is None else [0, *(m.index for m in found.members if m.index and m.alive and m.held)]

    def keep(self) -> None:
        """Do nothing: the barrier stays as long as the chief renews its lease."""


class RankBarrier:
    """A `WorkerBarrier` between the ranks of a synchronous run, used by the chief alone.

    The others wait for the chief before every step, so it only has to show now and then that it is there. The word before a step
    carries the end of the run to all ranks.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> def rank(mesh):
        ...     barrier = RankBarrier(Agreement(mesh))
        ...     barrier.place("Hold")
        ...     return barrier.unblocked()
        >>> run_ranks(1, rank)
        [[]]
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._placed = False

    @property
    def capacity(self) -> int:
        """Ranks, the chief included."""
        return self._agreement.mesh.size

    def place(self, action: str = "") -> None:
        """Return when all ranks are between two steps."""
        if self._placed:
            raise BarrierAlreadyPlacedError("there is a barrier already")
        self._agreement.barrier()
        self._placed = True

    def remove(self) -> None:
        """Say that the chief makes steps again."""
        self._placed = False

    def is_placed(self) -> bool:
        """Whether the chief holds the others."""
        return self._placed

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Return False at once: ranks are held by waiting for the chief's next step."""
        return False

    def unblocked(self) -> list[int]:
        """Return nobody while there is a barrier, and all ranks otherwise."""
        return [] if self._placed else list(range(self.capacity))

    def held(self) -> list[int]:
        """Return all ranks while there is a barrier, and nobody otherwise."""
        return list(range(self.capacity)) if self._placed else []

    def keep(self) -> None:
        """Let the others know that the chief is there."""
        self._agreement.barrier()


class BarrierHook(Hook):
    """In every worker but the chief: be held between steps while there is a barrier, and end behind one for `STOP`.

    Before the worker is held, all of its updates have reached the servers, those that wait for the next step too, and
    `callbacks` are called with the barrier's action.

    Example:
        >>> from monolith.train.distributed.barrier import LocalBarrier
        >>> hook = BarrierHook(LocalBarrier(2), index=1)
    """

    def __init__(self, barrier: WorkerBarrier, *, index: int, callbacks: Sequence[Callback] = ()) -> None:
        self._barrier, self._index, self._callbacks = barrier, index, tuple(callbacks)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Come by."""
        self._come_by(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        """Come by: a worker without data must not hold up a save of the chief."""
        self._come_by(trainer)

    def _come_by(self, trainer: Trainer) -> None:
        def arrive(action: str) -> None:
            trainer.settle()
            if action == STOP:
                trainer.request_stop("the chief has ended the run")

        self._barrier.wait(self._index, (arrive, *self._callbacks))


class BarrierSaverListener(CheckpointSaverListener):
    """In the chief, best as a guard listener: place a barrier before a save, and remove it when the state is taken or cannot be.

    A save does not wait for ever: after `max_pending_seconds` it continues and logs who is not held. A barrier that another
    caller has placed is left to that caller.

    Args:
        barrier: holds the workers.
        max_pending_seconds: how long a save waits until all are held.
        step: returns the global step, which `trainer.step` becomes while the workers are held.
        monotonic: seconds.
        sleep: waits.

    Example:
        >>> from monolith.train.distributed.barrier import LocalBarrier
        >>> listener = BarrierSaverListener(LocalBarrier(1))
    """

    poll_seconds = 1.0

    def __init__(
        self,
        barrier: WorkerBarrier,
        *,
        max_pending_seconds: float = 30,
        step: Callable[[], int] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.max_pending_seconds = max_pending_seconds
        self._barrier, self._step, self._monotonic, self._sleep = barrier, step, monotonic, sleep
        self._placed = False

    def before_cut(self, trainer: Trainer, step: int) -> None:
        """Hold the workers."""
        # Before it is sure: a call that fails may have placed it, and must not hold the workers for ever.
        self._placed = True
        try:
            self._barrier.place(SAVE)
        except BarrierAlreadyPlacedError:
            self._placed = False
            _log.info("saving step %d behind a barrier that is there already", step)
        self._wait_until_held(step)
        if self._step is not None:
            trainer.settle()
            trainer.step = max(trainer.step, self._step())

    def _wait_until_held(self, step: int) -> None:
        deadline = self._monotonic() + self.max_pending_seconds
        while (missing := self._barrier.unblocked()) and self._monotonic() < deadline:
            self._sleep(self.poll_seconds)
        if missing:
            _log.warning(
                "saving step %d although workers %s are still training after %g s",
                step,
                missing,
                self.max_pending_seconds,
            )

    def after_cut(self, trainer: Trainer, step: int) -> None:
        """Let them go: writing does not need them to stand still."""
        self._release()

    def after_save(self, trainer: Trainer, step: int) -> None:
        """Let them go, should the save have failed before the cut."""
        self._release()

    def _release(self) -> None:
        if self._placed:
            self._placed = False
            self._barrier.remove()
