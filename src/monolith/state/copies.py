"""Copies of rows on disk: which checkpoints, snapshots, segments and exports of a run still have the rows of some ids."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from monolith import _core
from monolith.errors import ConfigError, CorruptFileError, LogGapError, MonolithError, StorageError
from monolith.log.segment_format import segment_name
from monolith.state.index import get_monolith_checkpoint_state, read_checkpoint_state
from monolith.state.manifest import MANIFEST, Manifest, TableEntry
from monolith.state.model_dir import LOG, SERVERS, SNAPSHOTS, ModelDir
from monolith.state.paths import base_name, parent_folder
from monolith.state.storage import LocalFolder, StrPath
from monolith.state.tables import buckets_of
from monolith.table.arrays import file_name
from monolith.table.buckets import bucket_of, mask_of
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.table_file import read_rows_into

__all__ = ["CopiesOnDisk", "FileCopy", "SavedCopy", "find_copies"]

EXPORTS = "exported_models"
"""Where a run has its exports, unless its configuration says otherwise."""

_IdsByTable = Mapping[str, Sequence[int]]
_Found = dict[str, tuple[int, ...]]
_Rows = frozenset[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class SavedCopy:
    """A checkpoint of the run that would bring rows back if it were restored."""

    name: str
    ids: _Found
    """By table."""
    until: str
    """When retention removes it."""
    removable: bool
    """Whether it is an older one that may be removed, and not one that somebody has asked to keep."""


@dataclass(frozen=True, kw_only=True)
class FileCopy:
    """A file or folder that still has bytes of rows, whether or not a restore would bring them back."""

    kind: Literal["checkpoint", "snapshot", "segment", "export"]
    path: str
    ids: _Found
    """By table."""
    needed_by: tuple[str, ...]
    """Names of checkpoints that need it. Those of servers and ranks have the names of the run's."""
    until: str
    """When it is removed."""


@dataclass(frozen=True, kw_only=True)
class CopiesOnDisk:
    """What `find_copies` has found."""

    checkpoints: tuple[SavedCopy, ...] = ()
    files: tuple[FileCopy, ...] = ()
    unread: tuple[str, ...] = ()
    """What could not be read, and why. It may hold copies too."""


def find_copies(model_dir: StrPath, ids: _IdsByTable) -> CopiesOnDisk:
    """Search the model_dir of a run, the folders of its servers and ranks, and its exports for rows of `ids`.

    Nothing is changed or locked. Of table files only the blocks with these ids are decoded, of segments only the ids.

    Args:
        model_dir: Of the run, on a local disk or elsewhere.
        ids: By the name that a table has in checkpoints, as they are in the table.

    Example:
        >>> import tempfile
        >>> from monolith.state import write_checkpoint
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1, name="item"))
        >>> _ = table.reinitialize([7, 8])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_checkpoint(f"{folder}/model.ckpt-1", state={}, step=1, tables=[table])
        ...     [(copy.name, copy.ids) for copy in find_copies(folder, {"item": [7, 9]}).checkpoints]
        [('model.ckpt-1', {'item': (7,)})]
    """
    return _Search(ModelDir(model_dir), ids).result()


@dataclass
class _Home:
    """The model_dir of a run, a server or a rank, and what its files hold."""

    folder: ModelDir
    manifests: dict[str, Manifest] = field(default_factory=dict)
    files: dict[str, _Rows] = field(default_factory=dict)
    """Rows of each checkpoint's own files and of each snapshot, by its name in the folder."""
    segments: dict[str, tuple[_Rows, _Rows]] = field(default_factory=dict)
    """Rows and tombstones of each segment, by the name of its file."""
    current: frozenset[str] = frozenset()
    """What leads to the newest state: a snapshot and segments."""

    def restored(self, name: str) -> set[tuple[str, int]]:
        """Return the rows that a restore of checkpoint `name` would bring back."""
        manifest = self.manifests[name]
        begin = name if manifest.snapshot is None else parent_folder(manifest.snapshot.name)
        rows = {row for row in self.files.get(begin, ()) if row[0] in manifest.tables}
        for entry in manifest.segments:
            written, erased = self.segments.get(base_name(entry.name), (frozenset(), frozenset()))
            rows = (rows - erased) | written
        if manifest.buckets is None:
            return rows
        # A server that has given buckets away may still have files with their rows.
        owned = mask_of(manifest.buckets)
        return {(table, id_) for table, id_ in rows if owned[int(bucket_of([id_])[0])]}

    def needed_by(self, what: str) -> tuple[str, ...]:
        """Return the checkpoints that need a snapshot or segment, given by its name in the folder."""
        return tuple(
            name
            for name, manifest in self.manifests.items()
            if what in (entry.name for entry in manifest.segments)
            or (manifest.snapshot is not None and parent_folder(manifest.snapshot.name) == what)
        )


