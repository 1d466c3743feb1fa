"""Locks of checkpoint folders: leases of readers, which keep retention away, and the mark of a writer.

On a disk a lease is a shared `flock` on the checkpoint's folder, and removal needs an exclusive one. It ends with the process
that holds it, so a reader that dies leaves nothing behind. Remote stores have no locks. There a reader writes a lease, which is a
small file with the time at which it expires.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator

from monolith.errors import StorageError
from monolith.state.manifest import MANIFEST
from monolith.state.storage import Folder, LocalFolder, StrPath, open_folder

__all__ = ["LEASE_ENDING", "LEASE_SECONDS", "MARK", "WriterMark", "claimed", "in_use", "remove_unfinished"]

LEASE_SECONDS = 6 * 3600.0
"""How long a reader of a remote checkpoint that died keeps it from being removed."""
LEASE_ENDING = ".lease"
"""How the names of lease files end."""
MARK = ".writing"
"""Name of the file that a writer has locked."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def in_use(path: StrPath | Folder, *, clock: Callable[[], float] = time.time) -> Iterator[None]:
    """Keep retention from removing the checkpoint at `path` within the block. The caller still checks that it exists.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, in_use(folder), claimed(folder) as free:
        ...     print(free)
        False
    """
    folder = open_folder(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(folder, LocalFolder):
        with _locked(folder, fcntl.LOCK_SH):
            yield
        return
    name = f"reader-{secrets.token_hex(8)}{LEASE_ENDING}"
    try:
        folder.write(name, f"{clock() + LEASE_SECONDS}".encode())
    except StorageError as error:
        # A client that may only read the store can still do so.
        _log.warning("%s is read without a lease: %s", folder, error)
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):
            folder.remove(name)


@contextlib.contextmanager
def claimed(path: StrPath | Folder, *, clock: Callable[[], float] = time.time) -> Iterator[bool]:
    """Provide whether nobody reads the checkpoint at `path`. If so, readers on a disk wait until the block is left."""
    folder = open_folder(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(folder, LocalFolder):
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            yield free
        return
    leases = [name for name in folder.names() if name.endswith(LEASE_ENDING)]
    yield not any(_lease_end(folder.read(name)) > clock() for name in leases)


def _lease_end(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def _locked(folder: LocalFolder, operation: int) -> Iterator[bool]:
    # The folder and not a file in it, because files are replaced when the checkpoint is written again.
    try:
        descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            # Some network file systems have no locks, and refusing to work there would gain nothing.
            _log.warning("%s cannot be locked: %s", folder, error)
        yield True
    finally:
        os.close(descriptor)


class WriterMark:
    """Held by the writer of a folder from before its first file until after its manifest. A second writer is refused.

    On a disk this is a lock on a file, which ends with the process. Other stores have no locks, and there a folder without a
    manifest is left alone.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     folder = open_folder(f"{model_dir}/model.ckpt-1")
        ...     mark = WriterMark(folder)
        ...     remove_unfinished(model_dir), folder.names()
        ...     mark.release()
        ...     folder.names()
        ([], ['.writing'])
        []
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._descriptor = -1
        if isinstance(folder, LocalFolder):
            folder.make()
            self._descriptor = _lock(folder)
            if self._descriptor < 0:
                raise StorageError(f"{folder}: another process or thread is writing it; wait until it has finished")

    def release(self) -> None:
        """Let others write. Calling it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(StorageError):  # next to a manifest a leftover mark means nothing
                self._folder.remove(MARK)
            os.close(descriptor)


def remove_unfinished(model_dir: StrPath | Folder) -> list[str]:
    """Remove the checkpoints and snapshots of `model_dir` whose writer died. Returns their names."""
    top = open_folder(model_dir) if isinstance(model_dir, str | os.PathLike) else model_dir
    removed: list[str] = []
    for folder in (top, top.inside("snapshots")) if isinstance(top, LocalFolder) else ():
        for path in sorted(folder.path.glob(f"*/{MARK}")):
            name = path.parent.name
            if _is_unfinished(folder.inside(name)):
                folder.remove(name)
                removed.append(name)
    return removed


def _is_unfinished(folder: LocalFolder) -> bool:
    if folder.size(MANIFEST) is not None:
        return False
    descriptor = _lock(folder)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _lock(folder: LocalFolder) -> int:
    """Return a descriptor that holds the lock, or -1 if another writer holds it."""
    try:
        descriptor = os.open(folder.path / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"{folder}/{MARK}: cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
