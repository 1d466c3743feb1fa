"""`ModelDir`: the folder of a run or a parameter server, with its checkpoints, snapshots and change log.

<model_dir>/model.ckpt-<step>/   a checkpoint, complete once it has a manifest
<model_dir>/snapshots/<number>/  all rows of all tables, shared by checkpoints
<model_dir>/log/                 the segments with the changes since
<model_dir>/ps/<number>/         the model_dir of a parameter server
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, StorageError
from monolith.log import LogReader, SegmentInfo
from monolith.log.change_log import ChangeLog
from monolith.log.commit import Tables
from monolith.log.segment_format import sequence_of
from monolith.state.manifest import (
    MANIFEST,
    Manifest,
    Sealed,
    SnapshotManifest,
    check_sizes,
    read_listed,
    read_sealed,
    write_sealed,
)
from monolith.state.paths import (
    RESTORE_ROOTS,
    absolute_path,
    base_name,
    is_absolute,
    is_allowed,
    parent_folder,
    reading_below,
)
from monolith.state.storage import FileVersion, Folder, LocalFolder, StrPath, open_folder
from monolith.state_bytes import State, unpack_state
from monolith.table.table_file import FileEntry
from monolith.urls import checked_location

__all__ = [
    "DENSE_ONLY",
    "LOG",
    "Lineage",
    "ModelDir",
    "SERVERS",
    "SNAPSHOTS",
    "is_complete",
    "read_state",
    "remove_assets",
    "remove_checkpoint",
]

LOG = "log"
"""Name of the folder with the segments of the change log."""
SNAPSHOTS = "snapshots"
"""Name of the folder with the snapshots."""
SERVERS = "ps"
"""Name of the folder with the model_dir of each parameter server."""
DENSE_ONLY = "dense_only"
"""Name of the folder with checkpoints without tables."""
SNAPSHOT_BYTES = 64 * 2**20
SNAPSHOT_SEGMENTS = 4096

_log = logging.getLogger(__name__)

AnyManifest = TypeVar("AnyManifest", bound=Sealed)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """A snapshot, or nothing, and the segments that lead on from it to a state."""

    name: str | None = None
    """Name of the snapshot."""
    snapshot: SnapshotManifest | None = None
    entry: FileEntry | None = None
    """The snapshot's manifest, as a checkpoint's manifest names it."""
    segments: tuple[SegmentInfo, ...]

    @property
    def since(self) -> int:
        """The sequence number that the segments continue."""
        return 0 if self.snapshot is None else self.snapshot.sequence

    def segment_entries(self) -> tuple[FileEntry, ...]:
        """Return the segments as a checkpoint's manifest names them."""
        return tuple(info.entry(LOG) for info in self.segments)