class _Search:
    def __init__(self, home: ModelDir, ids: _IdsByTable) -> None:
        self._home = home
        self._ids = {table: np.unique(np.asarray(some, dtype=np.int64)) for table, some in ids.items()}
        self._all = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *self._ids.values()]))
        self._unread: list[str] = []

    def result(self) -> CopiesOnDisk:
        run = self._read(self._home)
        others = [self._read(part) for part in self._parts(run)]
        until = _Retention(self._home, run.manifests)
        checkpoints = []
        for name in run.manifests:
            rows = run.restored(name).union(*(one.restored(name) for one in others if name in one.manifests))
            if rows:
                lasts, removable = until.of_checkpoint(name)
                checkpoints.append(SavedCopy(name=name, ids=_by_table(rows), until=lasts, removable=removable))
        files = [copy for one in (run, *others) for copy in _copies(one, until, is_run=one is run)]
        return CopiesOnDisk(
            checkpoints=tuple(checkpoints), files=(*files, *self._exports(until)), unread=tuple(self._unread)
        )

    def _parts(self, run: _Home) -> list[ModelDir]:
        """Return the folders of servers and ranks, below the model_dir and where its checkpoints say."""
        paths: dict[str, None] = {}
        if self._home.keeps_log:
            paths |= {f"{self._home}/{SERVERS}/{name}": None for name in self._home.folder.inside(SERVERS).names()}
        for name, manifest in run.manifests.items():
            if manifest.parts:
                with self._noting(f"{self._home}/{name}"):
                    paths |= dict.fromkeys(map(parent_folder, self._home.parts(name)))
        return [ModelDir(path) for path in paths]

    def _read(self, folder: ModelDir) -> _Home:
        home = _Home(folder)
        for name in folder.checkpoints():
            with self._noting(f"{folder}/{name}"):
                home.manifests[name] = manifest = folder.manifest(name)
                home.files[name] = self._of_tables(folder, name, manifest.tables)
        if not folder.keeps_log:
            return home
        for name in folder.snapshots():
            place = f"{SNAPSHOTS}/{name}"
            with self._noting(f"{folder}/{place}"):
                tables = folder.snapshot(name).tables if folder.inside(place).size(MANIFEST) is not None else None
                home.files[place] = self._of_tables(folder, place, tables)
        for sequence in folder.log.sequences():
            with self._noting(f"{folder}/{LOG}/{segment_name(sequence)}"), contextlib.suppress(LogGapError):
                home.segments[segment_name(sequence)] = self._of_segment(folder, sequence)
        with contextlib.suppress(MonolithError):  # a damaged log is reported above
            lineage = folder.lineage(folder.log.newest)
            names = set() if lineage is None else {entry.name for entry in lineage.segment_entries()}
            home.current = frozenset(names | ({f"{SNAPSHOTS}/{lineage.name}"} if lineage and lineage.name else set()))
        return home

    def _of_tables(self, folder: ModelDir, place: str, tables: Mapping[str, TableEntry] | None) -> _Rows:
        """Return the rows in the table files of a checkpoint or snapshot. One that is unfinished says nothing about them."""
        inside = folder.inside(place)
        if tables is None:
            if not isinstance(inside, LocalFolder):
                return frozenset()
            return frozenset(itertools.chain(*(self._of_file(path) for path in inside.path.rglob("*.table"))))
        rows: set[tuple[str, int]] = set()
        for table in self._ids.keys() & tables.keys():
            for file in tables[table].files:
                mine = buckets_of(file)
                wanted = [i for i in self._ids[table] if mine.start <= int(bucket_of([i])[0]) < mine.stop]
                if wanted:
                    with inside.local(file) as path:
                        rows |= {(table, id_) for id_ in _rows_in(Path(path), wanted)}
        return frozenset(rows)

    def _of_file(self, path: Path) -> Iterator[tuple[str, int]]:
        """Yield the rows of a table file that no manifest describes. It has the name of the table in it."""
        with self._noting(str(path)):
            own = _config_in(path).name
            for table in self._ids:
                if own in (table, table.partition("/")[2]):
                    yield from ((table, id_) for id_ in _rows_in(path, self._ids[table]))

    def _of_segment(self, folder: ModelDir, sequence: int) -> tuple[_Rows, _Rows]:
        written: set[tuple[str, int]] = set()
        erased: set[tuple[str, int]] = set()
        with folder.log.read(sequence) as segment:
            for piece in segment.select(self._all):
                wanted = self._ids.get(piece.table.name)
                if wanted is not None:
                    written |= {(piece.table.name, int(i)) for i in piece.ids[np.isin(piece.ids, wanted)]}
                    erased |= {(piece.table.name, int(i)) for i in piece.erased[np.isin(piece.erased, wanted)]}
        return frozenset(written), frozenset(erased)

    def _exports(self, until: _Retention) -> list[FileCopy]:
        base = Path(until.exports)
        folder = base if base.is_absolute() else Path(str(self._home)) / base
        if not isinstance(self._home.folder, LocalFolder) or not folder.is_dir():
            return []
        found = []
        for export in sorted(path for path in folder.iterdir() if path.is_dir()):
            rows = {row for path in export.rglob("*.table") for row in self._of_file(path)}
            if rows:
                found.append(
                    FileCopy(
                        kind="export",
                        path=str(export),
                        ids=_by_table(rows),
                        needed_by=(),
                        until="it is deleted by whoever exported it; a replica that follows the run has no such row",
                    )
                )
        return found

    @contextlib.contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        """Note that `path` cannot be read, unless retention has removed it meanwhile."""
        try:
            yield
        except (MonolithError, OSError) as error:
            if not isinstance(self._home.folder, LocalFolder) or Path(path).exists():
                self._unread.append(f"{path}: {error}")


