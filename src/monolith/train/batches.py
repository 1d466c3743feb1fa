"""Batches from a source to the step loop: from where the last run stopped, if wanted read ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch

__all__ = ["BatchReader"]


class BatchReader:
    """Iterates `source` and knows the place of the last batch it gave out, whatever has been read ahead of it.

    `state` is what `state()` of an earlier reader returned; it counts only for a source with `load_state_dict`.

    Example:
        >>> import torch
        >>> with BatchReader([{"label": torch.ones(1)}] * 3, prefetch=2) as reader:
        ...     len(list(reader))
        3
    """

    def __init__(self, source: Iterable[Batch], state: object = None, *, prefetch: int = 0) -> None:
        if not isinstance(source, Iterable):
            raise InvalidArgumentError(f"source: expected an iterable of batches, got {type(source).__name__}")
        self._tells = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        if state is not None and self._tells:
            source.load_state_dict(state)  # type: ignore[attr-defined]
        self._source, self._prefetch = source, prefetch
        self._state = state
        self._batches = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._batches.close()

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def state(self) -> object:
        """The source's state after the last batch given out; None when it is used up or cannot tell."""
        return self._state

    def _read(self) -> Generator[Batch]:
        placed = self._placed()
        for batch, state in _ahead(placed, self._prefetch) if self._prefetch else placed:
            self._state = state
            yield batch
        self._state = None

    def _placed(self) -> Iterator[tuple[Batch, object]]:
        for batch in self._source:
            if not isinstance(batch, dict):
                raise InvalidArgumentError(
                    f"source: expected batches that are dicts of columns, got {type(batch).__name__}"
                )
            yield batch, self._source.state_dict() if self._tells else None  # type: ignore[attr-defined]


def _ahead(items: Iterator[tuple[Batch, object]], capacity: int) -> Iterator[tuple[Batch, object]]:
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="monolith-read-ahead")
    try:
        waiting = deque(pool.submit(next, items, None) for _ in range(capacity))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
