"""The mark of a folder that is being written, and what becomes of one whose writer died."""

from __future__ import annotations

import contextlib
import fcntl
import os

from monolith.errors import StorageError
from monolith.state.manifest import MANIFEST
from monolith.state.storage import Folder, LocalFolder, StrPath, open_folder

__all__ = ["MARK", "Writing", "remove_unfinished"]

MARK = ".writing"
"""Its name."""


class Writing:
    """Held by the writer of a folder from before its first file until after its manifest; a second writer is refused.

    On a disk this is a lock on a file, which ends with the process whatever happens to it. Other stores have no locks: there a
    folder without a manifest is left alone.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     folder = open_folder(f"{model_dir}/model.ckpt-1")
        ...     writing = Writing(folder)
        ...     remove_unfinished(model_dir), folder.names()
        ...     writing.end()
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
                raise StorageError(f"{folder}: somebody else is writing it; wait until that has ended")

    def end(self) -> None:
        """Let others write; harmless when called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(StorageError):  # left behind it means nothing, beside a manifest
                self._folder.remove(MARK)
            os.close(descriptor)


def remove_unfinished(model_dir: StrPath) -> list[str]:
    """Remove the checkpoints and snapshots of `model_dir` whose writer died; their names."""
    top = open_folder(model_dir)
    removed: list[str] = []
    for folder in (top, top.inside("snapshots")) if isinstance(top, LocalFolder) else ():
        for name in folder.names():
            if _is_unfinished(folder.inside(name)):
                folder.remove(name)
                removed.append(name)
    return removed


def _is_unfinished(folder: LocalFolder) -> bool:
    if folder.size(MARK) is None or folder.size(MANIFEST) is not None:
        return False
    descriptor = _lock(folder)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _lock(folder: LocalFolder) -> int:
    """A descriptor that holds the lock, or -1 if somebody else does."""
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
