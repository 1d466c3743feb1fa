"""Where a trainer gets the batches of its splits from: data workers, or its own reading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from monolith.dataservice import messages
from monolith.dataservice.batch_frames import batch_of
from monolith.dataservice.client import DataClientConfig, ask, link_to, told
from monolith.dataservice.kinds import KINDS, Kinds, SplitReader, open_split
from monolith.dataservice.messages import DataCall, ReadBatch, ReadPart
from monolith.dataservice.split_stream import position_of
from monolith.errors import DeadlineExceededError, UnavailableError
from monolith.features import Batch
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange, Link

__all__ = ["LocalSplits", "RemoteSplits", "Splits"]

_PAUSE = 0.2
"""Seconds between two questions for a data worker while none is alive."""


class Splits(Protocol):
    """Batches of splits."""

    def read(self, request: ReadBatch) -> tuple[Batch, str] | None:
        """The batch behind `request.position` and the position behind it; None at the end of the split."""

    def close(self) -> None:
        """Let go of all of them."""


class LocalSplits:
    """Reads the splits in this process: only the names of the files are shared out, there are no data workers."""

    def __init__(self, dispatcher: Link, kinds: Kinds | None = None) -> None:
        self._dispatcher = dispatcher
        self._kinds = {**KINDS, **(kinds or {})}
        self._open: dict[int, tuple[str, SplitReader, Iterator[Batch]]] = {}
        """For each split the position it is at, and the reader."""

    def read(self, request: ReadBatch) -> tuple[Batch, str] | None:
        """The batch behind `request.position` and the position behind it; None at the end of the split."""
        position, reader, batches = self._open.pop(request.split, ("", None, iter(())))
        if reader is None or position != request.position:
            reader = self._opened(request)
            batches = iter(reader)
        batch = next(batches, None)
        if batch is None:
            return None
        behind = position_of(reader)
        self._open[request.split] = (behind, reader, batches)
        return batch, behind

    def close(self) -> None:
        """Let go of all of them."""
        self._open.clear()

    def _opened(self, request: ReadBatch) -> SplitReader:
        question = messages.DescribeSplit(**request.model_dump(exclude={"position"}))
        part = ask(self._dispatcher, DataCall.DESCRIBE_SPLIT, question, messages.Part)
        return open_split(part.dataset, part.split, request.position, kinds=self._kinds)


class RemoteSplits:
    """Asks data workers, each split's own; one that does not answer is replaced by another.

    The next batch of a split is asked for when one was received, so that it is on its way while the trainer works.
    """

    def __init__(self, dispatcher: Link, config: DataClientConfig, *, max_streams: int) -> None:
        self._dispatcher, self._config, self._max_streams = dispatcher, config, max_streams
        self._links: dict[str, Link] = {}
        self._homes: dict[int, str] = {}
        """The data worker of each split."""
        self._asked: dict[int, tuple[ReadBatch, Exchange]] = {}
        """Questions whose answers were not needed yet."""

    def read(self, request: ReadBatch) -> tuple[Batch, str] | None:
        """The batch behind `request.position` and the position behind it; None at the end of the split."""
        avoid: list[str] = []
        deadline = time.monotonic() + self._config.timeout
        while True:
            home = self._home(request.split, avoid, deadline)
            try:
                part, batch = self._answer(home, request)
            except (DeadlineExceededError, UnavailableError) as error:
                del self._homes[request.split]
                if time.monotonic() >= deadline:
                    raise UnavailableError(f"no data worker reads split {request.split}: {error}") from None
                if home in avoid:
                    time.sleep(_PAUSE)  # there was no other one
                avoid.append(home)
                continue
            deadline = time.monotonic() + self._config.timeout
            if part.state == "end":
                del self._homes[request.split]
                return None
            if part.state == "batch":
                self._ask(home, request.model_copy(update={"position": part.position}))
                return batch, part.position

    def close(self) -> None:
        """Let go of all of them."""
        for _, exchange in self._asked.values():
            exchange.abandon()
        for link in self._links.values():
            link.close()

    def _answer(self, home: str, request: ReadBatch) -> tuple[ReadPart, Batch]:
        frame = self._answered_before(request)
        if frame is None:
            self._ask(home, request)
            frame = self._asked.pop(request.split)[1].finish()
        part = told(frame, ReadPart, home)
        return part, batch_of(part.columns, frame.arrays)

    def _answered_before(self, request: ReadBatch) -> Frame | None:
        """The answer to the question that was sent ahead; None if that was another one, or came to nothing.

        Its deadline began when it was sent: a trainer that took longer over its step than that asks again.
        """
        asked, exchange = self._asked.pop(request.split, (None, None))
        if exchange is None:
            return None
        if asked != request:
            exchange.abandon()
            return None
        try:
            return exchange.finish()
        except (DeadlineExceededError, UnavailableError):
            return None

    def _ask(self, home: str, request: ReadBatch) -> None:
        link = self._links[home]
        exchange = link.begin(DataCall.READ_BATCH, request.model_dump_json())
        self._asked[request.split] = (request, exchange)
        exchange.send()

    def _home(self, split: int, avoid: list[str], deadline: float) -> str:
        while split not in self._homes:
            question = messages.FindWorker(avoid=tuple(avoid[-8:]))
            found = ask(self._dispatcher, DataCall.FIND_WORKER, question, messages.Found).address
            if found is not None:
                self._homes[split] = found
                break
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"no data worker is alive, waited {self._config.timeout:g} s; start one with `monolith data-worker`"
                )
            time.sleep(_PAUSE)
        home = self._homes[split]
        if home not in self._links:
            link = link_to(home, self._config, timeout=self._config.worker_timeout, max_streams=self._max_streams)
            link.on_unavailable = _try_another
            self._links[home] = link
        return home


def _try_another() -> None:
    """Another data worker can answer as well, so nothing is gained by trying the same one until the deadline."""
    raise UnavailableError("a data worker cannot be reached")
