"""`DataServiceSource`: the batches that a trainer gets from a data service, as a `Source`."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Protocol, Self

from pydantic import Field, TypeAdapter, ValidationError

from monolith.data.sources.source import Source, SourcePosition
from monolith.dataservice import protocol
from monolith.dataservice.dataset import KINDS, DatasetConfig, Kinds, SplitReader, open_split
from monolith.dataservice.protocol import (
    DataCall,
    DataClientConfig,
    Nothing,
    ReadBatch,
    ReadPart,
    answer_of,
    ask,
    batch_of,
    data_link,
)
from monolith.dataservice.worker import position_of
from monolith.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from monolith.features import Batch
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange, Link

__all__ = ["DEFAULT_JOB", "DataServiceSource", "LocalSplits", "RemoteSplits", "Splits"]

_PAUSE = 0.2
"""Seconds between two requests for a data worker while none is alive."""


class Splits(Protocol):
    """Reads batches of splits."""

    def read(self, request: ReadBatch) -> tuple[Batch, str] | None:
        """Return the batch after `request.position` and the position after it. None at the end of the split."""

    def close(self) -> None:
        """Close all open splits."""


class LocalSplits:
    """Reads the splits in this process. The dispatcher only assigns the files, and there are no data workers."""

    def __init__(self, dispatcher: Link, kinds: Kinds | None = None) -> None:
        self._dispatcher = dispatcher
        self._kinds = {**KINDS, **(kinds or {})}
        self._open: dict[int, tuple[str, SplitReader, Iterator[Batch]]] = {}
        """The position and the reader of each split."""

    def read(self, request: ReadBatch) -> tuple[Batch, str] | None:
        """Return the batch after `request.position` and the position after it. None at the end of the split."""
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
        """Close all open splits."""
        self._open.clear()

    def _opened(self, request: ReadBatch) -> SplitReader:
        question = protocol.DescribeSplit(**request.model_dump(exclude={"position"}))
        part = ask(self._dispatcher, DataCall.DESCRIBE_SPLIT, question, protocol.DescribedSplit)
        return open_split(part.dataset, part.split, request.position, kinds=self._kinds)


class RemoteSplits:
    """Reads the splits from data workers, one for each split. One that does not answer is replaced by another.

    The next batch of a split is requested when one was received, so that it is in flight while the trainer computes.
    """

    def __init__(self, dispatcher: Link, config: DataClientConfig, *, max_streams: int) -> None:
        self._dispatcher, self._config, self._max_streams = dispatcher, config, max_streams
        self._links: dict[str, Link] = {}
        self._homes: dict[int, str] = {}
        """The data worker of each split."""
        self._asked: dict[int, tuple[ReadBatch, Exchange]] = {}
        """Requests that were sent ahead."""

    def read(self, request: ReadBatch) -> tuple[Batch, str] | None:
        """Return the batch after `request.position` and the position after it. None at the end of the split."""
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
        """Close all open splits."""
        for _, exchange in self._asked.values():
            exchange.abandon()
        for link in self._links.values():
            link.close()

    def _answer(self, home: str, request: ReadBatch) -> tuple[ReadPart, Batch]:
        frame = self._answered_before(request)
        if frame is None:
            self._ask(home, request)
            frame = self._asked.pop(request.split)[1].finish()
        part = answer_of(frame, ReadPart, home)
        return part, batch_of(part.columns, frame.arrays)

    def _answered_before(self, request: ReadBatch) -> Frame | None:
        """Return the answer to the request that was sent ahead. None if that was another one, or failed.

        Its deadline began when it was sent, so a trainer whose step took longer sends it again.
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
            question = protocol.FindWorker(avoid=tuple(avoid[-8:]))
            found = ask(self._dispatcher, DataCall.FIND_WORKER, question, protocol.Found).address
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
            link = data_link(home, self._config, timeout=self._config.worker_timeout, max_streams=self._max_streams)
            link.on_unavailable = _try_another
            self._links[home] = link
        return home


def _try_another() -> None:
    """Fail at once: another data worker can answer, so there is no need to retry this one until the deadline."""
    raise UnavailableError("a data worker cannot be reached")


DEFAULT_JOB = "monolith_dataservice_task"

_Open = list[tuple[int, str]]
"""Splits that were begun, with the position in each. The next one to read comes first."""
_OPEN: TypeAdapter[_Open] = TypeAdapter(list[tuple[Annotated[int, Field(ge=0)], protocol.SplitPosition]])


