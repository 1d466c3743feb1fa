"""`FileQueue`: the names of many files, found when they are needed, each handed out once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monolith.data.sources.files import expand_pattern, files_of
from monolith.errors import InvalidArgumentError, StorageError

__all__ = ["FileQueue"]

_log = logging.getLogger(__name__)
_FIRST_PAUSE = 0.5


class FileQueue:
    """File names from patterns, in order, popped by any number of threads; it ends when patterns and names are used up.

    A pattern is listed when the names before it are gone. At most `capacity` names are held, the rest of a larger folder is
    listed again. A listing that fails is tried again `retries` times, with growing pauses. The state is the pattern and
    the last name popped: names that have appeared behind it since are found, a file that two patterns match comes twice.

    Example:
        >>> queue = FileQueue(["monday.csv", "tuesday.csv"])  # or "days/*.csv", or "day_{DATE(20260101,20260131)}/*"
        >>> queue.pop(), queue.state_dict()
        ('monday.csv', {'pattern': 0, 'after': 'monday.csv'})
        >>> queue.pop(), queue.pop()
        ('tuesday.csv', None)
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        capacity: int = 100_000,
        retries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if capacity < 1 or retries < 0:
            raise InvalidArgumentError(f"expected capacity >= 1 and retries >= 0, got {capacity} and {retries}")
        # Of a range only the files that are there count, so each of its paths is looked up.
        self._patterns = [(part, part != given) for given in patterns for part in expand_pattern(given)]
        self._capacity, self._retries, self._sleep = capacity, retries, sleep
        self._lock = threading.Lock()
        self._pattern, self._after = 0, ""
        self._names: deque[str] = deque()
        """The next names of the current pattern; empty if they are not listed yet."""
        self._more = True
        """Whether the current pattern may have names behind these."""

    def pop(self) -> str | None:
        """The next name; None when there are no more."""
        with self._lock:
            name = self._next()
            if name is not None:
                self._after = self._names.popleft()
            return name

    def peek(self) -> tuple[str, dict[str, int | str]] | None:
        """The name that `pop` would return, and the state it would leave."""
        with self._lock:
            name = self._next()
            return None if name is None else (name, {"pattern": self._pattern, "after": name})

    def state_dict(self) -> dict[str, int | str]:
        """The place behind the last name popped, fit for JSON."""
        with self._lock:
            return {"pattern": self._pattern, "after": self._after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the name after which `state` was taken; the patterns must be the same."""
        pattern, after = state.get("pattern"), state.get("after")
        if type(pattern) is not int or not isinstance(after, str) or not 0 <= pattern <= len(self._patterns):
            raise InvalidArgumentError(
                f"state: expected a pattern in 0..{len(self._patterns)} and the name after it, got {dict(state)!r}"
            )
        with self._lock:
            if self._names and (pattern, after) == (self._pattern, self._names[0]):
                self._after = self._names.popleft()  # the next one: what is listed stays good
            elif (pattern, after) != (self._pattern, self._after):
                self._pattern, self._after, self._more = pattern, after, True
                self._names.clear()

    def _next(self) -> str | None:
        while not self._names and self._pattern < len(self._patterns):
            if self._more:
                self._list()
            else:
                self._pattern, self._after, self._more = self._pattern + 1, "", True
        return self._names[0] if self._names else None

    def _list(self) -> None:
        found = sorted(self._listed())
        if not found:
            _log.warning("%s: no file matches", self._patterns[self._pattern][0])
        # The state moves with each name, so a name must say by itself what comes behind it.
        left = [name for name in found if name > self._after]
        self._names.extend(left[: self._capacity])
        self._more = len(left) > self._capacity

    def _listed(self) -> list[str]:
        pattern, must_exist = self._patterns[self._pattern]
        pause = _FIRST_PAUSE
        for _ in range(self._retries):
            try:
                return files_of(pattern, must_exist=must_exist)
            except StorageError as error:
                _log.warning("%s; trying again in %g s", error, pause)
                self._sleep(pause)
                pause *= 2
        return files_of(pattern, must_exist=must_exist)
