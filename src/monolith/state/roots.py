"""Which files a checkpoint may refer to: those below its own model_dir, and below the roots that the reader was given.

A manifest names the checkpoints that parameter servers have written for it. Without this check, anyone who can write a manifest
could make a process read, or remove, any file or URL that the process has access to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from monolith.urls import StrPath, checked_location, lies_below

__all__ = ["RESTORE_ROOTS", "is_allowed", "is_below", "reading_below", "restore_roots"]

RESTORE_ROOTS = "MONOLITH_RESTORE_ROOTS"
"""Environment variable: further folders and URLs, separated by commas, that checkpoints may refer to."""

_given: ContextVar[tuple[str, ...]] = ContextVar("restore roots", default=())


def restore_roots() -> tuple[str, ...]:
    """The roots that this reader was given."""
    named = (root.strip() for root in os.environ.get(RESTORE_ROOTS, "").split(","))
    return (*_given.get(), *(checked_location(root) for root in named if root))


@contextmanager
def reading_below(*roots: StrPath) -> Iterator[None]:
    """Within the block, what this thread reads may refer to what lies below `roots`.

    Example:
        >>> with reading_below("/mnt/servers"):
        ...     is_allowed("/mnt/servers/0/model.ckpt-3", "/runs/a")
        True
        >>> is_allowed("/mnt/servers/0/model.ckpt-3", "/runs/a"), is_allowed("/runs/a/ps/0", "/runs/a")
        (False, True)
    """
    before = _given.set((*_given.get(), *map(checked_location, roots)))
    try:
        yield
    finally:
        _given.reset(before)


def is_allowed(path: StrPath, model_dir: StrPath) -> bool:
    """Whether a checkpoint in `model_dir` may refer to `path`."""
    return is_below(path, (model_dir, *restore_roots()))


def is_below(path: StrPath, roots: Iterable[StrPath]) -> bool:
    """Whether `path` is one of `roots` or lies inside of one, after symbolic links.

    Example:
        >>> is_below("s3://bucket/run/a", ["s3://bucket/run"]), is_below("s3://bucket/runs", ["s3://bucket/run"])
        (True, False)
    """
    return any(lies_below(checked_location(path), checked_location(root)) for root in roots)
