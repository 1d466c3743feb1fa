"""Checkpoints that someone reads are not removed: readers and removers meet at a lock on the checkpoint's folder.

On a disk it is the operating system's lock (`flock`), shared by readers and exclusive for removal; it ends with the process that
holds it, so a reader that dies leaves nothing behind. Remote stores have no locks: there a reader writes a lease, a small file
with the time until which it counts.
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
from monolith.state.storage import LocalFolder, StrPath, open_folder

__all__ = ["LEASE_SECONDS", "claimed", "in_use"]

LEASE_SECONDS = 6 * 3600.0
"""How long a reader of a remote checkpoint keeps it from being removed, should it die."""

_ENDING = ".lease"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def in_use(path: StrPath, *, clock: Callable[[], float] = time.time) -> Iterator[None]:
    """Within the block the checkpoint at `path` is not removed by retention; it must still be checked that it is there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, in_use(folder), claimed(folder) as free:
        ...     print(free)
        False
    """
    folder = open_folder(path)
    if isinstance(folder, LocalFolder):
        with _locked(folder, fcntl.LOCK_SH):
            yield
        return
    name = f"reader-{secrets.token_hex(8)}{_ENDING}"
    try:
        folder.write(name, f"{clock() + LEASE_SECONDS}".encode())
    except StorageError as error:
        # Who may only read a store can still do so.
        _log.warning("%s is read without a lease: %s", folder, error)
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):
            folder.remove(name)


@contextlib.contextmanager
def claimed(path: StrPath, *, clock: Callable[[], float] = time.time) -> Iterator[bool]:
    """Whether nobody reads the checkpoint at `path`; if so, readers on a disk wait until the block is left."""
    folder = open_folder(path)
    if isinstance(folder, LocalFolder):
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            yield free
        return
    leases = [name for name in folder.names() if name.endswith(_ENDING)]
    yield not any(_lease_end(folder.read(name)) > clock() for name in leases)


def _lease_end(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def _locked(folder: LocalFolder, operation: int) -> Iterator[bool]:
    # The folder and not a file in it: files are replaced when the checkpoint is written again.
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
            # Some network file systems know no locks: nothing is gained by refusing to work there.
            _log.warning("%s cannot be locked: %s", folder, error)
        yield True
    finally:
        os.close(descriptor)
