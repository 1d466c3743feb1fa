"""`DataServiceSource`: what a trainer reads of a data service, as a source like any other."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError

from monolith.data.sources.source import Source, SourcePosition
from monolith.dataservice import messages
from monolith.dataservice.client import DataClientConfig, Nothing, ask, link_to
from monolith.dataservice.dataset import DatasetConfig
from monolith.dataservice.kinds import Kinds
from monolith.dataservice.messages import DataCall, ReadBatch
from monolith.dataservice.split_readers import LocalSplits, RemoteSplits, Splits
from monolith.errors import InvalidArgumentError
from monolith.features import Batch
from monolith.transport.link import Link

__all__ = ["DEFAULT_JOB", "DataServiceSource"]

DEFAULT_JOB = "monolith_dataservice_task"

_Open = list[tuple[int, str]]
"""Splits that were begun, with the position in each; the one whose turn it is comes first."""
_OPEN: TypeAdapter[_Open] = TypeAdapter(list[tuple[Annotated[int, Field(ge=0)], messages.Position]])


class DataServiceSource(Source):
    """Batches of a dataset that several trainers share: every batch goes to one of them, once.

    Trainer i of n reads `source.shard(i, n)`. It gets splits from the dispatcher and their batches from data workers,
    `parallel` splits in turn; with `data_workers=False` it reads the splits itself. The first trainer brings the
    `dataset`, unless the dispatcher was started with it.

    The state says which splits were granted, and how far each has been read. A trainer that loads it, in this process or a
    successor, continues with exactly the batches that followed; the dispatcher takes back the splits it was granted since.

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
        # As in the URLs of schedulers.
        self._address = dispatcher.removeprefix("grpc://")
        self._dataset, self._job = dataset, job
        self.config = config or DataClientConfig()
        """How it reaches the service."""
        self._parallel, self._data_workers, self._kinds = parallel, data_workers, kinds
        self._epoch = 0
        super().__init__()

    def shard(self, index: int, count: int) -> Self:
        """The source of trainer `index` of `count`, at its beginning."""
        part = super().shard(index, count)
        part._epoch = 0
        part._position = part._start()
        return part

    def release(self) -> None:
        """Give the batches behind this source's state to the other trainers: the one it was of is gone for good.

        Load the state at which the trainer's work last counted, as a checkpoint or the parameter servers have it; only they
        know. Then every batch still counts once: those before it with the trainer, those behind with whoever gets them. The
        trainer, should it still run, is turned away, and so is a successor with a state; one that begins without is as good as
        new. Trainers that were told the end of the epoch do not ask again.

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
        with contextlib.closing(link_to(self._address, self.config, timeout=self.config.timeout)) as link:
            answer = messages.Joined(joined=False, session=0)
            while not answer.joined:
                leave = messages.LeaveJob(
                    job=self._job,
                    trainer=self._shard_index,
                    epoch=int(position["epoch"]),
                    granted=int(position["granted"]),
                    opened=tuple(_opened(position)),
                    session=answer.session + 1,
                    nonce=secrets.randbits(62),
                )
                answer = ask(link, DataCall.LEAVE_JOB, leave, messages.Joined)

    def _start(self) -> SourcePosition:
        return {"epoch": self._epoch, "granted": 0, "open": "[]"}

    def _check(self, position: SourcePosition) -> None:
        super()._check(position)
        _opened(position)

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        with contextlib.closing(link_to(self._address, self.config, timeout=self.config.timeout)) as link:
            session = self._join(link, position)
            with contextlib.closing(self._splits(link)) as splits:
                yield from self._batches(link, splits, session, position)
        self._epoch = int(position["epoch"]) + 1

    def _join(self, link: Link, position: SourcePosition) -> int:
        if self._dataset is not None:
            register = messages.RegisterDataset(job=self._job, dataset=self._dataset)
            ask(link, DataCall.REGISTER_DATASET, register, Nothing)
        answer = messages.Joined(joined=False, session=0)
        while not answer.joined:
            join = messages.JoinJob(
                job=self._job,
                trainer=self._shard_index,
                trainers=self._shard_count,
                epoch=int(position["epoch"]),
                granted=int(position["granted"]),
                session=answer.session + 1,
                nonce=secrets.randbits(62),
            )
            answer = ask(link, DataCall.JOIN_JOB, join, messages.Joined)
        return answer.session

    def _splits(self, link: Link) -> Splits:
        if not self._data_workers:
            return LocalSplits(link, self._kinds)
        return RemoteSplits(link, self.config, max_streams=self._parallel + 1)

    def _batches(
        self, link: Link, splits: Splits, session: int, position: SourcePosition
    ) -> Iterator[tuple[Batch, SourcePosition]]:
        epoch, granted, opened = int(position["epoch"]), int(position["granted"]), _opened(position)
        asking = messages.NextSplit(
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
            split, place = opened.pop(0)
            read = splits.read(ReadBatch(**asking.model_dump(exclude={"granted"}), split=split, position=place))
            if read is not None:
                batch, behind = read
                opened.append((split, behind))
                yield batch, {"epoch": epoch, "granted": granted, "open": json.dumps(opened)}

    def _granted(self, link: Link, asking: messages.NextSplit) -> messages.Granted:
        granted = ask(link, DataCall.NEXT_SPLIT, asking, messages.Granted)
        if granted.splits == 0:
            paths = "" if self._dataset is None else f" {', '.join(map(repr, self._dataset.paths))}"
            raise InvalidArgumentError(f"paths: job {self._job!r}: no file matches{paths}")
        return granted


def _opened(position: SourcePosition) -> _Open:
    try:
        return _OPEN.validate_json(str(position["open"]))
    except ValidationError:
        raise InvalidArgumentError(
            f"state['open']: expected what state_dict() gives, splits and places in JSON, got {position['open']!r}"
        ) from None
