"""Calls to several tables beside each other: one table's small batch is too little work for the core's own threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from monolith.table.embedding_table import get_num_threads

__all__ = ["CallThreads"]

Result = TypeVar("Result")


class CallThreads:
    """Up to `get_num_threads()` threads, the caller's included; started by the first `run` that uses them.

    Example:
        >>> CallThreads().run([lambda: 1, lambda: 2, lambda: 3])
        [1, 2, 3]
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._made_for = (0, 0)

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """The result of each call, in order; returns, or raises the first error, when all have ended."""
        threads = min(get_num_threads(), len(calls))
        if threads < 2:
            return [call() for call in calls]
        pool = self._helpers(threads - 1)
        results: list[Result | None] = [None] * len(calls)

        def share(first: int) -> None:
            for place in range(first, len(calls), threads):
                results[place] = calls[place]()

        futures = [pool.submit(share, first) for first in range(1, threads)]
        try:
            share(0)
        finally:
            wait(futures)
        for future in futures:
            future.result()
        return results  # type: ignore[return-value]

    def _helpers(self, count: int) -> ThreadPoolExecutor:
        # A forked child has none of the parent's threads.
        wanted = (os.getpid(), count)
        if self._pool is None or self._made_for != wanted:
            self._pool = ThreadPoolExecutor(count, thread_name_prefix="monolith-store")
            self._made_for = wanted
        return self._pool
