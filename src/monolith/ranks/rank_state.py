"""What all ranks save and restore together: parts of checkpoints, cuts of their logs, and rows of any earlier world size."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from pydantic import JsonValue

from monolith import errors
from monolith.config import Config, Count
from monolith.errors import InvalidArgumentError, MonolithError, StorageError
from monolith.process_bound import WorkerThreads
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Channel, Kind
from monolith.ranks.rank_folder import RankFolder, rank_source
from monolith.state.manifest import MANIFEST
from monolith.state.model_dir import SERVERS
from monolith.state.paths import base_name, is_absolute, parent_folder
from monolith.state.restore import prepare_tables
from monolith.state.restore_points import RestorePoint, restore_point_of
from monolith.state.save import begin_checkpoint
from monolith.state.tables import owned_ranges
from monolith.table.buckets import bucket_ranges
from monolith.table.store import LocalStore, RestoreChoices, StoreSave
from monolith.table.table_file import FileEntry

__all__ = ["RankState"]

_logger = logging.getLogger(__name__)

_POLL_SECS = 0.25
"""How long a rank works without saying so. Less than any deadline of an exchange."""


class _SaveRows(Config):
    path: str
    step: Count


class _RestoreRows(Config):
    path: str
    aliases: dict[str, str] = {}
    only: tuple[str, ...] | None = None
    allow_new_tables: bool = False
    allow_new_segments: bool = False
    reset_admission: bool = False

    def choices(self) -> RestoreChoices:
        return {
            "aliases": self.aliases,
            "only": self.only,
            "allow_new_tables": self.allow_new_tables,
            "allow_new_segments": self.allow_new_segments,
            "reset_admission": self.reset_admission,
        }


class RankState:
    """Saves and restores the rows of all ranks at one step, in the folder of each.

    The chief calls the public methods between two steps, the other ranks follow through their `Agreement`. Reading and writing
    may take longer than the deadline of an exchange, so ranks exchange whether they are done until all are.

    Args:
        agreement: of all ranks.
        local: the rows of this rank.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable
        >>> from monolith.testing import sgd_table_config
        >>> from monolith.testing.rank_threads import run_ranks
        >>> def rank(mesh):
        ...     agreement = Agreement(mesh)
        ...     state = RankState(agreement, LocalStore([EmbeddingTable(sgd_table_config(1))]))
        ...     if mesh.rank:
        ...         agreement.serve("end")
        ...     else:
        ...         state.open_log(model_dir)
        ...         parts = state.begin_save(f"{model_dir}/model.ckpt-5", step=5).finish()
        ...         agreement.release("end")
        ...     state.close()
        ...     return None if mesh.rank else [part.name for part in parts]
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     run_ranks(2, rank)[0]
        ['ps/0/model.ckpt-5/manifest.json', 'ps/1/model.ckpt-5/manifest.json']
    """

    def __init__(self, agreement: Agreement, local: LocalStore) -> None:
        self._agreement, self._mesh, self._local = agreement, agreement.mesh, local
        self._owned = bucket_ranges(self._mesh.size)[self._mesh.rank]
        self._folder: RankFolder | None = None
        self._origin: tuple[str, int] | None = None
        """The folder of a rank, and the number in its log, whose rows these are. None if they come from elsewhere."""
        self._prepared: tuple[Callable[[], None], tuple[str, int] | None] | None = None
        self._written: Future[list[JsonValue]] | None = None
        self._work = WorkerThreads(1, thread_name_prefix="monolith-rank-state")
        # Exchanges on their own channel, in the order in which the ranks have begun what they write.
        self._reports = WorkerThreads(1, thread_name_prefix="monolith-rank-saves")
        agreement.actions |= {
            "open_log": self._open_log,
            "save": self._save,
            "cut": self._cut,
            "prepare_restore": self._prepare_restore,
            "put_in_place": self._put_in_place,
            "write_rows": self._write_rows,
        }

    def open_log(self, model_dir: str) -> None:
        """Let every rank log its rows below `model_dir` from now on."""
        self._agreement.run("open_log", _absolute(model_dir))

    def begin_save(self, path: str, *, step: int) -> StoreSave:
        """Let every rank take its rows as they are now into its part of the checkpoint `path`."""
        self._agreement.run("save", _SaveRows(path=_absolute(path), step=step).model_dump())
        return self._store_save()

    def begin_cut(self, *, step: int) -> StoreSave | None:
        """Let every rank commit its rows to its log as they are now. None if one of them still writes something else."""
        if self._written is not None and not self._written.done():
            return None
        begun = self._agreement.run("cut", step)
        return self._store_save() if all(begun) else None

    def begin_restore(self, path: str, **choices: Unpack[RestoreChoices]) -> Callable[[], None]:
        """Let every rank read its rows from a restore point. Returns a function that puts them in place on all ranks."""
        wanted = _RestoreRows.model_validate({**choices, "path": _absolute(path)})
        self._agreement.run("prepare_restore", wanted.model_dump(mode="json"))

        def put_in_place() -> None:
            self._agreement.run("put_in_place")

        return put_in_place

    def save(self, path: str) -> None:
        """Write all rows of all ranks now, into a checkpoint at `path` whose parts are next to it."""
        path = _absolute(path)
        # Names in the folders of ranks must be unique, whatever folders the checkpoints are in.
        part = f"{path}.{secrets.token_hex(4)}"
        answers = self._agreement.run("write_rows", part)
        parts = tuple(FileEntry.model_validate(answer) for answer in answers)
        begin_checkpoint(path, state={}, step=0, servers=lambda: parts).finish()

    def close(self) -> None:
        """Wait for what this rank writes, and release its folder."""
        self._reports.shutdown()
        self._work.shutdown()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _store_save(self) -> StoreSave:
        written = self._written
        assert written is not None
        return StoreSave(finish=lambda: tuple(FileEntry.model_validate(one) for one in written.result()))

    def _open_log(self, model_dir: JsonValue) -> None:
        folder = self._folder
        if folder is not None and folder.model_dir == model_dir:
            return
        if folder is not None:
            folder.close()
            self._folder = None
        self._folder = RankFolder(
            str(model_dir),
            self._local.tables,
            rank=self._mesh.rank,
            ranks=self._mesh.size,
            parent=self._parent_in(f"{model_dir}/{SERVERS}/{self._mesh.rank}"),
        )

    def _save(self, argument: JsonValue) -> None:
        wanted = _SaveRows.model_validate(argument)

        def begin() -> Future[FileEntry]:
            self._open_log(parent_folder(wanted.path))
            assert self._folder is not None
            return self._folder.begin_save(base_name(wanted.path), step=wanted.step)

        begun = self._work.submit(begin)
        # All ranks have taken their rows before any of them trains on.
        self._until_all_done(_to_json(begun, lambda _: None), Channel.MAIN, self._agreement.step)
        self._report(begun.result(), wanted.step)

    def _cut(self, argument: JsonValue) -> bool:
        step, folder = int(str(argument)), self._folder
        ready = folder is not None and folder.ready()
        answers = self._mesh.exchange(
            Kind.STATE, [[np.array([ready], dtype=np.uint8)]] * self._mesh.size, step=self._agreement.step
        )
        if folder is None or not all(bool(arrays[0][0]) for arrays in answers):
            return False
        try:
            begun = folder.begin_cut(step=step)
        except MonolithError as error:
            begun = Future()
            begun.set_exception(error)
        self._report(begun, step)
        return True

    def _report(self, written: Future[FileEntry], step: int) -> None:
        entry = _to_json(written, lambda one: one.model_dump(mode="json"))
        self._written = self._reports.submit(self._until_all_done, entry, Channel.SAVES, step)

    def _prepare_restore(self, argument: JsonValue) -> None:
        self._prepared = None
        reading = self._work.submit(self._read, _RestoreRows.model_validate(argument))
        self._until_all_done(_to_json(reading, lambda _: None), Channel.MAIN, self._agreement.step)
        self._prepared = reading.result()

    def _read(self, wanted: _RestoreRows) -> tuple[Callable[[], None], tuple[str, int] | None]:
        point = restore_point_of(wanted.path)
        report, put_in_place = prepare_tables(point, self._local.tables, ranges=[self._owned], **wanted.choices())
        for note in report.notes:
            _logger.warning("%s: rank %d: %s", report.source, self._mesh.rank, note)
        return put_in_place, _origin_of(point, self._mesh.rank, self._owned) if report.same_tables else None

    def _put_in_place(self, _: JsonValue) -> None:
        if self._prepared is None:
            raise InvalidArgumentError(f"restore: nothing was prepared on rank {self._mesh.rank}; begin again")
        (put_in_place, self._origin), self._prepared = self._prepared, None
        put_in_place()
        if self._origin is not None:
            # The log that is continued must have what changes before it is opened.
            for table in self._local.tables.values():
                table.track_changes()
        self._local.mark_initialised()
        if self._folder is not None:
            self._folder.reopen(parent=self._parent_in(self._folder.path))

    def _parent_in(self, folder: str) -> int:
        """Return the number in the log of `folder` that the rows come from, or 0."""
        origin = self._origin
        return origin[1] if origin is not None and Path(origin[0]).absolute() == Path(folder).absolute() else 0

    def _write_rows(self, argument: JsonValue) -> JsonValue:
        path = str(argument)
        inside = f"{SERVERS}/{self._mesh.rank}/{base_name(path)}"

        def write() -> FileEntry:
            pending = begin_checkpoint(
                f"{parent_folder(path)}/{inside}",
                state={"source": rank_source(self._mesh.rank, self._mesh.size)},
                step=0,
                tables=self._local.tables,
                buckets=[(self._owned.start, self._owned.stop)],
            )
            pending.finish()
            assert pending.entry is not None
            return pending.entry.model_copy(update={"name": f"{inside}/{MANIFEST}"})

        entry = _to_json(self._work.submit(write), lambda one: one.model_dump(mode="json"))
        return self._until_all_done(entry, Channel.MAIN, self._agreement.step)[self._mesh.rank]

    def _until_all_done(self, own: Future[JsonValue], channel: Channel, step: int) -> list[JsonValue]:
        """Wait until all ranks are done. Returns what each has done. Raises the error of the first that failed, naming it."""
        while True:
            wait([own], _POLL_SECS)
            out = [[np.frombuffer(json.dumps(_outcome(own)).encode(), dtype=np.uint8)]] * self._mesh.size
            said = self._mesh.exchange(Kind.STATE, out, step=step, channel=channel)
            outcomes = [json.loads(arrays[0].tobytes()) for arrays in said]
            if all(outcome is not None for outcome in outcomes):
                break
        for rank, outcome in enumerate(outcomes):
            if "error" in outcome:
                kind = getattr(errors, outcome["error"], MonolithError)
                raise kind(f"rank {rank}: {outcome['text']}")
        return [outcome["answer"] for outcome in outcomes]


def _outcome(own: Future[JsonValue]) -> JsonValue:
    """Describe the result of `own` to other ranks. None while it runs."""
    if not own.done():
        return None
    error = own.exception()
    if error is None:
        return {"answer": own.result()}
    kind = StorageError if isinstance(error, OSError) else MonolithError
    return {"error": type(error if isinstance(error, MonolithError) else kind()).__name__, "text": str(error)}


def _to_json(future: Future[Any], convert: Callable[[Any], JsonValue]) -> Future[JsonValue]:
    """Return a future with the converted result of `future`."""
    converted: Future[JsonValue] = Future()

    def done(_: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            converted.set_exception(error)
        else:
            converted.set_result(convert(future.result()))

    future.add_done_callback(done)
    return converted


def _origin_of(point: RestorePoint, rank: int, owned: range) -> tuple[str, int] | None:
    """Return the folder of `rank` and the number in its log that its rows come from, if it wrote exactly these buckets."""
    home = point.home
    parts: list[tuple[str, int, tuple[range, ...]]] = []
    if point.checkpoint is not None:
        home = home.home_of(point.checkpoint)
        for path in home.parts(base_name(point.checkpoint)):
            part = home.home_of(path)
            manifest = part.manifest(base_name(path))
            parts.append((part.path, manifest.sequence, tuple(range(*pair) for pair in manifest.buckets or ())))
    elif point.parts:
        for part, sequence in home.cut_parts(point.sequence):
            with part.log.read(sequence) as segment:
                parts.append((part.path, sequence, owned_ranges(segment.source(), str(segment.path))))
    mine = [(path, number) for path, number, ranges in parts if base_name(path) == str(rank) and ranges == (owned,)]
    return mine[0] if mine else None


def _absolute(path: str) -> str:
    return path if is_absolute(path) else str(Path(path).absolute())
