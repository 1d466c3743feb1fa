"""The files of a dump: `<prefix>-00000-of-00002` and so on, all of them or none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import fsspec

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.urls import checked_location, filesystem_of

__all__ = ["DumpFiles", "Progress", "find_shards", "has_dump", "plain_pieces", "shard_name"]

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much: bytes when reading, rows when writing."""

_PIECE = 4 << 20


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """The name of one file of a dump.

    Example:
        >>> shard_name("model.ckpt-7.assets/user", 0, 2)
        'model.ckpt-7.assets/user-00000-of-00002'
    """
    return f"{prefix}-{shard:05d}-of-{shards:05d}"


def find_shards(prefix: str) -> list[str]:
    """The files of the dump `prefix`, a path or URL, in order. Other files beside them are ignored.

    Raises `InvalidArgumentError` if there is none, `CorruptFileError` if some are missing or belong to different dumps.
    """
    folder, _, base = prefix.rpartition("/")
    found = _parts(prefix)
    if not found:
        raise InvalidArgumentError(
            f"{prefix}: there is no dump of that name; expected {shard_name(base, 0, 1)} or the like in {folder or '.'}"
        )
    totals = sorted({int(match[2]) for match in found})
    if len(totals) > 1:
        raise CorruptFileError(
            f"{prefix}: files of dumps with {' and '.join(map(str, totals))} parts lie side by side; remove the older ones"
        )
    (shards,) = totals
    parts = {int(match[1]): match[0] for match in found}
    # The first gap is at most as far as there are files, whatever number a name claims.
    missing = next((shard for shard in range(shards) if shard not in parts), None)
    if missing is not None or len(found) != shards:
        what = "two files for one part" if missing is None else f"{shard_name(base, missing, shards)} is missing"
        raise CorruptFileError(f"{prefix}: expected {shards} parts, found {len(found)}: {what}; copy the dump again")
    return [f"{folder}/{parts[shard]}" if folder else parts[shard] for shard in range(shards)]


def has_dump(prefix: str) -> bool:
    """Whether there is any file of a dump of that name."""
    return bool(_parts(prefix))


def _parts(prefix: str) -> list[re.Match[str]]:
    """The names of the files of a dump, with number and total as groups."""
    folder, _, base = prefix.rpartition("/")
    pattern = re.compile(re.escape(base) + r"-(\d{5,9})-of-(\d{5,9})")
    return [match for name in _names(folder) if (match := pattern.fullmatch(name))]


def _names(folder: str) -> list[str]:
    try:
        system, path = filesystem_of(folder or ".")
        return [str(name).rstrip("/").rpartition("/")[2] for name in system.ls(path, detail=False)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, ImportError) as error:
        raise StorageError(f"{folder}: cannot list: {error}") from error


class DumpFiles:
    """Opens the files of a dump one after another and tells how much of all has been read."""

    def __init__(self, paths: list[str], progress: Progress | None = None) -> None:
        self.paths = paths
        self._progress, self._done = progress, 0
        self._total = sum(_size(path) for path in paths) if progress else 0

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Callable[[int], bytes]]:
        """Gives a function that reads up to so many bytes of `path`, none at the end."""
        try:
            with fsspec.open(checked_location(path), "rb") as file:
                yield lambda size: self._counted(file.read(size))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path}: cannot read: {error}") from error

    def _counted(self, data: bytes) -> bytes:
        self._done += len(data)
        if self._progress and data:
            self._progress(self._done, self._total)
        return data


def _size(path: str) -> int:
    try:
        system, inner = filesystem_of(path)
        return int(system.size(inner))
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error}") from error


def plain_pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The bytes under `read` in pieces of a few megabytes."""
    while piece := read(_PIECE):
        yield piece
