"""Paths, globs and date ranges as lists of files, and `FileQueue`, which hands each file out once."""

from __future__ import annotations

import datetime
import itertools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from monolith.errors import InvalidArgumentError, StorageError
from monolith.urls import filesystem_of

__all__ = ["FileQueue", "STDIN", "expand_paths", "expand_pattern", "files_of", "gen_patterns"]

STDIN = "-"
"""The path that means standard input."""

_RANGE = re.compile(r"\{(DATE|INT)\((\d+),\s*(\d+)\)\}")
_MAX_PATHS = 1_000_000


def expand_pattern(pattern: str) -> list[str]:
    """Expand `{DATE(first,last)}` (8 digits: days, 10: hours) and `{INT(first,last)}`, both inclusive, into all paths.

    Example:
        >>> expand_pattern("day_{DATE(20240228,20240301)}/part_{INT(0,1)}")[:3]
        ['day_20240228/part_0', 'day_20240228/part_1', 'day_20240229/part_0']
    """
    pieces = _RANGE.split(pattern)
    fixed, ranges = pieces[::4], zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True)
    choices = [list(itertools.islice(_range(*bounds), _MAX_PATHS + 1)) for bounds in ranges]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > _MAX_PATHS:
        raise InvalidArgumentError(f"pattern {pattern!r}: more than {_MAX_PATHS} paths")
    return [
        "".join(itertools.chain.from_iterable(itertools.zip_longest(fixed, chosen, fillvalue="")))
        for chosen in itertools.product(*choices)
    ]


def _range(kind: str, first: str, last: str) -> Iterator[str]:
    if kind == "INT":
        yield from map(str, range(int(first), int(last) + 1))
        return
    if len(first) != len(last) or len(first) not in (8, 10):
        raise InvalidArgumentError(f"DATE({first},{last}): expected YYYYMMDD or YYYYMMDDHH, both in the same form")
    layout, step = (
        ("%Y%m%d", datetime.timedelta(days=1)) if len(first) == 8 else ("%Y%m%d%H", datetime.timedelta(hours=1))
    )
    try:
        time, end = (datetime.datetime.strptime(text, layout) for text in (first, last))
    except ValueError as error:
        raise InvalidArgumentError(f"DATE({first},{last}): {error}") from None
    while time <= end:
        yield time.strftime(layout)
        time += step


def gen_patterns(
    input_path: str,
    start_date: int,
    start_hour: int,
    end_date: int,
    end_hour: int,
    is_hourly: bool = False,
    wildcard: str = "*",
) -> list[str]:
    """Return globs for the days (`path/YYYYMMDD/*`) or hours (`path/YYYYMMDD/HH*`) from start to end, the end not included.

    Example:
        >>> len(gen_patterns("data", 20220901, 0, 20220920, 0))
        19
        >>> gen_patterns("data", 20220901, 22, 20220902, 0, is_hourly=True)
        ['data/20220901/22*', 'data/20220901/23*']
    """
    try:
        time = datetime.datetime.strptime(f"{start_date}{start_hour:02}", "%Y%m%d%H")
        end = datetime.datetime.strptime(f"{end_date}{end_hour:02}", "%Y%m%d%H")
    except ValueError as error:
        raise InvalidArgumentError(f"start and end: expected YYYYMMDD and an hour in 0..23; {error}") from None
    step = datetime.timedelta(hours=1) if is_hourly else datetime.timedelta(days=1)
    layout = "%Y%m%d/%H" if is_hourly else "%Y%m%d/"
    patterns = []
    while time < end:
        patterns.append(f"{input_path.rstrip('/')}/{time.strftime(layout)}{wildcard}")
        time += step
    return patterns


