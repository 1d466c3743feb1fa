"""Paths and URLs of checkpoints, absolute or relative to the folder they are named in, and what a manifest may refer to.

A manifest names the checkpoints that parameter servers have written for it. It may refer to what is below its own model_dir and
below the roots that the reader was given. Otherwise anyone who can write a manifest could make a process read, or remove, any
file or URL that the process has access to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from monolith.errors import InvalidArgumentError
from monolith.urls import StrPath, checked_location, lies_below

__all__ = [
    "RESTORE_ROOTS",
    "absolute_path",
    "base_name",
    "is_absolute",
    "is_allowed",
    "is_below",
    "parent_folder",
    "reading_below",
    "relative_name",
    "restore_roots",
]

# Two letters at least, so that a drive letter is none; one slash is enough, because Hadoop writes `hdfs:/path`.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_absolute(path: str | os.PathLike[str]) -> bool:
    """Return whether a path starts at the root or with a scheme such as `hdfs:/`, so it means the same from every folder.

    Example:
        >>> [is_absolute(path) for path in ("/data", "hdfs:/data", "s3://bucket", "model.ckpt-3", "a:b")]
        [True, True, True, False, False]
    """
    text = os.fspath(path)
    return text.startswith("/") or _URL.match(text) is not None


def absolute_path(name: str, folder: str | os.PathLike[str]) -> str:
    """Return the path that `name`, which was read from a file in `folder`, stands for.

    Example:
        >>> absolute_path("model.ckpt-3", "/runs/a"), absolute_path("hdfs:/b/model.ckpt-3", "/runs/a")
        ('/runs/a/model.ckpt-3', 'hdfs:/b/model.ckpt-3')
        >>> absolute_path("../model.ckpt-3", "/runs/a")
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: '../model.ckpt-3': expected a name inside its folder, or an absolute path
    """
    if is_absolute(name):
        return name
    # A name from a file becomes a path: it must not lead out of the folder the file is in.
    if not name or "\0" in name or ".." in name.split("/"):
        raise InvalidArgumentError(f"{name!r}: expected a name inside its folder, or an absolute path")
    return f"{os.fspath(folder).rstrip('/')}/{name}"


def relative_name(path: str, folder: str | os.PathLike[str]) -> str:
    """Return `path` relative to `folder` if it is inside, so the folder may be moved.

    Example:
        >>> relative_name("/runs/a/model.ckpt-3", "/runs/a/"), relative_name("/b/model.ckpt-3", "/runs/a")
        ('model.ckpt-3', '/b/model.ckpt-3')
    """
    inside = f"{os.fspath(folder).rstrip('/')}/"
    return path[len(inside) :] if path.startswith(inside) else path


def parent_folder(path: str | os.PathLike[str]) -> str:
    """Return the folder that `path` is in.

    Example:
        >>> parent_folder("/runs/a/model.ckpt"), parent_folder("model.ckpt"), parent_folder("/model.ckpt")
        ('/runs/a', '.', '/')
    """
    text = os.fspath(path).rstrip("/")
    return text.rpartition("/")[0] or ("/" if text.startswith("/") else ".")


def base_name(path: str | os.PathLike[str]) -> str:
    """Return the last component of `path`.

    Example:
        >>> base_name("hdfs:/runs/a/model.ckpt-3/")
        'model.ckpt-3'
    """
    return os.fspath(path).rstrip("/").rpartition("/")[2]


RESTORE_ROOTS = "MONOLITH_RESTORE_ROOTS"
"""Environment variable: further folders and URLs, separated by commas, that checkpoints may refer to."""

_given: ContextVar[tuple[str, ...]] = ContextVar("restore roots", default=())


def restore_roots() -> tuple[str, ...]:
    """Return the roots that this reader was given."""
    named = (root.strip() for root in os.environ.get(RESTORE_ROOTS, "").split(","))
    return (*_given.get(), *(checked_location(root) for root in named if root))


@contextmanager
def reading_below(*roots: StrPath) -> Iterator[None]:
    """Allow what this thread reads within the block to refer to what is below `roots`.

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
    """Return whether a checkpoint in `model_dir` may refer to `path`."""
    return is_below(path, (model_dir, *restore_roots()))


def is_below(path: StrPath, roots: Iterable[StrPath]) -> bool:
    """Return whether `path` is one of `roots` or inside of one, after symbolic links.

    Example:
        >>> is_below("s3://bucket/run/a", ["s3://bucket/run"]), is_below("s3://bucket/runs", ["s3://bucket/run"])
        (True, False)
    """
    return any(lies_below(checked_location(path), checked_location(root)) for root in roots)
