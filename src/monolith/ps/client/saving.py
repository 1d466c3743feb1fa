"""Checkpoints and logs of parameter servers through a client. The servers read and write, the client coordinates."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from monolith.config import Config
from monolith.durable import write_durably
from monolith.errors import InvalidArgumentError, MonolithError, SaveInterruptedError, StorageError
from monolith.log.segment import LogSegment
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
from monolith.state.locks import in_use
from monolith.state.paths import RESTORE_ROOTS, base_name, is_absolute, is_allowed, parent_folder, relative_name
from monolith.state.save import begin_checkpoint
from monolith.state.storage import StrPath
from monolith.table.buckets import mask_of
from monolith.table.store import RestoreChoices, StoreSave
from monolith.table.table_file import FileEntry
from monolith.transport.link import Link, finish_all

__all__ = ["RemoteLog", "ServerShard", "begin_server_saves", "prepare_servers", "save_servers", "server_shards"]

SAVE_ATTEMPTS = 20
"""How often a save is begun until no bucket is in transit between two servers."""


def begin_server_saves(links: Sequence[Link], path: StrPath, *, step: int, name: str | None = None) -> StoreSave:
    """Let every server take a checkpoint, named as the one at `path`. When this returns, the servers accept changes again."""
    model_dir = _absolute(parent_folder(path))
    for attempt in range(SAVE_ATTEMPTS):
        save = Save(name=name or base_name(path), step=step, token=secrets.randbits(63))
        frames = finish_all([link.begin(Call.SAVE, save.model_dump_json()) for link in links])
        begun = [SaveBegun.from_json(frame.text) for frame in frames]
        dense = {n: a for one, f in zip(begun, frames, strict=True) for n, a in zip(one.dense, f.arrays, strict=True)}
        finish = partial(_finish_saves, links, model_dir, save.token)
        if _is_whole(begun):
            return StoreSave(dense=dense, finish=finish)
        finish()
        time.sleep(0.05 * 2 ** min(attempt, 5))
    raise StorageError(f"{path}: buckets were in transit between servers in {SAVE_ATTEMPTS} attempts; save again later")


def _finish_saves(links: Sequence[Link], model_dir: str, token: int) -> tuple[FileEntry, ...]:
    """Wait until all servers have written their parts. Returns their manifests, named as seen from `model_dir`.

    Raises:
        StorageError: a server failed, the save may be tried again.
        SaveInterruptedError: the save was begun by a server process that has ended.
    """
    try:
        saved = _until_done(links, Call.SAVED, WaitForSave(token=token, wait=1.0))
    except SaveInterruptedError:
        raise
    except MonolithError as error:
        raise StorageError(f"the servers could not save: {error}") from error
    return tuple(_entry(one, model_dir) for one in saved)


def _entry(saved: Saved, model_dir: str) -> FileEntry:
    assert saved.manifest is not None
    path = f"{saved.folder}/{saved.manifest.name}"
    if not is_allowed(saved.folder, model_dir):
        raise InvalidArgumentError(
            f"save: a server keeps its folder outside of the model_dir {model_dir!r}, in {saved.folder!r}, where "
            f"readers of the checkpoint would not look; start it with a folder below, or set {RESTORE_ROOTS} for all who read"
        )
    return saved.manifest.model_copy(update={"name": relative_name(path, model_dir)})


def save_servers(links: Sequence[Link], path: StrPath, *, step: int = 0) -> None:
    """Write a checkpoint of what the servers hold. It is complete and durable when this returns."""
    # Names in the folders of servers must be unique, whatever folders the checkpoints are in.
    saves = begin_server_saves(links, path, step=step, name=f"{base_name(path)}.{secrets.token_hex(4)}")
    begin_checkpoint(path, state={}, step=step, servers=saves.finish).finish()


def prepare_servers(
    links: Sequence[Link],
    path: StrPath | None,
    *,
    only_fresh: bool = False,
    rows_only: bool = False,
    **choices: Unpack[RestoreChoices],
) -> Callable[[], None]:
    """Let the servers read their parts of a checkpoint. Returns a function that lets all of them put these in place.

    Their number need not be that of the save. Without a `path` they will hold nothing, as when they were new. With `only_fresh`,
    initialised servers keep their state, even if it is newer than the checkpoint. With `rows_only`, dense parameters stay as they
    are.
    """
    wanted = [shard.link for shard in server_shards(links) if not (only_fresh and shard.is_initialised())]
    token = secrets.randbits(63)
    restore = Restore(
        path=None if path is None else _absolute(path),
        token=token,
        wait=1.0,
        aliases=dict(choices.get("aliases") or {}),
        allow_new_tables=choices.get("allow_new_tables", False),
        allow_new_segments=choices.get("allow_new_segments", False),
        reset_admission=choices.get("reset_admission", False),
        clear_nn=rows_only,
    )
    with nullcontext() if path is None else in_use(path):
        _until_done(wanted, Call.RESTORE, restore)

    def put_in_place() -> None:
        _until_done(wanted, Call.COMMIT_RESTORE, CommitRestore(token=token, wait=1.0))

    return put_in_place


@dataclass(frozen=True, kw_only=True)
class ServerShard:
    """One server, for `PsMonitor`."""

    link: Link

    def is_initialised(self) -> bool:
        """Whether it holds trained or restored state."""
        return json.loads(self.link.call(Call.IS_INITIALISED).text)["initialised"] is True

    def mark_initialised(self) -> None:
        """Mark its state as initialised."""
        self.link.call(Call.MARK_INITIALISED)


def server_shards(links: Sequence[Link]) -> list[ServerShard]:
    """Return each server as a shard."""
    return [ServerShard(link=link) for link in links]


def _is_whole(begun: Sequence[SaveBegun]) -> bool:
    """Whether every bucket was owned by exactly one server at its cut. Servers that were never given buckets do not count."""
    told = [one.ranges for one in begun if one.ranges is not None]
    buckets = not told or bool((np.sum([mask_of(ranges) for ranges in told], axis=0) == 1).all())
    return buckets and _has_all_dense(begun)


def _has_all_dense(begun: Sequence[SaveBegun]) -> bool:
    """Whether no dense parameter was in two cuts, nor in none because it moved between them."""
    trained = [name for one in begun for name in one.dense]
    kept = {*trained, *(name for one in begun for name in one.moving_dense)}
    return len(set(trained)) == len(trained) and all(name in kept for one in begun for name in one.gave_dense)


def _until_done(links: Sequence[Link], call: Call, message: Config) -> list[Saved]:
    """Call until all servers have finished. Each call is short, however long the work takes."""
    done: dict[int, Saved] = {}
    while waiting := [number for number in range(len(links)) if number not in done]:
        frames = finish_all([links[number].begin(call, message.model_dump_json()) for number in waiting])
        answers = zip(waiting, (Saved.from_json(frame.text) for frame in frames), strict=True)
        done |= {number: saved for number, saved in answers if saved.done}
    return [done[number] for number in range(len(links))]


def _absolute(path: StrPath) -> str:
    text = os.fspath(path)
    return text if is_absolute(text) else str(Path(text).absolute())


class RemoteLog:
    """Copies segments of a server's log into a folder, where a `LogReader` reads them.

    Example:
        >>> import tempfile
        >>> from monolith.log import LogReader
        >>> from monolith.ps import ParameterServer, ServerStore, ServerConfig
        >>> from monolith.testing import sgd_table_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = ServerConfig(folder=Path(folder), log_flush_secs=None)  # only when asked to
        ...     table = sgd_table_config(1, name="item")
        ...     with ParameterServer(config) as server, ServerStore([server.address], [table]) as store:
        ...         _ = store.reinitialize("item", [3, 4])
        ...         log = RemoteLog(store.links[0])
        ...         _ = log.flush()
        ...         _ = log.copy(f"{folder}/copy")
        ...     [info.rows for info in LogReader(f"{folder}/copy").segments()]
        [2]
    """

    def __init__(self, link: Link, *, piece: int = 2**22) -> None:
        self._link, self._piece = link, piece

    def state(self) -> LogState:
        """Return the sequence number and folder of the log, and how many ids wait for the next commit."""
        return LogState.from_json(self._link.call(Call.LOG_STATE).text)

    def flush(self) -> int:
        """Let the server commit now. Returns the durable sequence number."""
        return int(json.loads(self._link.call(Call.FLUSH).text)["sequence"])

    def segments(self, since: int = 0) -> tuple[LogFile, ...]:
        """Return the segments after number `since`, oldest first. Raises `LogGapError` if they do not connect to it."""
        return LogFiles.from_json(self._link.call(Call.READ_LOG, ReadLog(since=since).model_dump_json()).text).segments

    def copy(self, folder: str | os.PathLike[str], since: int = 0) -> int:
        """Copy the segments after `since` that are not in `folder` yet and check them. Returns the number of the last one."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = self.segments(since)
        for segment in found:
            path = Path(folder) / segment.name
            if not path.exists():
                self._copy(segment, path)
        return found[-1].sequence if found else since

    def _copy(self, segment: LogFile, path: Path) -> None:
        data = b"".join(self._read(segment, offset) for offset in range(0, segment.size, self._piece))
        try:
            write_durably(path, data)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        LogSegment(path).check()

    def _read(self, segment: LogFile, offset: int) -> bytes:
        asked = ReadLog(name=segment.name, offset=offset, size=self._piece)
        return self._link.call(Call.READ_LOG, asked.model_dump_json()).arrays[0].tobytes()
