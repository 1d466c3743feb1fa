"""`DataWorker`: reads splits and hands their batches to the trainers that have them."""

from __future__ import annotations

import logging
import threading
from typing import Annotated

from pydantic import Field

from monolith.dataservice import messages
from monolith.dataservice.client import DataClientConfig, ask, link_to
from monolith.dataservice.kinds import KINDS, Kinds, SplitReader, open_split
from monolith.dataservice.messages import Address, DataCall, ReadBatch
from monolith.dataservice.open_splits import OpenSplits
from monolith.dataservice.roots import require_below, require_roots
from monolith.dataservice.split_stream import SplitStream
from monolith.errors import ConfigError, ServerError
from monolith.transport.calls import Answer, BasicCall, FrameCalls, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig, require_safe

__all__ = ["DataWorker", "DataWorkerConfig"]

_log = logging.getLogger(__name__)
WAIT_SECS = 0.5
"""How long a question waits for a batch that is being read, before the answer is: not yet."""


class DataWorkerConfig(ListenConfig):
    """Where a data worker listens and whom it works for.

    Example:
        >>> DataWorkerConfig(dispatcher="127.0.0.1:7200").read_ahead
        4
    """

    dispatcher: Address
    """host:port."""
    advertise: Address | None = None
    """host:port that trainers reach it by; None: the one it listens on."""
    client: DataClientConfig = DataClientConfig()
    """How it reaches the dispatcher."""
    read_ahead: Annotated[int, Field(ge=1)] = 4
    """Batches of each split that are read before they are asked for."""
    max_splits: Annotated[int, Field(ge=1)] = 64
    """Splits that are open at the same time; beyond, those that nobody asked for the longest are closed."""
    roots: tuple[str, ...] = ()
    """Folders, or beginnings of URLs, that files must be below. "*": any file this process may read. Without roots, any file on
    loopback; on an address that other machines can reach, the worker does not start."""


class _WorkerCalls(FrameCalls):
    """What a data worker does, without the network around it."""

    def __init__(self, config: DataWorkerConfig, dispatcher: Link, kinds: Kinds) -> None:
        super().__init__(max_frame_bytes=config.max_message_bytes)
        self._config, self._dispatcher, self._kinds = config, dispatcher, kinds
        self.splits = OpenSplits(self._open_stream, max_splits=config.max_splits)
        self._handlers |= {
            BasicCall.HEALTH: lambda frame: json_answer(streams=len(self.splits)),
            DataCall.READ_BATCH: self._read_batch,
        }

    def _require_mine(self, frame: Frame) -> None:
        """Nothing is lost with a data worker, so any of its lives may answer."""

    def _read_batch(self, frame: Frame) -> Answer:
        return self.splits.answer(message_of(ReadBatch, frame), wait=WAIT_SECS)

    def _open_stream(self, request: ReadBatch) -> SplitStream:
        return SplitStream(
            lambda: self._open(request),
            request.position,
            read_ahead=self._config.read_ahead,
            max_bytes=self._config.max_message_bytes,
        )

    def _open(self, request: ReadBatch) -> SplitReader:
        # Asked of the dispatcher, not told by the trainer: it also says whether the split is this trainer's.
        question = messages.DescribeSplit(**request.model_dump(exclude={"position"}))
        part = ask(self._dispatcher, DataCall.DESCRIBE_SPLIT, question, messages.Part)
        if part.split.file is not None:
            require_below(part.split.file, self._config.roots)
        return open_split(part.dataset, part.split, request.position, kinds=self._kinds)


class DataWorker(FrameServer):
    """Serves until `close`, and tells the dispatcher all the time that it is alive.

    `kinds`: further sources by name, functions of `paths` and the fields of a dataset.

    Example:
        >>> from monolith.dataservice import DataDispatcher
        >>> with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)) as worker:
        ...     worker.address.startswith("127.0.0.1:")
        True
    """

    def __init__(self, config: DataWorkerConfig, kinds: Kinds | None = None) -> None:
        self.config = config
        require_safe(config)
        require_roots(config, config.roots)
        if config.advertise is None and config.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"DataWorkerConfig.advertise: expected host:port that trainers can reach, as host is {config.host}"
            )
        self._link = link_to(config.dispatcher, config.client, timeout=config.client.timeout, max_streams=8)
        calls = _WorkerCalls(config, self._link, {**KINDS, **(kinds or {})})
        super().__init__(config, calls)
        self._splits = calls.splits
        self.advertised = config.advertise or self.address
        """host:port that trainers are told."""
        self._closing = threading.Event()
        threading.Thread(target=self._stay_known, name="monolith-data-worker", daemon=True).start()

    def close(self, *, grace: float = 5.0) -> bool:
        """Finish what is under way, refuse what comes, stop listening; whether all ended within `grace` seconds."""
        self._closing.set()
        clean = super().close(grace=grace)
        self._splits.close()
        self._link.close()
        return clean

    def _stay_known(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._link.instance = 0  # a dispatcher that was started again is as good
                heartbeat = messages.Heartbeat(address=self.advertised, streams=len(self._splits))
                living = ask(self._link, DataCall.HEARTBEAT, heartbeat, messages.Living)
            except ServerError as error:
                pause = 1.0
                if not self._closing.is_set():
                    _log.warning("the dispatcher does not hear this data worker: %s", error)
            else:
                self._splits.know_sessions(living.sessions)
                pause = living.lease_secs / 5
