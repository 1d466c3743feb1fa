"""Calls that save a server and give it back what was saved: begun by one call, asked after by others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from monolith.errors import InvalidArgumentError, SaveInterruptedError
from monolith.process_bound import WorkerThreads
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.saving_messages import CommitRestore, Restore, Save, SaveBegun, Saved, WaitForSave
from monolith.ps.server.folder import ServerFolder
from monolith.ps.server.restore_job import prepare_server, require_settled
from monolith.ps.server.state import ServerState
from monolith.state.roots import is_below, reading_below, restore_roots
from monolith.state.storage import StrPath
from monolith.table.table_file import FileEntry
from monolith.transport.calls import Answer, Handlers, message_of
from monolith.transport.frames import Frame

__all__ = ["SaveCalls"]

Result = TypeVar("Result")


@dataclass(kw_only=True)
class _Begun:
    """A save, from the moment that its content is decided."""

    token: int
    path: str
    begun: SaveBegun
    dense: tuple[np.ndarray, ...]
    """The values of `begun.dense`."""
    written: Future[FileEntry]


class SaveCalls:
    """Save, ask after it, restore in two steps. A server remembers the last of each kind."""

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
        """What is called for which number."""
        return {
            Call.SAVE: self._begin_save,
            Call.SAVED: self._saved,
            Call.RESTORE: self._restore,
            Call.COMMIT_RESTORE: self._commit_restore,
        }

    def close(self) -> None:
        """Wait for what is being restored."""
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
                f"save: {asked.token} is not the last one; the server was started again, or somebody else saves; save again"
            )
        # Whoever asks this has the values.
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
        if not is_below(restore.path, roots):
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