def expand_paths(paths: str | Sequence[str]) -> list[str]:
    """Return the files that `paths` mean: URLs as given, and the files that globs, folders and patterns match, sorted."""
    given = [paths] if isinstance(paths, str) else list(paths)
    if not all(isinstance(path, str) for path in given):
        raise InvalidArgumentError(f"paths: expected strings, got {given!r}; wrap a Path in str()")
    if STDIN in given and len(given) > 1:
        raise InvalidArgumentError(f"paths: {STDIN!r} (standard input) cannot be combined with other paths")
    files = [file for path in given for file in files_of(path)]
    if not files:
        raise InvalidArgumentError(f"paths: no file matches {', '.join(map(repr, given)) or 'an empty list'}")
    return files


def files_of(path: str, *, must_exist: bool = False) -> list[str]:
    """Return the files that one path means, none if nothing matches a glob. With `must_exist` a plain path is looked up too.

    Example:
        >>> files_of("day.csv"), files_of("day.csv", must_exist=True)
        (['day.csv'], [])
    """
    if path == STDIN:
        return [path]
    if _RANGE.search(path):
        # Of a range only the paths that exist count: not every day has data.
        return [file for part in expand_pattern(path) for file in _existing(part)]
    return _existing(path) if must_exist or re.search(r"[*?\[]", path) or _is_folder(path) else [path]


def _is_folder(path: str) -> bool:
    filesystem, plain = filesystem_of(path, "paths")
    return bool(filesystem.isdir(plain))


def _existing(path: str) -> list[str]:
    filesystem, plain = filesystem_of(path, "paths")
    try:
        if filesystem.isdir(plain):
            found = [name for name in filesystem.find(plain) if not name.rsplit("/", 1)[-1].startswith(("_", "."))]
        else:
            found = [name for name in filesystem.glob(plain) if not filesystem.isdir(name)]
    except OSError as error:
        raise StorageError(f"{path}: cannot list: {error}") from error
    return sorted(filesystem.unstrip_protocol(name) if "://" in path else name for name in found)


_log = logging.getLogger(__name__)
_FIRST_PAUSE = 0.5


class FileQueue:
    """File names from patterns, in order, popped by any number of threads, until patterns and names are used up.

    A pattern is listed when the names before it are used up. At most `capacity` names are held, and the rest of a larger folder
    is listed again later. A listing that fails is tried again `retries` times with growing pauses. The state is the pattern and
    the last name popped, so names that have appeared after it since are found. A file that two patterns match comes twice.

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
        # Of a range only existing files count, so each of its paths is looked up.
        self._patterns = [(part, part != given) for given in patterns for part in expand_pattern(given)]
        self._capacity, self._retries, self._sleep = capacity, retries, sleep
        self._lock = threading.Lock()
        self._pattern, self._after = 0, ""
        self._names: deque[str] = deque()
        """The next names of the current pattern, empty if they are not listed yet."""
        self._more = True
        """Whether the current pattern may have names after these."""

    def pop(self) -> str | None:
        """Return the next name, None when there are no more."""
        with self._lock:
            name = self._next()
            if name is not None:
                self._after = self._names.popleft()
            return name

    def peek(self) -> tuple[str, dict[str, int | str]] | None:
        """Return the name that `pop` would return, and the state it would leave."""
        with self._lock:
            name = self._next()
            return None if name is None else (name, {"pattern": self._pattern, "after": name})

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the last name popped, as JSON values."""
        with self._lock:
            return {"pattern": self._pattern, "after": self._after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the name at which `state` was taken. The patterns must be the same."""
        pattern, after = state.get("pattern"), state.get("after")
        if type(pattern) is not int or not isinstance(after, str) or not 0 <= pattern <= len(self._patterns):
            raise InvalidArgumentError(
                f"state: expected a pattern in 0..{len(self._patterns)} and the name after it, got {dict(state)!r}"
            )
        with self._lock:
            if self._names and (pattern, after) == (self._pattern, self._names[0]):
                self._after = self._names.popleft()  # the next one: the listing stays valid
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
        # The state moves with each name, so a name alone must determine what comes after it.
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
