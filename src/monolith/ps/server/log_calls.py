"""Handlers about the log of a server: where it is, commit now, and its segments for readers on other machines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from monolith.errors import InvalidArgumentError, LogGapError, StorageError
from monolith.log import LogReader
from monolith.log.segment_format import sequence_of
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.saving_messages import LogState, ReadLog, Segment, Segments
from monolith.ps.server.folder import ServerFolder
from monolith.transport.calls import Answer, Handlers, json_answer, message_of
from monolith.transport.frames import Frame

__all__ = ["LogCalls"]


class LogCalls:
    """Only servers with a folder have a log."""

    def __init__(self, folder: Callable[[], ServerFolder | None]) -> None:
        self._maybe = folder

    def calls(self) -> Handlers:
        """What is called for which number."""
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
        found = (Segment(name=info.name, sequence=info.sequence, size=info.size) for info in infos)
        return Answer(text=Segments(segments=tuple(found)).model_dump_json())


def _bytes(reader: LogReader, asked: ReadLog) -> np.ndarray:
    name = str(asked.name)
    # The name becomes a path: nothing but a segment's name may.
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
