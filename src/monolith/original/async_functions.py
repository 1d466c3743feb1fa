"""`AsyncFunctionManager`: calls of one step that run during the next."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from monolith.process_bound import WorkerThreads
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["AsyncFunctionManager"]

_log = logging.getLogger(__name__)

_Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


class AsyncFunctionManager:
    """Runs functions one call late: each call on a queue runs the previous call and queues its own.

    After n calls exactly n - 1 have run. The last one is run by `drain`, by leaving a `with` block without an error, or by a
    `Trainer` that was given `hooks`. Calls that are still waiting when the manager is dropped are logged as lost.

    With `threaded` the late call runs in a thread while the caller continues, and has ended when the queue's next call returns.
    What the step in between sees of it is then a matter of timing. An exception of a late call is raised by the call, or the
    drain, that runs or awaits it.

    Example:
        >>> done = []
        >>> with AsyncFunctionManager() as pipeline:
        ...     for step in range(3):
        ...         pipeline.add_async_function(done.append, (step,))
        ...     print(done)
        [0, 1]
        >>> done
        [0, 1, 2]
    """

    def __init__(self, is_async: bool = True, *, threaded: bool = False) -> None:
        self._is_async = is_async
        self._threaded = threaded
        self._pool: WorkerThreads | None = None
        self._waiting: dict[str, _Call] = {}
        self._running: dict[str, Future[object]] = {}
        weakref.finalize(self, _warn_of_lost, self._waiting)

    @property
    def hooks(self) -> list[Hook]:
        """Hooks by which a `Trainer` drains the manager before each save and at the end, and drops queued calls after an error.

        Example:
            >>> from torch import nn
            >>> from monolith.train import Trainer
            >>> pipeline = AsyncFunctionManager()
            >>> trainer = Trainer(nn.Identity(), hooks=pipeline.hooks)
        """
        return [_DrainHook(self)]

    def add_async_function(
        self,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_async: bool | None = None,
        queue_name: str = "async_queue",
    ) -> None:
        """Run the call that waits in `queue_name`, and queue `target(*args, **kwargs)` in its place.

        Give each purpose its own `queue_name`, and use it once a step. `is_async` overrides that of the manager for this call:
        False runs `target` now, after everything that waits in its queue.
        """
        call = (target, tuple(args), dict(kwargs or {}))
        self._advance(queue_name)
        if self._is_async if is_async is None else is_async:
            self._waiting[queue_name] = call
            return
        self._await(queue_name)
        _run(call)

    def drain(self) -> None:
        """Run everything that waits, in the order in which the queues were first used. Nothing is in progress afterwards."""
        try:
            for queue_name in list(self._waiting):
                self._advance(queue_name)
            for queue_name in list(self._running):
                self._await(queue_name)
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def _advance(self, queue_name: str) -> None:
        self._await(queue_name)
        call = self._waiting.pop(queue_name, None)
        if call is None:
            return
        if not self._threaded:
            _run(call)
            return
        self._pool = self._pool or WorkerThreads(1, thread_name_prefix="monolith-late")
        self._running[queue_name] = self._pool.submit(_run, call)

    def _await(self, queue_name: str) -> None:
        running = self._running.pop(queue_name, None)
        if running is not None:
            running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self.end(failed=error is not None)

    def end(self, *, failed: bool) -> None:
        """Run the queued calls, or drop them if the run has `failed`, as they may hold wrong results."""
        if failed and self._waiting:
            _log.warning("%d calls that waited for the next step are dropped after an error", len(self._waiting))
            self._waiting.clear()
        self.drain()


class _DrainHook(Hook):
    """Drains a manager when the state of a run is about to be complete."""

    def __init__(self, manager: AsyncFunctionManager) -> None:
        self._manager = manager

    def begin(self, trainer: Trainer) -> None:
        trainer.before_saving.append(self._manager.drain)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        trainer.before_saving.remove(self._manager.drain)
        self._manager.end(failed=error is not None)


def _warn_of_lost(waiting: Mapping[str, _Call]) -> None:
    for queue_name in waiting:
        _log.warning("a call that waited in %r never ran: its AsyncFunctionManager was not drained", queue_name)


def _run(call: _Call) -> object:
    target, args, kwargs = call
    return target(*args, **kwargs)
