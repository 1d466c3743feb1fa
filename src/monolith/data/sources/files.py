"""Which files: URLs, folders, globs, and the original's date and number patterns; sorted, so that every worker agrees."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator, Sequence

from monolith.errors import InvalidArgumentError, StorageError
from monolith.urls import filesystem_of

__all__ = ["STDIN", "expand_paths", "expand_pattern", "files_of", "gen_patterns"]

STDIN = "-"
"""The path that means standard input."""

_RANGE = re.compile(r"\{(DATE|INT)\((\d+),\s*(\d+)\)\}")
_MAX_PATHS = 1_000_000


def expand_pattern(pattern: str) -> list[str]:
    """Every path that `{DATE(first,last)}` (8 digits: days, 10: hours) and `{INT(first,last)}` stand for, both inclusive.

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
        raise InvalidArgumentError(f"DATE({first},{last}): expected YYYYMMDD or YYYYMMDDHH, twice the same")
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
    """Globs for the days (`path/YYYYMMDD/*`) or hours (`path/YYYYMMDD/HH*`) from start to end, the end not included.

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
    """The files that `paths` mean: URLs as they are; globs, folders and patterns replaced by the files found, sorted."""
    given = [paths] if isinstance(paths, str) else list(paths)
    if not all(isinstance(path, str) for path in given):
        raise InvalidArgumentError(f"paths: expected texts, got {given!r}; wrap a Path in str()")
    if STDIN in given and len(given) > 1:
        raise InvalidArgumentError(f"paths: {STDIN!r} (standard input) cannot be combined with other paths")
    files = [file for path in given for file in files_of(path)]
    if not files:
        raise InvalidArgumentError(f"paths: no file matches {', '.join(map(repr, given)) or 'an empty list'}")
    return files


def files_of(path: str, *, must_exist: bool = False) -> list[str]:
    """The files that one path means; none if it is a glob that nothing matches. `must_exist`: a plain path is looked up too.

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