class _Retention:
    """Says until when checkpoints stay, from the configuration that the newest one was written with."""

    def __init__(self, home: ModelDir, manifests: Mapping[str, Manifest]) -> None:
        newest = max(manifests.values(), key=lambda manifest: manifest.time, default=None)
        config = {} if newest is None else newest.config
        keeps = config.get("checkpoints_max_to_keep", 10)
        self._keeps = keeps if isinstance(keeps, int) else 0
        self._hours = config.get("keep_checkpoint_every_n_hours", 10000.0)
        self.exports = str(config.get("export_dir_base", EXPORTS))
        self._listed: list[str] = []
        self._exempt: set[str] = set()
        with contextlib.suppress(CorruptFileError, StorageError):
            index, exempt = read_checkpoint_state(home), get_monolith_checkpoint_state(home)
            self._listed = [] if index is None else [base_name(path) for path in index.all_model_checkpoint_paths]
            self._exempt = set() if exempt is None else set(map(base_name, exempt.exempt_model_checkpoint_paths))

    def of_checkpoint(self, name: str) -> tuple[str, bool]:
        """Return until when a checkpoint stays, and whether it may be removed before."""
        if name in self._exempt:
            return "it is removed by hand: it is exempt from retention (`monolith checkpoint keep`)", False
        if name not in self._listed:
            return "it is removed by hand: it is kept for good; use `monolith checkpoint remove`", True
        if not self._keeps:
            return "it is removed by hand: checkpoints_max_to_keep keeps all; use `monolith checkpoint remove`", True
        counted = [one for one in self._listed if one not in self._exempt]
        newer = len(counted) - 1 - counted.index(name)
        more = max(1, self._keeps - newer)
        written = f"{more} more checkpoints are written" if more > 1 else "one more checkpoint is written"
        return f"{written}, unless it is the one kept every {self._hours:g} hours", True

    def of_file(self, needed_by: Sequence[str], *, current: bool, is_run: bool) -> str:
        """Return until when a snapshot or segment stays."""
        reasons = [f"no longer needed by {', '.join(needed_by)}"] if needed_by else []
        if current:
            who = "the run" if is_run else "its server or rank"
            reasons.append(f"{who} has a newer snapshot, which is written when the log has grown")
        return ", and until ".join(reasons) or "the next checkpoint is written"


def _copies(home: _Home, until: _Retention, *, is_run: bool) -> Iterator[FileCopy]:
    for place, rows in home.files.items():
        if not rows:
            continue
        if place in home.manifests:
            lasts, _ = until.of_checkpoint(place)
            yield FileCopy(
                kind="checkpoint", path=f"{home.folder}/{place}", ids=_by_table(rows), needed_by=(place,), until=lasts
            )
        else:
            yield _shared(home, "snapshot", place, rows, until, is_run=is_run)
    for name, (rows, _) in home.segments.items():
        if rows:
            yield _shared(home, "segment", f"{LOG}/{name}", rows, until, is_run=is_run)


def _shared(
    home: _Home, kind: Literal["snapshot", "segment"], place: str, rows: _Rows, until: _Retention, *, is_run: bool
) -> FileCopy:
    needed_by = home.needed_by(place)
    return FileCopy(
        kind=kind,
        path=f"{home.folder}/{place}",
        ids=_by_table(rows),
        needed_by=needed_by,
        until=until.of_file(needed_by, current=place in home.current, is_run=is_run),
    )


def _config_in(path: Path) -> TableConfig:
    try:
        return TableConfig.from_json(_core.TableFile(file_name(path)).metadata.decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: its configuration cannot be read: {error}") from None


def _rows_in(path: Path, ids: Iterable[int]) -> list[int]:
    """Return those of `ids` that a table file has a row of."""
    wanted = [int(id_) for id_ in ids]
    table = EmbeddingTable(_config_in(path).model_copy(update={"initial_capacity": 0}))
    for bucket in sorted({int(bucket) for bucket in bucket_of(wanted)}):
        read_rows_into(table, path, range(bucket, bucket + 1))
    return [id_ for id_ in wanted if id_ in table]


def _by_table(rows: Iterable[tuple[str, int]]) -> _Found:
    found: dict[str, list[int]] = {}
    for table, id_ in sorted(rows):
        found.setdefault(table, []).append(id_)
    return {table: tuple(ids) for table, ids in found.items()}
