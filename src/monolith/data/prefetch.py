"""Batches prepared in the background while the model works on the previous one."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch

from monolith.data.sources.source import HasLag, StreamLag
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.process_bound import ProcessBound

__all__ = ["Prefetch", "PrefetchQueue", "enqueue_dicts_with_queue_return"]

T = TypeVar("T")

_END = object()
_INTERRUPT_SECS = 0.02
"""Seconds between two interruptions of a source whose reading is to end."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PrefetchQueue(Generic[T]):
    """A first-in first-out queue of at most `capacity` entries between threads, with an end.

    Closing it wakes all waiting threads: a blocked `put` gives up, and `get` returns the remaining entries and then raises
    StopIteration.

    Example:
        >>> queue = PrefetchQueue(2)
        >>> queue.put("a"), queue.put("b"), queue.size()
        (True, True, 2)
        >>> queue.close()
        >>> queue.put("c"), queue.get(), queue.get()
        (False, 'a', 'b')
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidArgumentError(f"capacity: expected at least 1, got {capacity}")
        self._capacity = capacity
        self._entries: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._bound = ProcessBound("batches read ahead")

    def put(self, entry: T) -> bool:
        """Append `entry`, waiting while the queue is full. Returns False if the queue is closed and the entry was not taken."""
        self._bound.require()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._entries) < self._capacity)
            if self._closed:
                return False
            self._entries.append(entry)
            self._changed.notify_all()
            return True

    def get(self, timeout: float | None = None) -> T:
        """Return the oldest entry, waiting while there is none.

        After the last entry it raises StopIteration, or the error of `close`. Raises `TimeoutError` if there was no entry for
        `timeout` seconds, and `ForkedProcessError` in a process forked since.
        """
        self._bound.require()
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._entries, timeout):
                raise TimeoutError
            if self._entries:
                entry = self._entries.popleft()
                self._changed.notify_all()
                return entry
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def size(self) -> int:
        """Return how many entries are waiting."""
        self._bound.require()
        with self._changed:
            return len(self._entries)

    def close(self, error: BaseException | None = None, *, drop: bool = False) -> None:
        """Accept no more entries. `get` raises `error` once, after the waiting entries, or at once if `drop` discards them."""
        if not self._bound.is_here:
            return  # a thread that is not in this process may have held the lock
        with self._changed:
            self._closed, self._error = True, error
            if drop:
                self._entries.clear()
            self._changed.notify_all()


class Prefetch:
    """A source read ahead: a thread keeps up to `capacity` nested batches ready, in the source's order.

    An exception of the source is raised here, with its own traceback, after the batches before it. `capacity` 0 reads in
    the caller's thread. With a CUDA `device` the thread pins each batch and copies it on a stream of its own. The consumer's
    stream waits for the copy, the consumer's thread does not. A source that `waits` for records is always read by a thread, at
    least one batch ahead, so that `take` can be given a timeout.

    `state_dict` is the source's state at the last batch handed out: batches read ahead are read again after a restart. The
    source's `state_dict` is called after every batch, so it should be cheap. The source must not be used elsewhere until
    `close`, which leaving a `with` block, losing the last reference, and the end of the interpreter also do.

    Example:
        >>> with Prefetch([{"x": torch.tensor([1])}, {"x": torch.tensor([2])}], capacity=2) as batches:
        ...     [batch["x"].item() for batch in batches]
        [1, 2]
    """

    def __init__(self, source: Iterable[Any], *, capacity: int = 2, device: torch.device | str | None = None) -> None:
        if capacity < 0:
            raise InvalidArgumentError(f"capacity: expected 0 (no reading ahead) or more, got {capacity}")
        self._source = source
        self.waits: bool = getattr(source, "waits", False)
        """Whether the source may wait for records that do not exist yet."""
        self._capacity = max(capacity, 1) if self.waits else capacity
        self._device = None if device is None else torch.device(device)
        self._reader: _Reader | None = None
        self._state = source.state_dict() if isinstance(source, _Stateful) else None

    def __iter__(self) -> Iterator[Any]:
        """Continue after the last batch handed out. A new loop over a finished source starts it again."""
        if self._capacity == 0:
            place = _placement(self._device)
            for batch in self._source:
                placed, ready = place(batch)
                _await_copy(placed, ready)
                yield placed
            return
        while (batch := self.take()) is not None:
            yield batch

    def take(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - any nested batch
        """Return the next batch, as iterating does. None at the end of the source, after which the next call starts it again.

        Only with a `capacity`, which a source that waits always has.

        Raises:
            TimeoutError: no batch came for `timeout` seconds. The next call waits again.
        """
        if self._capacity == 0:
            raise InvalidArgumentError("take: with capacity 0 nothing is read ahead; iterate, or give a capacity")
        reader = self._start()
        try:
            entry = reader.next(timeout)
            if entry is None:
                return None
            batch, self._state, ready = entry
            if batch is _END:
                reader.finished = True
                return None
            _await_copy(batch, ready)
            return batch
        finally:
            if reader.finished:
                self.close()

    def interrupt(self) -> None:
        """Let a read of the source that waits for records end at once."""
        if self.waits:
            self._source.interrupt()  # type: ignore[attr-defined]

    @property
    def phase(self) -> str | None:
        """What a source of several parts reads now, as `HistoryThenStream.phase` says it. None for other sources."""
        return getattr(self._source, "phase", None)

    def lag(self) -> StreamLag | None:
        """Return how far reading is behind a stream. None for a source that does not know. Batches read ahead count as read."""
        return self._source.lag() if isinstance(self._source, HasLag) else None

    def _start(self) -> _Reader:
        if self._reader is None:
            self._reader = _Reader(self._source, self._capacity, self._device)
            self._finalizer = weakref.finalize(self, self._reader.stop, 5.0)
        return self._reader

    def close(self, timeout: float = 5.0) -> bool:
        """Stop the thread, drop what it read ahead, and set a resumable source back to the last batch handed out.

        Waits at most `timeout` seconds for a source that is inside a read. Returns False if it still is. The thread then ends
        as soon as the read returns, and the source is not set back.
        """
        if self._reader is None:
            return True
        reader, self._reader = self._reader, None
        self._finalizer.detach()
        stopped = reader.stop(timeout)
        if stopped and not reader.finished and isinstance(self._source, _Stateful) and self._state is not None:
            self._source.load_state_dict(self._state)
        return stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state as of the last batch handed out."""
        if self._capacity == 0:
            return self._stateful().state_dict()
        self._stateful()
        assert self._state is not None
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stop reading ahead and continue from where `state` was taken."""
        source = self._stateful()
        if not self.close():
            raise InvalidArgumentError("source: still inside a read after 5 seconds; load the state into a new source")
        source.load_state_dict(state)
        self._state = source.state_dict()

    def _stateful(self) -> _Stateful:
        if not isinstance(self._source, _Stateful):
            raise InvalidArgumentError(
                f"source: a {type(self._source).__name__} has no state_dict and load_state_dict; prefetch a resumable source"
            )
        return self._source


class _Reader:
    """The thread and its queue. Holds no reference to `Prefetch`, so that losing the last one can stop the thread."""

    def __init__(self, source: Iterable[Any], capacity: int, device: torch.device | None) -> None:
        self.queue: PrefetchQueue[tuple[Any, Any, Any]] = PrefetchQueue(capacity)
        self.finished = False
        self._interrupt: Callable[[], None] | None = None
        if getattr(source, "waits", False):
            self._interrupt = source.interrupt  # type: ignore[attr-defined]
        # A daemon, because the interpreter waits for other threads before anything could tell this one to stop.
        self._thread = threading.Thread(
            target=_read_ahead, args=(source, self.queue, device), name="monolith-prefetch", daemon=True
        )
        self._thread.start()

    def next(self, timeout: float | None) -> tuple[Any, Any, Any] | None:
        try:
            return self.queue.get(timeout)
        except StopIteration:
            self.finished = True
            return None
        except TimeoutError:
            raise
        except BaseException:
            self.finished = True
            raise

    def stop(self, timeout: float) -> bool:
        self.queue.close(drop=True)
        # The garbage collector may run this inside the thread itself.
        if self._thread is not threading.current_thread():
            until = time.monotonic() + timeout
            while self._interrupt is not None and self._thread.is_alive() and time.monotonic() < until:
                # Again and again: the thread may only be about to wait when it is interrupted.
                self._interrupt()
                self._thread.join(_INTERRUPT_SECS)
            self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()


def _read_ahead(source: Iterable[Any], queue: PrefetchQueue[tuple[Any, Any, Any]], device: torch.device | None) -> None:
    try:
        place = _placement(device)
        for batch in source:
            placed, ready = place(batch)
            state = source.state_dict() if isinstance(source, _Stateful) else None
            if not queue.put((placed, state, ready)):
                return
        # At its end a source may start again, so the state after the last batch is not yet that of the finished loop.
        queue.put((_END, source.state_dict() if isinstance(source, _Stateful) else None, None))
        queue.close()
    except BaseException as error:
        queue.close(error)


def _placement(device: torch.device | None) -> Any:  # noqa: ANN401 - a function of any nested batch
    """Return a function batch -> (batch on `device`, the event its copy ends with or None)."""
    if device is None:
        return lambda batch: (batch, None)
    if device.type != "cuda":
        return lambda batch: (_map_tensors(lambda tensor: tensor.to(device), batch), None)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def place(batch: Any) -> tuple[Any, torch.cuda.Event]:  # noqa: ANN401 - any nested batch
        with torch.cuda.stream(stream):
            placed = _map_tensors(lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch)
            return placed, stream.record_event()

    return place


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def _await_copy(batch: Any, ready: torch.cuda.Event | None) -> None:  # noqa: ANN401 - any nested batch
    if ready is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(ready)
    # Without this the allocator may hand the memory out again while the consumer's stream still reads it.
    _map_tensors(lambda tensor: _used_by(tensor, stream), batch)


def _used_by(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:  # noqa: ANN401 - any nested batch
    """Apply `function` to every tensor and to the values of every `Ragged` in dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return batch if isinstance(batch, torch.nn.Parameter) else function(batch)
    if isinstance(batch, Ragged):
        return Ragged(function(batch.values), batch.offsets)
    if isinstance(batch, dict):
        mapped = copy.copy(batch)  # keeps the class of the dict and its attributes
        mapped.update((name, _map_tensors(function, value)) for name, value in batch.items())
        return mapped
    if isinstance(batch, list | tuple):
        parts = [_map_tensors(function, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else (list if isinstance(batch, list) else tuple)(parts)
    if batch is None or isinstance(batch, bool | int | str):
        return batch
    raise InvalidArgumentError(f"batch: expected tensor, Ragged, bool, int, str or None, got a {type(batch).__name__}")


def enqueue_dicts_with_queue_return(
    tensors: Iterable[T], capacity: int = 1
) -> tuple[Iterable[T], PrefetchQueue[Any] | None]:
    """Read ahead under the original's name. Returns the batches and their queue, or `tensors` and None for capacity 0.

    Example:
        >>> batches, queue = enqueue_dicts_with_queue_return([{"x": torch.tensor([1])}], capacity=3)
        >>> [batch["x"].item() for batch in batches]
        [1]
        >>> enqueue_dicts_with_queue_return([1, 2], capacity=0)
        ([1, 2], None)
    """
    if capacity == 0:
        return tensors, None
    ahead = Prefetch(tensors, capacity=capacity)
    return ahead, ahead._start().queue
