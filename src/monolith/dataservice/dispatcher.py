"""`DataDispatcher`: assigns the splits of datasets to trainers, and knows which data workers are alive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from monolith.config import Positive
from monolith.data.sources.files import expand_pattern
from monolith.dataservice import protocol
from monolith.dataservice.dataset import DatasetConfig, require_below, require_roots
from monolith.dataservice.jobs import Jobs
from monolith.dataservice.journal import JobEvent, Journal
from monolith.dataservice.protocol import DataCall, Nothing
from monolith.errors import StorageError
from monolith.transport.calls import Answer, BasicCall, FrameCalls, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.server import FrameServer, ListenConfig, require_safe

__all__ = ["DataDispatcher", "DispatcherCalls", "DispatcherConfig", "WorkerPool"]

MAX_DATA_WORKERS = 65536


@dataclass
class _Worker:
    heard: float
    """Time of its last heartbeat."""
    streams: int
    """Splits that it reads, as of its last heartbeat, and those assigned since."""


class WorkerPool:
    """Data workers, each alive for `lease_secs` after a heartbeat. Safe from many threads.

    Example:
        >>> pool = WorkerPool(lease_secs=5, clock=lambda: 0.0)
        >>> pool.heartbeat("a:1", streams=3), pool.heartbeat("b:1", streams=2)
        (None, None)
        >>> [pool.choose() for _ in range(3)]
        ['b:1', 'a:1', 'b:1']
    """

    def __init__(self, *, lease_secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_secs = lease_secs
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()

    def heartbeat(self, address: str, *, streams: int) -> None:
        """Record that the data worker at `address` is alive."""
        with self._lock:
            self._remove_expired()
            if address in self._workers or len(self._workers) < MAX_DATA_WORKERS:
                self._workers[address] = _Worker(heard=self._clock(), streams=streams)

    def choose(self, avoid: Collection[str] = ()) -> str | None:
        """Return the least loaded data worker, outside `avoid` if possible. None if none is alive."""
        with self._lock:
            self._remove_expired()
            if not self._workers:
                return None
            chosen = min(self._workers, key=lambda address: (address in avoid, self._workers[address].streams, address))
            self._workers[chosen].streams += 1
            return chosen

    def alive(self) -> list[str]:
        """Return their addresses, sorted."""
        with self._lock:
            self._remove_expired()
            return sorted(self._workers)

    def _remove_expired(self) -> None:
        since = self._clock() - self.lease_secs
        self._workers = {address: worker for address, worker in self._workers.items() if worker.heard >= since}


_log = logging.getLogger(__name__)


class DispatcherConfig(ListenConfig):
    """How a dispatcher listens, and where it records which splits it has assigned.

    Example:
        >>> DispatcherConfig(folder=Path("runs/clicks/data")).lease_secs
        5.0
    """

    folder: Path | None = None
    """Folder of its journal, from which a restarted dispatcher resumes. None: assignments are lost with the process."""
    take_over: bool = False
    """Take `folder` from a process that still holds it, such as one that hangs. That process is fenced."""
    lease_secs: Positive = 5.0
    """Seconds without a heartbeat after which a data worker counts as dead. Heartbeats are five times as frequent."""
    max_message_bytes: int = 2**22
    """Larger requests are refused."""
    roots: tuple[str, ...] = ()
    """Folders or URL prefixes that contain the files of datasets. "*": any file that this process may list. Without roots, a
    dispatcher on loopback accepts any file, and one that other machines can reach does not start."""


class DispatcherCalls(FrameCalls):
    """Answers the calls of a dispatcher, without the network."""

    def __init__(self, config: DispatcherConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_frame_bytes=config.max_message_bytes)
        self._journal = None if config.folder is None else Journal(config.folder, take_over=config.take_over)
        self._roots = config.roots
        self.jobs = Jobs(record=self._record, happened=self._shorten)
        """Jobs and their assignments."""
        self._workers = WorkerPool(lease_secs=config.lease_secs, clock=clock)
        self._handlers |= {
            BasicCall.HEALTH: self._health,
            DataCall.REGISTER_DATASET: self._register,
            DataCall.JOIN_JOB: self._join,
            DataCall.LEAVE_JOB: self._leave,
            DataCall.NEXT_SPLIT: self._next_split,
            DataCall.DESCRIBE_SPLIT: self._describe,
            DataCall.FIND_WORKER: self._find_worker,
            DataCall.HEARTBEAT: self._heartbeat,
        }
        if self._journal is not None:
            for event in self._journal.read():
                self.jobs.apply(event)

    def register(self, request: protocol.RegisterDataset) -> None:
        """Create a job whose files are below the roots, unless it exists with the same dataset."""
        for path in request.dataset.paths:
            for pattern in expand_pattern(path):
                require_below(pattern, self._roots)
        self.jobs.register(request)

    def close(self) -> None:
        """Release the journal."""
        if self._journal is not None:
            self._journal.close()

    def _record(self, event: JobEvent) -> None:
        if self._journal is not None:
            self._journal.append(event)

    def _shorten(self) -> None:
        if self._journal is None or not self._journal.is_long:
            return
        try:
            self._journal.rewrite(self.jobs.states())
        except StorageError as error:
            _log.warning("cannot compact the journal, which keeps growing: %s", error)
            self._journal.put_off()

    def _require_mine(self, frame: Frame) -> None:
        # With a journal every incarnation of the dispatcher is equal. Without one, trainers must notice a restart.
        if self._journal is None:
            super()._require_mine(frame)
        else:
            self._journal.require_own()

    def _health(self, frame: Frame) -> Answer:
        message_of(Nothing, frame)
        return json_answer(workers=self._workers.alive(), jobs=self.jobs.progress())

    def _register(self, frame: Frame) -> Answer:
        self.register(message_of(protocol.RegisterDataset, frame))
        return Answer()

    def _join(self, frame: Frame) -> Answer:
        joined = self.jobs.join(message_of(protocol.JoinJob, frame))
        return Answer(text=joined.model_dump_json())

    def _leave(self, frame: Frame) -> Answer:
        return Answer(text=self.jobs.leave(message_of(protocol.LeaveJob, frame)).model_dump_json())

    def _next_split(self, frame: Frame) -> Answer:
        granted = self.jobs.next_split(message_of(protocol.NextSplit, frame))
        return Answer(text=granted.model_dump_json())

    def _describe(self, frame: Frame) -> Answer:
        part = self.jobs.describe(message_of(protocol.DescribeSplit, frame))
        return Answer(text=part.model_dump_json())

    def _find_worker(self, frame: Frame) -> Answer:
        address = self._workers.choose(message_of(protocol.FindWorker, frame).avoid)
        return Answer(text=protocol.Found(address=address).model_dump_json())

    def _heartbeat(self, frame: Frame) -> Answer:
        heartbeat = message_of(protocol.Heartbeat, frame)
        if heartbeat.address not in self._workers.alive():
            _log.info("data worker %s has joined", heartbeat.address)
        self._workers.heartbeat(heartbeat.address, streams=heartbeat.streams)
        living = protocol.Living(lease_secs=self._workers.lease_secs, sessions=self.jobs.sessions())
        return Answer(text=living.model_dump_json())


class DataDispatcher(FrameServer):
    """Serves from its construction until `close`.

    Example:
        >>> with DataDispatcher() as dispatcher:
        ...     dispatcher.address.startswith("127.0.0.1:")
        True
    """

    def __init__(self, config: DispatcherConfig | None = None) -> None:
        self.config = config or DispatcherConfig()
        require_safe(self.config)  # before the folder is touched
        require_roots(self.config, self.config.roots)
        calls = DispatcherCalls(self.config)
        try:
            super().__init__(self.config, calls)
        except BaseException:
            calls.close()
            raise
        self._dispatcher = calls

    def register(self, job: str, dataset: DatasetConfig) -> None:
        """Register the `dataset` of `job`, so that trainers need not send it. An existing job must read the same."""
        self._dispatcher.register(protocol.RegisterDataset(job=job, dataset=dataset))

    def close(self, *, grace: float = 5.0) -> bool:
        """Refuse new requests, finish running ones, stop listening. Returns whether all ended within `grace` seconds."""
        clean = super().close(grace=grace)
        if self._bound.is_here:
            self._dispatcher.close()
        return clean
