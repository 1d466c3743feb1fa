"""Objects that belong to one process: threads, connections and locks, which a forked child copies but cannot use.

A forked child has none of its parent's threads, so it would wait for them forever, and shares its parent's connections, so the
two would read each other's answers. Objects with threads or connections therefore remember their process, and refuse to work in
another one. Tables can be used in a child: see core/include/monolith/core_call.h.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from monolith.errors import ForkedProcessError

__all__ = ["LetsGo", "ProcessBound", "WorkerThreads", "let_go_in_children"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ProcessBound:
    """Remembers the process that it was made in.

    Example:
        >>> bound = ProcessBound("the queue")
        >>> bound.is_here
        True
        >>> bound.require()
    """

    def __init__(self, what: str) -> None:
        self._what, self._process = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def require(self) -> None:
        """Raise `ForkedProcessError` in any other process."""
        if not self.is_here:
            raise ForkedProcessError(
                f"{self._what}: it belongs to process {self._process}, which was forked; its threads and connections are not in "
                f"process {os.getpid()}. Make a new one after the fork, or start the process with 'spawn' or 'forkserver'"
            )


class WorkerThreads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose `submit` raises in a forked child, where no thread would run the call.

    Example:
        >>> with WorkerThreads(1, thread_name_prefix="monolith-example") as threads:
        ...     threads.submit(lambda: 5).result()
        5
    """

    def __init__(self, max_workers: int, *, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix=thread_name_prefix)
        self._bound = ProcessBound(f"the threads {thread_name_prefix}")

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """As of every executor."""
        self._bound.require()
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of every executor. In a forked child there is nothing to shut down."""
        if self._bound.is_here:
            super().shutdown(wait, cancel_futures=cancel_futures)


class LetsGo(Protocol):
    """A resource that a forked child must release."""

    def let_go(self) -> None:
        """Close the child's copies without affecting the parent. Called in the child, right after the fork."""


_held: weakref.WeakSet[Any] = weakref.WeakSet()
_is_registered = False


def let_go_in_children(held: LetsGo) -> None:
    """Call `held.let_go` in every process that is forked from now on, for as long as `held` exists."""
    global _is_registered
    _held.add(held)
    if not _is_registered:
        os.register_at_fork(after_in_child=_let_go_all)
        _is_registered = True


def _let_go_all() -> None:
    for held in list(_held):
        held.let_go()
