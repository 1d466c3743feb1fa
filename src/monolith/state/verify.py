"""Checking a whole model_dir: every manifest, file, snapshot, segment and chain, and the folders of its parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, MonolithError
from monolith.log import LogReader
from monolith.log.segment_format import sequence_of
from monolith.state.checkpoint_folder import check_complete, part_paths, read_listed
from monolith.state.checkpoint_state import read_checkpoint_state
from monolith.state.lineage import LOG
from monolith.state.manifest import MANIFEST, Manifest, TableEntry, read_manifest
from monolith.state.paths import base_name, parent_folder
from monolith.state.restore_points import find_restore_point
from monolith.state.snapshot import SNAPSHOTS, read_snapshot
from monolith.state.storage import Folder, LocalFolder, StrPath, open_folder
from monolith.state.table_files import read_table_file
from monolith.state.writing import MARK
from monolith.table import NUM_BUCKETS, EmbeddingTable
from monolith.table.table_file import FileEntry

__all__ = ["Problem", "Verification", "verify"]

SERVERS = "ps"
"""The folder of the model_dir that has a folder for each parameter server, which is a model_dir itself."""
_DENSE_ONLY = "dense_only"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    path: str
    """The checkpoint, snapshot, log or folder that it was found in."""
    error: str


@dataclass(kw_only=True)
class Verification:
    """What `verify` has read, and what is wrong with it."""

    checkpoints: int = 0
    snapshots: int = 0
    segments: int = 0
    servers: int = 0
    """Folders of parameter servers."""
    unfinished: list[str] = field(default_factory=list)
    """Checkpoints and snapshots without a manifest, as a crash leaves them: not a problem, nothing refers to them."""
    problems: list[Problem] = field(default_factory=list)


def verify(path: StrPath, *, progress: Callable[[str], object] = lambda what: None) -> Verification:
    """Read everything that is in a model_dir, a checkpoint or the folder of a log, and tell what is wrong with it.

    Every file is held against its checksum, every chain of segments is walked, and the newest state must be reachable. Nothing
    is changed, and no table is kept in memory beyond one file of it.

    Args:
        path: A model_dir or a checkpoint, local or a URL, or the local folder of a log.
        progress: Called with the name of what is read next.

    Raises:
        InvalidArgumentError: There is nothing at `path` that can be checked.

    Example:
        >>> from monolith.state import verify, write_checkpoint
        >>> _ = write_checkpoint("memory://run-9/model.ckpt-5", state={"w": 1.0}, step=5)
        >>> found = verify("memory://run-9")
        >>> found.checkpoints, found.problems
        (1, [])
    """
    found = Verification()
    folder = open_folder(path)
    if folder.size(MANIFEST) is not None:
        _verify_checkpoint(str(folder), found, progress)
    elif isinstance(folder, LocalFolder) and any(map(sequence_of, folder.names())):
        _verify_log(folder.path, found, progress)
    else:
        _verify_model_dir(folder, found, progress)
    if not (found.checkpoints or found.snapshots or found.segments or found.problems or found.servers):
        raise InvalidArgumentError(
            f"{folder}: expected a model_dir, a checkpoint or the folder of a log; there is nothing"
        )
    return found


def _verify_model_dir(top: Folder, found: Verification, progress: Callable[[str], object]) -> None:
    for name in top.names():
        inside = top.inside(name)
        if inside.size(MANIFEST) is not None:
            _verify_checkpoint(str(inside), found, progress)
        elif inside.size(MARK) is not None:
            found.unfinished.append(str(inside))
    with _noting(found, top):
        index = read_checkpoint_state(str(top))
        if index is not None and index.model_checkpoint_path not in {problem.path for problem in found.problems}:
            read_manifest(index.model_checkpoint_path)
    if isinstance(top, LocalFolder):
        for name in top.inside(SNAPSHOTS).names():
            _verify_snapshot(top, name, found, progress)
        _verify_log(top.path / LOG, found, progress)
        _verify_newest(top, found)
        for name in top.inside(SERVERS).names():
            found.servers += 1
            _verify_model_dir(top.inside(f"{SERVERS}/{name}"), found, progress)
        if top.inside(_DENSE_ONLY).names():
            _verify_model_dir(top.inside(_DENSE_ONLY), found, progress)


def _verify_newest(top: LocalFolder, found: Verification) -> None:
    """Check that a run or server could continue from its newest state. Damaged files were found before."""
    try:
        find_restore_point(str(top))
    except InvalidArgumentError:
        pass  # there is nothing yet
    except LogGapError as error:
        if not any(problem.path == str(top.path / LOG) for problem in found.problems):
            found.problems.append(Problem(path=str(top), error=str(error)))
    except MonolithError as error:
        if not found.problems:
            found.problems.append(Problem(path=str(top), error=str(error)))


def _verify_checkpoint(path: str, found: Verification, progress: Callable[[str], object]) -> None:
    progress(path)
    found.checkpoints += 1
    with _noting(found, open_folder(path)):
        manifest = check_complete(path)
        _verify_files(open_folder(path), manifest.files, manifest.tables)
        _verify_listed_segments(manifest, path)
        for part in part_paths(manifest, path):
            if not part.startswith(f"{parent_folder(path)}/{SERVERS}/"):  # those are checked where they are
                _verify_checkpoint(part, found, progress)


def _verify_snapshot(top: LocalFolder, name: str, found: Verification, progress: Callable[[str], object]) -> None:
    folder = top.inside(f"{SNAPSHOTS}/{name}")
    if folder.size(MANIFEST) is None:
        found.unfinished.append(str(folder))
        return
    progress(str(folder))
    found.snapshots += 1
    with _noting(found, folder):
        snapshot = read_snapshot(str(top), name)
        _verify_files(folder, snapshot.files, snapshot.tables)


def _verify_log(folder: Path, found: Verification, progress: Callable[[str], object]) -> None:
    reader = LogReader(folder)
    for verdict in reader.verify():
        progress(f"segment {verdict.sequence} of {folder}")
        found.segments += 1
        if verdict.error is not None:
            found.problems.append(Problem(path=str(folder), error=verdict.error))


def _verify_files(folder: Folder, files: tuple[FileEntry, ...], tables: Mapping[str, TableEntry]) -> None:
    owners = {name: entry for entry in tables.values() for name in entry.files}
    for file in files:
        if file.name in owners:
            # A table of its own for each file: it is freed before the next one is read.
            config = owners[file.name].config.model_copy(update={"initial_capacity": 0})
            read_table_file(folder, file, EmbeddingTable(config), range(NUM_BUCKETS))
        else:
            read_listed(folder, files, file.name)


def _verify_listed_segments(manifest: Manifest, path: str) -> None:
    """Check that the segments in the log are those that the checkpoint was written with. `_verify_log` reads them."""
    if not manifest.segments:
        return
    reader = LogReader(Path(parent_folder(path)) / LOG)
    for entry in manifest.segments:
        info = reader.info(sequence_of(base_name(entry.name)) or 0)
        if f"crc32c:{info.checksum:08x}" != entry.checksum:
            raise CorruptFileError(f"{info.path}: is not the segment that {path} was written with")


@contextlib.contextmanager
def _noting(found: Verification, folder: Folder) -> Iterator[None]:
    """Note what is wrong with `folder`, unless training has removed it meanwhile."""
    try:
        yield
    except MonolithError as error:
        if folder.names():
            found.problems.append(Problem(path=str(folder), error=str(error)))
