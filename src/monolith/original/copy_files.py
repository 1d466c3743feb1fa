"""Copies of files and folders between any two stores that fsspec knows, in several threads, tried again when they fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from monolith.errors import InvalidArgumentError, StorageError
from monolith.urls import filesystem_of

__all__ = ["copy_file", "copy_recursively"]

Sleep = Callable[[float], None]


def copy_file(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = True,
    skip_nonexist: bool = True,
    max_retries: int = 5,
    sleep: Sleep = time.sleep,
) -> bool:
    """Copy one file. Returns False if `skip_nonexist` is set and there was nothing to copy.

    A failed copy is tried again up to `max_retries` times, after 0.1, 0.2, 0.4, ... seconds.

    Example:
        >>> with fsspec.open("memory://from/a.txt", "w") as file:
        ...     _ = file.write("hello")
        >>> copy_file("memory://from/a.txt", "memory://to/a.txt")
        True
        >>> copy_file("memory://from/b.txt", "memory://to/b.txt")
        False
    """
    for attempt in range(max_retries + 1):
        try:
            return _copy_once(os.fspath(src), os.fspath(dst), overwrite, skip_nonexist)
        except InvalidArgumentError:
            raise
        except OSError as error:
            if attempt == max_retries:
                raise StorageError(f"{src}: cannot be copied to {dst}, tried {attempt + 1} times: {error}") from error
            sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def copy_recursively(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    max_workers: int = 1,
    skip_nonexist: bool = True,
    max_retries: int = 5,
    sleep: Sleep = time.sleep,
) -> int:
    """Copy a folder with everything in it in place of what is at `dst`. Returns the number of files.

    Without a folder `src`, nothing happens and `dst` stays, unless `skip_nonexist` is False. `max_workers` files are copied at
    the same time.

    Raises:
        InvalidArgumentError: one of the two is, or contains, the other. Nothing has changed then.

    Example:
        >>> copy_recursively("memory://nothing", "memory://there")
        0
    """
    source, source_root = filesystem_of(src)
    target, target_root = filesystem_of(dst)
    if not source.isdir(source_root):
        if skip_nonexist:
            return 0
        raise InvalidArgumentError(f"src: {os.fspath(src)!r} is not a folder")
    source_root, target_root = source_root.rstrip("/"), target_root.rstrip("/")
    _require_apart(source, source_root, target, target_root)
    folders, files = _tree(source, source_root)
    if target.exists(target_root):
        target.rm(target_root, recursive=True)
    for folder in ("", *folders):
        target.makedirs(f"{target_root}{folder}", exist_ok=True)

    def copy(name: str) -> bool:
        return copy_file(
            source.unstrip_protocol(f"{source_root}{name}"),
            target.unstrip_protocol(f"{target_root}{name}"),
            skip_nonexist=skip_nonexist,
            max_retries=max_retries,
            sleep=sleep,
        )

    with ThreadPoolExecutor(max_workers, thread_name_prefix="monolith-copy") as pool:
        return sum(pool.map(copy, files))


def _copy_once(src: str, dst: str, overwrite: bool, skip_nonexist: bool) -> bool:
    source, source_path = filesystem_of(src)
    target, target_path = filesystem_of(dst)
    if not overwrite and target.exists(target_path):
        raise InvalidArgumentError(f"dst: {dst!r} exists; give overwrite=True to replace it")
    if _is_within(source, source_path, target, target_path):
        raise InvalidArgumentError(f"dst: {dst!r} is src, {src!r}; opening it for writing would empty it")
    try:
        reader = source.open(source_path, "rb")
    except FileNotFoundError:
        if skip_nonexist:
            return False
        raise InvalidArgumentError(f"src: there is no file {src!r}") from None
    with reader:
        target.makedirs(target_path.rpartition("/")[0] or "/", exist_ok=True)
        with target.open(target_path, "wb") as writer:
            while chunk := reader.read(1 << 22):
                writer.write(chunk)
    return True


def _require_apart(
    source: fsspec.AbstractFileSystem, source_root: str, target: fsspec.AbstractFileSystem, target_root: str
) -> None:
    """Refuse two folders of which one is, or contains, the other, because the target is removed before the copy."""
    if _is_within(source, source_root, target, target_root):
        raise InvalidArgumentError(f"dst: {target_root!r} is, or is inside of, src, {source_root!r}")
    if _is_within(target, target_root, source, source_root):
        raise InvalidArgumentError(
            f"dst: {target_root!r} contains src, {source_root!r}, which would be removed with it"
        )


def _is_within(
    outer_store: fsspec.AbstractFileSystem, outer: str, inner_store: fsspec.AbstractFileSystem, inner: str
) -> bool:
    """Tell whether `inner` is `outer` or inside of it, also through symbolic links and mounts."""
    if type(outer_store) is not type(inner_store):
        return False
    if not isinstance(outer_store, LocalFileSystem):
        return f"{inner.strip('/')}/".startswith(f"{outer.strip('/')}/") or not outer.strip("/")
    place = Path(inner).resolve()
    if place.is_relative_to(Path(outer).resolve()):
        return True
    return Path(outer).exists() and any(path.exists() and path.samefile(outer) for path in (place, *place.parents))


def _tree(files: fsspec.AbstractFileSystem, root: str) -> tuple[list[str], list[str]]:
    """Return the names of all folders and all files under `root`, each beginning with a slash."""
    folders: list[str] = []
    names: list[str] = []
    for path, found in files.find(root, withdirs=True, detail=True).items():
        name = path[len(root) :]
        if name:
            (folders if found["type"] == "directory" else names).append(name)
    return folders, names