class ModelDir:
    """A model directory. A run, a parameter server and every command hold one for the folder they work on.

    Manifests and headers of segments stay in memory and are written through, so each file is read at most once as long as it is
    the same one. Reading needs no lock. Thread-safe.

    Example:
        >>> from monolith.state import write_checkpoint
        >>> _ = write_checkpoint("memory://run-4/model.ckpt-8", state={"w": 1.0}, step=8)
        >>> model_dir = ModelDir("memory://run-4")
        >>> model_dir.manifest("model.ckpt-8").step, model_dir.state("model.ckpt-8")
        (8, {'w': 1.0})
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path).rstrip("/") or "/"
        self.folder: Folder = open_folder(self.path)
        self._log = LogReader(self.folder.path / LOG) if isinstance(self.folder, LocalFolder) else None
        self._manifests: dict[str, tuple[FileVersion, Sealed, FileEntry]] = {}
        self._others: dict[str, ModelDir] = {}
        self._folders: dict[str, Folder] = {}
        self._names = (self.path, str(self.folder))

    @classmethod
    def of(cls, model_dir: StrPath | ModelDir) -> ModelDir:
        """Return `model_dir` itself, or the one at that path."""
        return model_dir if isinstance(model_dir, ModelDir) else cls(model_dir)

    @classmethod
    def around(cls, checkpoint: StrPath) -> ModelDir:
        """Return the model_dir that a checkpoint is in."""
        return cls(parent_folder(checkpoint))

    def home_of(self, checkpoint: StrPath) -> ModelDir:
        """Return the model_dir that a checkpoint is in, which is this one unless another run or a server has written it."""
        parent = parent_folder(checkpoint)
        if parent in self._names:
            return self
        return self._others.setdefault(parent, ModelDir(parent))

    def inside(self, name: str) -> Folder:
        """Return the folder of checkpoint `name`, or of `snapshots/<name>`."""
        if name not in self._folders:
            self._folders[name] = self.folder.inside(name)
        return self._folders[name]

    def __str__(self) -> str:
        return self._names[1]

    def __repr__(self) -> str:
        return f"ModelDir({self.path!r})"

    @property
    def keeps_log(self) -> bool:
        """Whether there can be a change log, which needs a local disk."""
        return self._log is not None

    @property
    def log(self) -> LogReader:
        """The change log, which may be empty."""
        if self._log is None:
            raise InvalidArgumentError(f"{self.path}: expected a folder on a local disk, which is where a log can be")
        return self._log

    def open_log(
        self,
        tables: Tables,
        *,
        parent: int | None = None,
        take_over: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> ChangeLog:
        """Open the change log for writing. The arguments are those of `ChangeLog`."""
        log = self.log
        return ChangeLog(log.folder, tables, parent=parent, take_over=take_over, clock=clock, reader=log)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of checkpoint `name`. Raises `CorruptFileError` if it is missing, damaged or too new."""
        return self._read(name, Manifest)[0]

    def snapshot(self, name: str) -> SnapshotManifest:
        """Return the manifest of snapshot `name`. Raises `CorruptFileError` if it is missing, damaged or too new."""
        return self._read(f"{SNAPSHOTS}/{name}", SnapshotManifest)[0]

    def write(self, name: str, manifest: Sealed) -> FileEntry:
        """Complete the checkpoint, or `snapshots/<name>`, by writing its manifest. Returns the entry of the manifest file."""
        folder = self.inside(name)
        entry = write_sealed(folder, manifest)
        self._remember(name, folder.version(MANIFEST), manifest, entry)
        return entry

    def checkpoints(self) -> list[str]:
        """List the names of everything that has a manifest of its own, complete or not, sorted."""
        folder, names = self.folder, [name for name in self.folder.names() if not name.startswith(".")]
        if isinstance(folder, LocalFolder):
            return [name for name in names if (folder.path / name / MANIFEST).is_file()]
        return [name for name in names if folder.inside(name).size(MANIFEST) is not None]

    def snapshots(self) -> list[str]:
        """List the names of all snapshots, complete or not, oldest first."""
        return self.inside(SNAPSHOTS).names()

    def check(self, name: str) -> Manifest:
        """Return the manifest of checkpoint `name` if all its files exist with their sizes.

        Contents are verified when they are read. Raises `CorruptFileError` if something is missing.
        """
        manifest = self._read(name, Manifest)[0]
        check_sizes(self.inside(name), manifest.files)
        check_sizes(self.folder, manifest.segments)
        if manifest.snapshot is not None:
            folder, snapshot = self.snapshot_of(manifest)
            check_sizes(folder, snapshot.files)
        for part in self.parts(name) if manifest.parts else ():
            self.home_of(part).check(base_name(part))
        return manifest

    def snapshot_of(self, manifest: Manifest) -> tuple[Folder, SnapshotManifest]:
        """Return the folder and the manifest of the snapshot that a checkpoint begins with."""
        listed = manifest.snapshot
        assert listed is not None
        check_sizes(self.folder, (listed,))
        name = parent_folder(listed.name)
        snapshot, found = self._read(name, SnapshotManifest)
        if found.checksum != listed.checksum:
            raise CorruptFileError(f"{self.folder}/{listed.name}: its checksum is wrong; the file was altered")
        return self.inside(name), snapshot

    def parts(self, name: str) -> list[str]:
        """Return the paths of the checkpoints that servers have written for checkpoint `name`.

        Raises `CorruptFileError` if one is missing, is not the one listed, or is neither below the model_dir nor below one of the
        `restore_roots`.
        """
        manifest = self.manifest(name)
        paths = self._named_parts(name, manifest)
        for path, entry in zip(paths, manifest.parts, strict=True):
            home, listed = self.home_of(path), entry.model_copy(update={"name": MANIFEST})
            check_sizes(home.inside(base_name(path)), (listed,))
            part, found = home._read(base_name(path), Manifest)
            if found != listed:
                raise CorruptFileError(f"{path}/{MANIFEST}: its checksum is wrong; the file was altered")
            if part.parts:
                raise CorruptFileError(f"{path}: is a part of {self.path}/{name} and has parts itself")
        return paths

    def cut_parts(self, sequence: int) -> list[tuple[ModelDir, int]]:
        """Return where the ranks of a run have the rows of its segment `sequence`: their folders and their own numbers.

        Raises `CorruptFileError` if one is not the one named or is outside of the model_dir, `LogGapError` if one is missing.
        """
        info = self.log.info(sequence)
        found = []
        for path, entry in zip(self._named(info.parts, str(info.path)), info.parts, strict=True):
            number = sequence_of(base_name(entry.name))
            if number is None:
                raise CorruptFileError(f"{info.path}: names a part {entry.name!r}, which is not a segment")
            home = self.home_of(path)
            if home.log.info(number).entry(parent_folder(entry.name)) != entry:
                raise CorruptFileError(f"{path}/{base_name(entry.name)}: is not the segment that {info.path} names")
            found.append((home, number))
        return found

    def state(self, name: str, part: str = "state") -> dict[str, State]:
        """Read the state that checkpoint `name` has under the name `part`. Raises `CorruptFileError` if it was altered."""
        manifest, folder = self.manifest(name), self.inside(name)
        if part not in manifest.states:
            known = ", ".join(map(repr, manifest.states))
            raise CorruptFileError(f"{folder}: has no state {part!r}; it has {known}")
        stem = manifest.states[part]
        structure, tensors = (read_listed(folder, manifest.files, f"{stem}.{end}") for end in ("json", "safetensors"))
        state = unpack_state(structure, tensors, f"{folder}/{stem}")
        if not isinstance(state, dict):
            raise CorruptFileError(f"{folder}/{stem}.json: expected a state with names, got {type(state).__name__}")
        return state

    def part_rows(self, name: str) -> dict[str, int]:
        """Return how many rows each table has in the parts of checkpoint `name` together."""
        rows: dict[str, int] = {}
        for part in self.parts(name):
            for table, entry in self.home_of(part).manifest(base_name(part)).tables.items():
                rows[table] = rows.get(table, 0) + entry.rows
        return rows

    def lineage(self, sequence: int) -> Lineage | None:
        """Find the shortest way to the state at `sequence`, from the newest snapshot on its line or from where the log began.

        Returns:
            None if the tables had rows before the log began and no snapshot has them yet.

        Raises:
            LogGapError: A segment or snapshot on the way is missing. The message names it.
        """
        damaged: list[str] = []
        for name in reversed(self.snapshots()):
            found = self._through(name, sequence, damaged)
            if found is not None:
                return found
        try:
            segments = self.log.chain(sequence)
        except LogGapError as error:
            raise LogGapError("; ".join([str(error), *damaged])) from None
        if segments and not segments[0].complete:
            return None  # there were rows before the log began
        return Lineage(segments=tuple(segments))

    def needs_snapshot(self, log: ChangeLog, *, ratio: float = 1.0, at_least: int = SNAPSHOT_BYTES) -> bool:
        """Return whether the next checkpoint should come with a snapshot of its own.

        It should if nothing else leads there, because tables had rows before the log began or a segment was lost. It also should
        if a restore would have to replay thousands of segments, or more than `at_least` bytes and more than `ratio` times those
        of the last snapshot.
        """
        try:
            lineage = self.lineage(log.sequence)
        except LogGapError as error:
            _log.warning(
                "%s; the next checkpoint writes a snapshot of all rows, which does not need that segment", error
            )
            return True
        if lineage is None or (lineage.snapshot is None and not log.complete):
            return True
        replayed = sum(info.size for info in lineage.segments)
        snapshot = 0 if lineage.snapshot is None else lineage.snapshot.size
        return replayed > max(at_least, ratio * snapshot) or len(lineage.segments) > SNAPSHOT_SEGMENTS

    def remove(self, name: str) -> None:
        """Remove checkpoint `name`, and what servers have written for it.

        Its manifest is removed first, so a half-removed checkpoint is never taken for a whole one.
        """
        folder = self.inside(name)
        paths: list[str] = []
        if folder.size(MANIFEST) is not None:
            try:
                paths = self._named_parts(name, self.manifest(name))
            except CorruptFileError as error:
                _log.warning("the parts of %s on servers are not removed: %s", folder, error)
        folder.remove(MANIFEST)
        for path in paths:
            home = self.home_of(path)
            home.inside(base_name(path)).remove(MANIFEST)
            home.folder.remove(base_name(path))
        self.folder.remove(name)
        self._manifests.pop(name, None)
        self._folders.pop(name, None)

    def _through(self, name: str, sequence: int, damaged: list[str]) -> Lineage | None:
        """Find the way through snapshot `name`. Returns None if it is not on the way, and notes in `damaged` why."""
        place = f"{SNAPSHOTS}/{name}"
        try:
            snapshot, entry = self._read(place, SnapshotManifest)
            if not snapshot.sequence < snapshot.closed_by <= sequence:
                return None
            check_sizes(self.inside(place), snapshot.files)
            segments = self.log.chain(sequence, snapshot.sequence)
        except LogGapError:
            return None  # of another line, or behind a gap: an older one may do
        except (CorruptFileError, StorageError) as error:
            damaged.append(str(error))  # or unfinished
            return None
        # A snapshot that was closed on another line holds changes of that line.
        if snapshot.closed_by not in (info.sequence for info in segments):
            return None
        listed = entry.model_copy(update={"name": f"{place}/{MANIFEST}"})
        return Lineage(name=name, snapshot=snapshot, entry=listed, segments=tuple(segments))

    def _named_parts(self, name: str, manifest: Manifest) -> list[str]:
        """Return the checkpoints that a manifest names."""
        return self._named(manifest.parts, f"{self.path}/{name}/{MANIFEST}")

    def _named(self, parts: Iterable[FileEntry], where: str) -> list[str]:
        """Return the folders of the files named at `where`. None is opened before all of them have been checked."""
        paths = []
        for entry in parts:
            try:
                part = checked_location(parent_folder(absolute_path(entry.name, self.path)))
            except InvalidArgumentError as error:
                raise CorruptFileError(f"{where}: names a part {entry.name!r}: {error}") from None
            if is_absolute(entry.name) and not is_allowed(part, self.path):
                raise CorruptFileError(
                    f"{where}: names a part outside of {self.path}, {part!r}; if a parameter server keeps its folder "
                    f"there, allow it with {RESTORE_ROOTS}={parent_folder(part)}"
                )
            paths.append(part)
        return paths

    def _read(self, name: str, kind: type[AnyManifest]) -> tuple[AnyManifest, FileEntry]:
        folder = self.inside(name)
        version = folder.version(MANIFEST)
        known = self._manifests.get(name)
        if known is not None and known[0] == version and isinstance(known[1], kind):
            return known[1], known[2]
        manifest, entry = read_sealed(folder, kind)
        self._remember(name, version, manifest, entry)
        return manifest, entry

    def _remember(self, name: str, version: FileVersion | None, manifest: Sealed, entry: FileEntry) -> None:
        if version is not None:
            self._manifests[name] = version, manifest, entry


