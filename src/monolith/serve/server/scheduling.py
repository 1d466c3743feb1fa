"""`PredictionScheduler`: which requests are answered in the event loop and which in a pool of threads, for every protocol."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from monolith.errors import DeadlineExceededError, OverloadedError, UnavailableError
from monolith.serve.server.handler import Handler

__all__ = ["INLINE_BYTES", "Prediction", "PredictionScheduler", "RUNS_PER_ITERATION", "Turns"]

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
INLINE_BYTES = 1 << 16
_INLINE_SECONDS = 0.002
"""A request up to this size, of a model that usually takes up to this long, is answered in the thread of the event loop: a pool
would take longer to hand it over. All others are answered in the pool, so that the loop stays free."""
RUNS_PER_ITERATION = 8
"""With one, a server that refuses many requests answers fewer: each iteration also refuses all that have come."""


class Prediction(Protocol[Answer]):
    """A request for predictions, of some protocol."""

    @property
    def model(self) -> str:
        """The model that it asks for, as far as is known. Any text."""

    @property
    def is_small(self) -> bool:
        """Whether it may be read in the event loop."""

    @property
    def deadline(self) -> float:
        """When it stops waiting for its turn, as `time.monotonic`."""

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer any more. Asked in the event loop."""

    def answer(self) -> Answer:
        """Read the request and predict, in any thread. Observers hear of it."""

    def failed(self, error: Exception) -> Answer:
        """Return the answer to a request that was not predicted, in any thread. Observers hear of it."""

    def respond(self, answer: Answer) -> None:
        """Send the answer, in the event loop."""


class Turns:
    """Lets a few small requests run per iteration of the event loop, so that it reads and refuses others in between."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._taken = 0

    def take(self, run: Callable[[], None]) -> None:
        """Call `run` now or in a later iteration. It must not raise."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._next)
        if self._taken >= RUNS_PER_ITERATION:
            self._waiting.append(run)
        else:
            self._taken += 1
            run()

    def _next(self) -> None:
        """Begin another iteration: those that have waited longest run in it."""
        self._taken = 0
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._taken < RUNS_PER_ITERATION:
            self._taken += 1
            self._waiting.popleft()()


class PredictionScheduler:
    """Admits requests for predictions, and answers them here or in a pool. Used in the thread of one event loop.

    Args:
        handler: Admits them.
        pool: Threads for requests that would hold up the event loop.
    """

    def __init__(self, handler: Handler, pool: Executor) -> None:
        self._handler, self._pool = handler, pool
        self._turns = Turns()
        self._usual_seconds: dict[str, float] = {}

    def submit(self, one: Prediction[Any]) -> None:
        """Answer now, or later in the same thread."""
        handler = self._handler
        try:
            handler.admission.admit()
        except (OverloadedError, UnavailableError) as error:
            one.respond(one.failed(error))
            return
        quick = one.is_small and self._usual_seconds.get(one.model, 0.0) <= _INLINE_SECONDS
        if quick and not handler.batches:
            self._turns.take(lambda: self._run(one))
        else:
            self._run_in_pool(one)

    def _run(self, one: Prediction[Any]) -> None:
        """Answer an admitted request in this thread, if one more may run."""
        admission = self._handler.admission
        if not one.is_abandoned and not admission.try_start():
            self._run_in_pool(one)
            return
        try:
            if not one.is_abandoned:
                one.respond(self._timed(one))
        finally:
            admission.leave()

    def _run_in_pool(self, one: Prediction[Any]) -> None:
        loop = asyncio.get_running_loop()

        def finish(answer: object) -> None:
            try:
                one.respond(answer)
            finally:
                self._handler.admission.leave()

        def run() -> None:
            answer = self._in_turn(one)
            try:
                loop.call_soon_threadsafe(finish, answer)
            except RuntimeError:  # the server did not wait for this answer any longer
                self._handler.admission.leave()
                _log.warning("an answer came after the server had stopped, and was not sent")

        try:
            self._pool.submit(run)
        except RuntimeError:  # the pool has ended
            finish(one.failed(UnavailableError("the server is stopping; ask another one")))

    def _in_turn(self, one: Prediction[Answer]) -> Answer:
        """Answer in a thread of the pool, when its turn has come."""
        handler = self._handler
        if handler.batches:  # takes a turn for all requests that are predicted together
            return _answer(one)
        try:
            handler.admission.start(one.deadline)
        except DeadlineExceededError as error:
            return one.failed(error)
        return self._timed(one)

    def _timed(self, one: Prediction[Answer]) -> Answer:
        """Answer a request that has started."""
        started = time.perf_counter()
        try:
            return _answer(one)
        finally:
            self._handler.admission.finish()
            model = one.model
            if one.is_small and (model in self._usual_seconds or self._handler.repository.ready(model)):
                # The names that clients ask for are not kept unless there is such a model: they could be any number.
                usual = self._usual_seconds.get(model, 0.0)
                self._usual_seconds[model] = usual + 0.05 * (min(time.perf_counter() - started, 1.0) - usual)


def _answer(one: Prediction[Answer]) -> Answer:
    try:
        return one.answer()
    except Exception as error:
        return one.failed(error)
