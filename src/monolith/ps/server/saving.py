"""The calls that save and restore a server and read its log. One call starts the work, others ask for its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from monolith.errors import CorruptFileError, InvalidArgumentError, LogGapError, SaveInterruptedError, StorageError
from monolith.log import LogReader
from monolith.log.segment_format import sequence_of
from monolith.process_bound import WorkerThreads
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import (
    CommitRestore,
    LogFile,
    LogFiles,
    LogState,
    ReadLog,
    Restore,
    Save,
    SaveBegun,
    Saved,
    WaitForSave,
)
from monolith.ps.server.folder import ServerFolder
from monolith.ps.server.ledger_state import forget_progress, put_progress, read_base_step, read_ledger
from monolith.ps.server.state import ServerState, is_of_rank, source_of
from monolith.state.locks import in_use
from monolith.state.paths import base_name, is_below, reading_below, restore_roots
from monolith.state.restore import prepare_empty, prepare_tables
from monolith.state.restore_points import RestorePoint, restore_point_of
from monolith.state.storage import StrPath
from monolith.state_bytes import State
from monolith.table.buckets import NUM_BUCKETS, mask_of
from monolith.table.table_file import FileEntry
from monolith.transport.calls import Answer, Handlers, json_answer, message_of
from monolith.transport.frames import Frame

__all__ = ["LogCalls", "SaveCalls", "prepare_server", "require_settled"]


def prepare_server(state: ServerState, restore: Restore) -> Callable[[], None]:
    """Read and check what `state` needs of a checkpoint, or of a segment of a run's log. Returns a function that puts it in place
    with the gate closed.

    Rows are those of the owned buckets, from any part that has them. Dense parameters are all there are, since it is not known
    yet which of them workers will ask this server for. The positions of workers in a bucket or parameter come from the part it
    comes from. Ownership does not change.
    """
    require_settled(state)
    if restore.path is None:
        return _emptied(state)
    wanted = restore.path
    ranges = state.ranges()
    with in_use(wanted):
        point = restore_point_of(wanted)
        _, put_in_place = prepare_tables(
            point,
            state.tables.all(),
            ranges=ranges,
            aliases=restore.aliases,
            allow_new_tables=restore.allow_new_tables,
            allow_new_segments=restore.allow_new_segments,
            reset_admission=restore.reset_admission,
        )
        homes = {path: point.home.home_of(path) for path in _parts_of_servers(point)}
        parts = {path: one.state(base_name(path)) for path, one in homes.items()}
        buckets = {path: _mask(one.manifest(base_name(path)).buckets) & _mask(ranges) for path, one in homes.items()}
    dense = {path: _parameters(path, part) for path, part in parts.items()}
    put_dense = None
    if parts and not restore.clear_nn:
        put_dense = state.dense.prepare_state(*dense.values(), elsewhere=True)
    texts = {path: str(source_of(part, path).get("ledger")) for path, part in parts.items()}
    ledgers = {path: read_ledger(text, path) for path, text in texts.items()}
    said = (read_base_step(text, path) for path, text in texts.items())
    base_step = next((base for base in said if base is not None), None)
    trained = _trained_in(dense)

    def apply() -> None:
        if state.ranges() != ranges:
            raise InvalidArgumentError("restore: the server's buckets have changed since it was prepared; begin again")
        put_in_place()
        if put_dense is not None:
            put_dense()
        if parts:
            forget_progress(state.pushes)
            for path, ledger in ledgers.items():
                put_progress(state.pushes, ledger, buckets=buckets[path], names=trained[path])
        if base_step is None:
            state.pushes.count_from(point.step)
        else:
            state.pushes.base_step = base_step
        state.initialised, state.step, state.checkpoint = True, point.step, base_name(wanted)

    return apply


def _emptied(state: ServerState) -> Callable[[], None]:
    """Return a function that drops all that `state` has been trained with, for a run that starts from nothing."""
    drop_rows = prepare_empty(state.tables.all())

    def apply() -> None:
        drop_rows()
        state.dense.load_state()
        forget_progress(state.pushes)
        state.pushes.base_step = None
        state.initialised, state.step, state.checkpoint = False, 0, ""

    return apply


def _parts_of_servers(point: RestorePoint) -> list[str]:
    """Return the parts of a checkpoint that servers have written. Ranks have rows only."""
    if point.checkpoint is None:
        return []
    home = point.home.home_of(point.checkpoint)
    parts = home.parts(base_name(point.checkpoint))
    return [path for path in parts if not is_of_rank(home.home_of(path).state(base_name(path)))]


def require_settled(state: ServerState) -> None:
    """Raise while rows are in transit: after the restore one of the two servers would hold them again."""
    if state.moving():
        raise InvalidArgumentError("restore: buckets of the server are being moved; try again when the move has ended")


def _mask(ranges: Iterable[range] | Iterable[tuple[int, int]] | None) -> np.ndarray:
    """Return bool [NUM_BUCKETS]: which buckets are in `ranges`. None: all of them."""
    if ranges is None:
        return np.ones(NUM_BUCKETS, dtype=np.bool_)
    return mask_of((one.start, one.stop) if isinstance(one, range) else one for one in ranges)


def _trained_in(parts: Mapping[str, Mapping[str, State]]) -> dict[str, set[str]]:
    """Return the dense parameters that `DenseParameters.load_state` takes from each part: from the part that trained them."""
    origin: dict[str, tuple[str, bool]] = {}
    for path, parameters in parts.items():
        for name, saved in parameters.items():
            if name not in origin or not origin[name][1]:
                origin[name] = path, isinstance(saved, dict) and saved.get("declared") is True
    return {path: {name for name, (of, _) in origin.items() if of == path} for path in parts}


def _parameters(path: str, part: Mapping[str, State]) -> Mapping[str, State]:
    parameters = part.get("parameters")
    if not isinstance(parameters, dict):
        raise CorruptFileError(f"{path}: expected the state of a parameter server")
    return parameters


Result = TypeVar("Result")


@dataclass(kw_only=True)
class _Begun:
    """A save whose contents are fixed."""

    token: int
    path: str
    begun: SaveBegun
    dense: tuple[np.ndarray, ...]
    """The values of `begun.dense`."""
    written: Future[FileEntry]


class SaveCalls:
    """Save and restore in two steps each. A server remembers the last save and the last restore."""

    def __init__(
        self, state: ServerState, folder: Callable[[], ServerFolder | None], restore_roots: Sequence[StrPath] = ()
    ) -> None:
        self._state, self._folder, self._given_roots = state, folder, tuple(restore_roots)
        self._lock = threading.Lock()
        self._threads: WorkerThreads | None = None
        self._save: _Begun | None = None
        self._prepared: tuple[int, Future[Callable[[], None]]] | None = None
        self._committed: tuple[int, Future[None]] | None = None

    def calls(self) -> Handlers:
        """Return the handler of each call."""
        return {
            Call.SAVE: self._begin_save,
            Call.SAVED: self._saved,
            Call.RESTORE: self._restore,
            Call.COMMIT_RESTORE: self._commit_restore,
        }

    def close(self) -> None:
        """Wait for a running restore."""
        if self._threads is not None:
            self._threads.shutdown()

    def _begin_save(self, frame: Frame) -> Answer:
        save = message_of(Save, frame)
        with self._lock:
            if self._save is None or self._save.token != save.token:
                self._save = self._begun(save)
            return Answer(text=self._save.begun.model_dump_json(), arrays=self._save.dense)

    def _begun(self, save: Save) -> _Begun:
        folder = self._folder()
        if folder is None:
            raise InvalidArgumentError("save: the server has no folder; start it with --folder")
        path = str(folder.folder.absolute() / save.name)
        begun, dense, written = folder.begin_save(save.name, step=save.step)
        return _Begun(token=save.token, path=path, begun=begun, dense=dense, written=written)

    def _saved(self, frame: Frame) -> Answer:
        asked = message_of(WaitForSave, frame)
        save = self._save
        if save is None or save.token != asked.token:
            raise SaveInterruptedError(
                f"save: {asked.token} is not the last one; the server was started again, or another client saves; save again"
            )
        # The client has the values already.
        save.dense = ()
        if not wait([save.written], asked.wait).done:
            return _NOT_YET
        return Answer(text=Saved(done=True, folder=save.path, manifest=save.written.result()).model_dump_json())

    def _restore(self, frame: Frame) -> Answer:
        restore = message_of(Restore, frame)
        with self._lock:
            if self._prepared is None or self._prepared[0] != restore.token:
                self._prepared = restore.token, self._pool().submit(self._prepare, restore)
            prepared = self._prepared[1]
        return _outcome(prepared, restore.wait)

    def _prepare(self, restore: Restore) -> Callable[[], None]:
        folder = self._folder()
        roots = (*self._given_roots, *restore_roots(), *(() if folder is None else (folder.model_dir,)))
        if restore.path is not None and not is_below(restore.path, roots):
            raise InvalidArgumentError(
                f"restore: {restore.path!r} is not below {', '.join(map(str, roots)) or 'any folder of the server'}, and a "
                "client may not make the server read elsewhere; start it with --restore-root"
            )
        with reading_below(*roots):
            return prepare_server(self._state, restore)

    def _commit_restore(self, frame: Frame) -> Answer:
        commit = message_of(CommitRestore, frame)
        with self._lock:
            if self._committed is None or self._committed[0] != commit.token:
                if self._prepared is None or self._prepared[0] != commit.token or not self._prepared[1].done():
                    raise InvalidArgumentError(f"restore: {commit.token} was not prepared here; begin again")
                apply = self._prepared[1].result()
                self._prepared, self._committed = None, (commit.token, self._pool().submit(self._put_in_place, apply))
            committed = self._committed[1]
        return _outcome(committed, commit.wait)

    def _put_in_place(self, apply: Callable[[], None]) -> None:
        require_settled(self._state)
        folder = self._folder()
        if folder is None:
            with self._state.gate.closed(changes=True):
                apply()
            return
        with folder.replacing(), self._state.gate.closed(changes=True):
            apply()

    def _pool(self) -> WorkerThreads:
        if self._threads is None:
            self._threads = WorkerThreads(1, thread_name_prefix="monolith-ps-restore")
        return self._threads


def _outcome(future: Future[Result], seconds: float) -> Answer:
    if not wait([future], seconds).done:
        return _NOT_YET
    future.result()
    return Answer(text=Saved(done=True).model_dump_json())


_NOT_YET = Answer(text=Saved(done=False).model_dump_json())


class LogCalls:
    """The calls on the log. Only servers with a folder have one."""

    def __init__(self, folder: Callable[[], ServerFolder | None]) -> None:
        self._maybe = folder

    def calls(self) -> Handlers:
        """Return the handler of each call."""
        return {Call.LOG_STATE: self._log_state, Call.FLUSH: self._flush, Call.READ_LOG: self._read_log}

    def _folder(self) -> ServerFolder:
        folder = self._maybe()
        if folder is None:
            raise InvalidArgumentError("log: the server has no folder; start it with --folder")
        return folder

    def _log_state(self, frame: Frame) -> Answer:
        folder = self._folder()
        state = LogState(sequence=folder.sequence, folder=str(folder.folder.absolute()), changed=folder.changed)
        return Answer(text=state.model_dump_json())

    def _flush(self, frame: Frame) -> Answer:
        return json_answer(sequence=self._folder().commit())

    def _read_log(self, frame: Frame) -> Answer:
        asked, reader = message_of(ReadLog, frame), LogReader(self._folder().log_folder)
        if asked.name is not None:
            return Answer(arrays=(_bytes(reader, asked),))
        newest = self._folder().sequence
        infos = reader.chain(newest, asked.since) if newest > asked.since else []
        found = (LogFile(name=info.name, sequence=info.sequence, size=info.size) for info in infos)
        return Answer(text=LogFiles(segments=tuple(found)).model_dump_json())


def _bytes(reader: LogReader, asked: ReadLog) -> np.ndarray:
    name = str(asked.name)
    # The name becomes a path, so only names of segments are allowed.
    if sequence_of(name) is None:
        raise InvalidArgumentError(f"name: expected that of a segment, got {name!r}")
    path = reader.folder / name
    try:
        with path.open("rb") as file:
            file.seek(asked.offset)
            return np.frombuffer(file.read(asked.size), dtype=np.uint8)
    except FileNotFoundError:
        raise LogGapError(f"{name}: was removed; start from a snapshot or checkpoint") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
