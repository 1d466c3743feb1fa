"""What is asked of a dispatcher and of a data worker: the JSON text of each call, as typed objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from monolith.config import Config
from monolith.dataservice.batch_frames import ColumnHead
from monolith.dataservice.dataset import DatasetConfig, Split
from monolith.transport.calls import CallNumber, Name, Whole

__all__ = [
    "DataCall",
    "DescribeSplit",
    "FindWorker",
    "Found",
    "Granted",
    "Heartbeat",
    "JoinJob",
    "Joined",
    "LeaveJob",
    "Living",
    "NextSplit",
    "Part",
    "ReadBatch",
    "ReadPart",
    "RegisterDataset",
]


class DataCall(CallNumber):
    """The calls of a dispatcher and of a data worker."""

    REGISTER_DATASET = 112
    JOIN_JOB = 113
    NEXT_SPLIT = 114
    DESCRIBE_SPLIT = 115
    FIND_WORKER = 116
    HEARTBEAT = 117
    LEAVE_JOB = 118
    READ_BATCH = 120


Address = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$", max_length=280)]
MAX_POSITION = 2**20
Position = Annotated[str, Field(max_length=MAX_POSITION)]
"""The JSON of a state, or nothing: the beginning."""


class RegisterDataset(Config):
    """A job reads this dataset; a job that exists must read the same."""

    job: Name
    dataset: DatasetConfig


class JoinJob(Config):
    """A trainer begins, or begins again: splits it was granted after the first `granted` of an epoch are taken back.

    It proposes the number of its session. Only one that is larger than all before begins; the same one with the same nonce
    is the same request, which came twice. So one that was delayed changes nothing.
    """

    job: Name
    trainer: Whole
    trainers: Annotated[int, Field(ge=1, lt=2**31)]
    """How many there are; only static sharding asks."""
    epoch: Whole
    granted: Whole
    session: Annotated[int, Field(ge=1, lt=2**62)]
    nonce: Whole
    """Drawn by the process."""


class Joined(Config):
    """The answer: whether it began, and the number of the newest session; calls of earlier ones are refused."""

    joined: bool
    session: Whole


class LeaveJob(Config):
    """A trainer is gone for good, and this was its state: what it had not read is for others. Answer: `Joined`.

    As `JoinJob`: it begins a session, so that the trainer, should it still run, is turned away.
    """

    job: Name
    trainer: Whole
    epoch: Whole
    granted: Whole
    opened: tuple[tuple[Whole, Position], ...]
    """Splits that it had begun, and the place in each."""
    session: Annotated[int, Field(ge=1, lt=2**62)]
    nonce: Whole


class NextSplit(Config):
    """The split behind the first `granted` ones of this trainer; asked again, the same."""

    job: Name
    trainer: Whole
    session: Whole
    epoch: Whole
    granted: Whole


class Granted(Config):
    """The answer: the number of a split, or None at the end of the epoch."""

    split: Whole | None
    splits: Whole
    """How many splits the epoch has so far."""
    position: Position = ""
    """Where to begin it."""


class DescribeSplit(Config):
    """What to read for a split that a trainer was granted."""

    job: Name
    trainer: Whole
    session: Whole
    epoch: Whole
    split: Whole


class Part(Config):
    """The answer."""

    dataset: DatasetConfig
    split: Split


class FindWorker(Config):
    """A data worker that is alive, one not to `avoid` if there is one."""

    avoid: tuple[Address, ...] = ()


class Found(Config):
    """The answer: the data worker's address; None if none is alive."""

    address: Address | None


class Heartbeat(Config):
    """A data worker is alive, and reads so many splits."""

    address: Address
    streams: Whole


class Living(Config):
    """The answer: after which time without another heartbeat it counts as dead, and who may read, by job and trainer."""

    lease_secs: float
    sessions: dict[str, dict[int, int]]


class ReadBatch(Config):
    """The batch behind `position` of a split. The same question has the same answer, whichever data worker is asked."""

    job: Name
    trainer: Whole
    session: Whole
    epoch: Whole
    split: Whole
    position: Position = ""


class ReadPart(Config):
    """The answer: a batch and the position behind it, or that none is ready yet, or that the split has ended."""

    state: Literal["batch", "wait", "end"]
    position: Position = ""
    columns: tuple[ColumnHead, ...] = ()