def is_complete(path: StrPath) -> bool:
    """Return whether there is a checkpoint at `path` with everything its manifest lists."""
    try:
        ModelDir.around(path).check(base_name(path))
    except (CorruptFileError, StorageError):
        return False
    return True


def read_state(path: StrPath, part: str = "state") -> dict[str, State]:
    """Read the state that the checkpoint at `path` has under the name `part`. Raises `CorruptFileError` if it was altered."""
    return ModelDir.around(path).state(base_name(path), part)


def remove_checkpoint(path: StrPath) -> None:
    """Remove the checkpoint at `path`, and what servers have written for it."""
    ModelDir.around(path).remove(base_name(path))


def remove_assets(path: StrPath, *, keep: Iterable[str] = ()) -> None:
    """Remove `<path>.assets/`, where the original's saver puts whole stores, except the generations in `keep`."""
    folder = open_folder(parent_folder(path))
    assets = f"{base_name(path)}.assets"
    inside, kept = folder.inside(assets), set(keep)
    for generation in inside.names():
        if generation not in kept:
            # Stores on servers are checkpoints, which have parts elsewhere in the model_dir, two folders further up.
            with reading_below(str(folder)):
                stores = ModelDir(f"{inside}/{generation}")
                for name in stores.checkpoints():
                    stores.remove(name)
            inside.remove(generation)
    if not kept:
        folder.remove(assets)
