"""`Admission`: how many requests run and wait at the same time, and `deadline_of` a request."""

from __future__ import annotations

import threading
import time

from monolith.errors import DeadlineExceededError, InvalidArgumentError, OverloadedError, UnavailableError

__all__ = ["Admission", "check_deadline", "deadline_of"]


def deadline_of(arrived: float, limit_secs: float, timeout_us: object = None) -> float:
    """Return when a request must be answered, as `time.monotonic`.

    Args:
        arrived: When it came.
        limit_secs: The most that the server allows.
        timeout_us: What the client allows, in microseconds. 0 or None: it does not say.

    Example:
        >>> deadline_of(100.0, 10.0, 500_000)
        100.5
    """
    if not timeout_us:
        return arrived + limit_secs
    if isinstance(timeout_us, str):
        timeout_us = int(timeout_us) if timeout_us.isdecimal() and len(timeout_us) < 19 else -1
    if type(timeout_us) is not int or timeout_us < 0:
        raise InvalidArgumentError(f"timeout: expected microseconds, got {timeout_us!r:.40}")
    return arrived + (min(limit_secs, timeout_us / 1e6) if timeout_us else limit_secs)


def check_deadline(deadline: float, what: str) -> None:
    """Raise `DeadlineExceededError` if `deadline` is over.

    Example:
        >>> check_deadline(time.monotonic() + 5, "waiting")
    """
    late = time.monotonic() - deadline
    if late > 0:
        raise DeadlineExceededError(f"the deadline of the request was exceeded by {late * 1000:.0f} ms {what}")


class Admission:
    """Lets `max_concurrency` requests run and `max_queue` more wait. Further ones are refused at once. Thread-safe.

    Example:
        >>> admission = Admission(max_concurrency=1, max_queue=0)
        >>> admission.admit()
        >>> admission.admit()
        Traceback (most recent call last):
            ...
        monolith.errors.OverloadedError: 1 requests run or wait, as many as are allowed; back off and retry
    """

    def __init__(self, *, max_concurrency: int, max_queue: int) -> None:
        self._max_concurrency, self._capacity = max_concurrency, max_concurrency + max_queue
        self._lock = threading.Lock()
        self._turns, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        self._admitted = self._running = self._waiting = 0
        self._draining = False

    @property
    def admitted(self) -> int:
        """Requests that run or wait."""
        return self._admitted

    @property
    def draining(self) -> bool:
        """Whether the server is stopping."""
        return self._draining

    def admit(self) -> None:
        """Count a request in. Every call that does not raise is followed by `leave`.

        Raises:
            OverloadedError: too many run and wait already.
            UnavailableError: the server is stopping.
        """
        with self._lock:
            if self._draining:
                raise UnavailableError("the server is stopping; ask another one")
            if self._admitted >= self._capacity:
                raise OverloadedError(
                    f"{self._admitted} requests run or wait, as many as are allowed; back off and retry"
                )
            self._admitted += 1

    def leave(self) -> None:
        """Count a request out."""
        with self._lock:
            self._admitted -= 1
            if self._draining and not self._admitted:
                self._idle.notify_all()

    def try_start(self) -> bool:
        """Start an admitted request if one more may run. Followed by `finish` if it returns True."""
        with self._lock:
            if self._running >= self._max_concurrency:
                return False
            self._running += 1
            return True

    def start(self, deadline: float) -> None:
        """Wait until an admitted request may run. Followed by `finish`.

        Raises:
            DeadlineExceededError: its turn did not come before `deadline`.
        """
        with self._lock:
            if self._running >= self._max_concurrency:
                self._wait(deadline)
            self._running += 1

    def _wait(self, deadline: float) -> None:
        self._waiting += 1
        try:
            left = max(0.0, deadline - time.monotonic())
            if not self._turns.wait_for(lambda: self._running < self._max_concurrency, left):
                raise DeadlineExceededError("the deadline of the request was exceeded while it waited for its turn")
        finally:
            self._waiting -= 1

    def finish(self) -> None:
        """End the run of a request."""
        with self._lock:
            self._running -= 1
            if self._waiting:
                self._turns.notify()

    def drain(self, grace: float) -> bool:
        """Refuse new requests and wait for those admitted. Returns whether all have left within `grace` seconds."""
        with self._lock:
            self._draining = True
            return self._idle.wait_for(lambda: not self._admitted, grace)