class DataServiceSource(Source):
    """Batches of a dataset that several trainers share. Every batch goes to exactly one of them.

    Trainer i of n reads `source.shard(i, n)`. It gets splits from the dispatcher and their batches from data workers,
    alternating between `parallel` splits. With `data_workers=False` it reads the splits itself. The first trainer sends the
    `dataset`, unless the dispatcher was started with it.

    The state says which splits were granted, and how far each has been read. A trainer that loads it, in this process or a
    successor, continues with exactly the batches that followed. The dispatcher takes back the splits that were granted since.

    Example:
        >>> from monolith.dataservice import DataDispatcher, DataWorker, DataWorkerConfig
        >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 4, "batch_size": 2, "users": 9}, splits=2)
        >>> with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)):
        ...     [len(batch["label"]) for batch in DataServiceSource(dispatcher.address, dataset)]
        [2, 2, 2, 2]
    """

    def __init__(
        self,
        dispatcher: str,
        dataset: DatasetConfig | None = None,
        *,
        job: str = DEFAULT_JOB,
        config: DataClientConfig | None = None,
        parallel: int = 2,
        data_workers: bool = True,
        kinds: Kinds | None = None,
    ) -> None:
        if parallel < 1:
            raise InvalidArgumentError(f"parallel: expected 1 or more splits at a time, got {parallel}")
        # Schedulers give it as a URL.
        self._address = dispatcher.removeprefix("grpc://")
        self._dataset, self._job = dataset, job
        self.config = config or DataClientConfig()
        """How it reaches the service."""
        self._parallel, self._data_workers, self._kinds = parallel, data_workers, kinds
        self._epoch = 0
        super().__init__()

    def shard(self, index: int, count: int) -> Self:
        """Return the source of trainer `index` of `count`, at its beginning."""
        part = super().shard(index, count)
        part._epoch = 0
        part._position = part._start()
        return part

    def release(self) -> None:
        """Give the batches after this source's state to the other trainers, because its trainer has left for good.

        First load the last state of the trainer that was applied, as a checkpoint or the parameter servers have it. Then every
        batch still counts once: those before the state by this trainer, those after it by others. The trainer is refused if it
        still runs, and so is a successor with a state. One that begins without a state is a new trainer. Trainers that have
        reached the end of the epoch do not ask again.

        Example:
            >>> from monolith.dataservice import DataDispatcher
            >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 4, "batch_size": 2, "users": 9}, splits=2)
            >>> with DataDispatcher() as dispatcher:
            ...     source = DataServiceSource(dispatcher.address, dataset, data_workers=False)
            ...     lost, other = source.shard(0, 2), source.shard(1, 2)
            ...     _ = next(iter(lost))
            ...     lost.release()
            ...     len(list(other))
            3
        """
        position = self._position
        with contextlib.closing(data_link(self._address, self.config, timeout=self.config.timeout)) as link:
            answer = protocol.JoinedJob(joined=False, session=0)
            while not answer.joined:
                leave = protocol.LeaveJob(
                    job=self._job,
                    trainer=self._shard_index,
                    epoch=int(position["epoch"]),
                    granted=int(position["granted"]),
                    opened=tuple(_opened(position)),
                    session=answer.session + 1,
                    nonce=secrets.randbits(62),
                )
                answer = ask(link, DataCall.LEAVE_JOB, leave, protocol.JoinedJob)

    def _start(self) -> SourcePosition:
        return {"epoch": self._epoch, "granted": 0, "open": "[]"}

    def _check(self, position: SourcePosition) -> None:
        super()._check(position)
        _opened(position)

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        with contextlib.closing(data_link(self._address, self.config, timeout=self.config.timeout)) as link:
            session = self._join(link, position)
            with contextlib.closing(self._splits(link)) as splits:
                yield from self._batches(link, splits, session, position)
        self._epoch = int(position["epoch"]) + 1

    def _join(self, link: Link, position: SourcePosition) -> int:
        if self._dataset is not None:
            register = protocol.RegisterDataset(job=self._job, dataset=self._dataset)
            ask(link, DataCall.REGISTER_DATASET, register, Nothing)
        answer = protocol.JoinedJob(joined=False, session=0)
        while not answer.joined:
            join = protocol.JoinJob(
                job=self._job,
                trainer=self._shard_index,
                trainers=self._shard_count,
                epoch=int(position["epoch"]),
                granted=int(position["granted"]),
                session=answer.session + 1,
                nonce=secrets.randbits(62),
            )
            answer = ask(link, DataCall.JOIN_JOB, join, protocol.JoinedJob)
        return answer.session

    def _splits(self, link: Link) -> Splits:
        if not self._data_workers:
            return LocalSplits(link, self._kinds)
        return RemoteSplits(link, self.config, max_streams=self._parallel + 1)

    def _batches(
        self, link: Link, splits: Splits, session: int, position: SourcePosition
    ) -> Iterator[tuple[Batch, SourcePosition]]:
        epoch, granted, opened = int(position["epoch"]), int(position["granted"]), _opened(position)
        asking = protocol.NextSplit(
            job=self._job, trainer=self._shard_index, session=session, epoch=epoch, granted=granted
        )
        more = True
        while True:
            while more and len(opened) < self._parallel:
                given = self._granted(link, asking.model_copy(update={"granted": granted}))
                more = given.split is not None
                if given.split is not None:
                    granted += 1
                    opened.append((given.split, given.position))
            if not opened:
                return
            split, start = opened.pop(0)
            read = splits.read(ReadBatch(**asking.model_dump(exclude={"granted"}), split=split, position=start))
            if read is not None:
                batch, behind = read
                opened.append((split, behind))
                yield batch, {"epoch": epoch, "granted": granted, "open": json.dumps(opened)}

    def _granted(self, link: Link, asking: protocol.NextSplit) -> protocol.Granted:
        granted = ask(link, DataCall.NEXT_SPLIT, asking, protocol.Granted)
        if granted.splits == 0:
            paths = "" if self._dataset is None else f" {', '.join(map(repr, self._dataset.paths))}"
            raise InvalidArgumentError(f"paths: job {self._job!r}: no file matches{paths}")
        return granted


def _opened(position: SourcePosition) -> _Open:
    try:
        return _OPEN.validate_json(str(position["open"]))
    except ValidationError:
        raise InvalidArgumentError(
            f"state['open']: expected splits and positions in JSON, as of state_dict(), got {position['open']!r}"
        ) from None
