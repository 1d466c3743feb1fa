"""`RemoteLog`: the log of a parameter server, read from another machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

from monolith.durable import write_durably
from monolith.errors import StorageError
from monolith.log.segment import LogSegment
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import LogState, ReadLog, Segment, Segments
from monolith.transport.link import Link

__all__ = ["RemoteLog"]


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
        """Where the log is, and how many ids wait for the next commit."""
        return LogState.from_json(self._link.call(Call.LOG_STATE).text)

    def flush(self) -> int:
        """Let the server commit now; the sequence number, durable."""
        return int(json.loads(self._link.call(Call.FLUSH).text)["sequence"])

    def segments(self, since: int = 0) -> tuple[Segment, ...]:
        """The segments after number `since`, oldest first; `LogGapError` if they do not lead there any more."""
        return Segments.from_json(self._link.call(Call.READ_LOG, ReadLog(since=since).model_dump_json()).text).segments

    def copy(self, folder: str | os.PathLike[str], since: int = 0) -> int:
        """Copy the segments after `since` that are not in `folder` yet, each checked; the number of the last one."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = self.segments(since)
        for segment in found:
            path = Path(folder) / segment.name
            if not path.exists():
                self._copy(segment, path)
        return found[-1].sequence if found else since

    def _copy(self, segment: Segment, path: Path) -> None:
        data = b"".join(self._read(segment, offset) for offset in range(0, segment.size, self._piece))
        try:
            write_durably(path, data)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        LogSegment(path).check()

    def _read(self, segment: Segment, offset: int) -> bytes:
        asked = ReadLog(name=segment.name, offset=offset, size=self._piece)
        return self._link.call(Call.READ_LOG, asked.model_dump_json()).arrays[0].tobytes()
