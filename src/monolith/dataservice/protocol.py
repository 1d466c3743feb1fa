"""What is asked of a dispatcher and of a data worker: the JSON text of each call, as typed objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config, Positive
from monolith.dataservice.dataset import DatasetConfig, Split
from monolith.errors import ConfigError, InvalidArgumentError, ProtocolError
from monolith.features import Batch, Ragged, num_rows
from monolith.transport.calls import CallNumber, Name, Whole
from monolith.transport.frames import BFLOAT16, Frame
from monolith.transport.link import Link, Transport
from monolith.transport.server import read_pem
from monolith.transport.tokens import Token, reveal

__all__ = [
    "ColumnHead",
    "DataCall",
    "DataClientConfig",
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
    "Nothing",
    "Part",
    "ReadBatch",
    "ReadPart",
    "RegisterDataset",
    "arrays_of",
    "ask",
    "batch_of",
    "link_to",
    "told",
]

Stored = Literal["int64", "int32", "float32", "float64", "float16", "bfloat16", "uint8", "bool"]
_DTYPES: dict[torch.dtype, Stored] = {
    torch.int64: "int64",
    torch.int32: "int32",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


class ColumnHead(Config):
    """One column: a tensor is one array, a Ragged two, values and offsets."""

    name: Annotated[str, Field(min_length=1)]
    ragged: bool
    dtype: Stored
    """Of the values; a bool travels as uint8."""


def arrays_of(batch: Batch) -> tuple[list[ColumnHead], list[np.ndarray]]:
    """The columns of `batch` and their arrays; a column of another dtype is an error.

    Example:
        >>> heads, arrays = arrays_of({"user": torch.tensor([7, 8]), "tags": Ragged.from_lists([[1], []])})
        >>> [head.name for head in heads], [array.tolist() for array in arrays]
        (['user', 'tags'], [[7, 8], [1], [0, 1, 1]])
    """
    heads, arrays = [], []
    num_rows(batch)  # a batch whose columns do not fit together is an error of who made it
    for name, column in batch.items():
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"batch[{name!r}]: expected one of {', '.join(_DTYPES.values())}, got {values.dtype}; convert it first"
            )
        heads.append(ColumnHead(name=name, ragged=isinstance(column, Ragged), dtype=_DTYPES[values.dtype]))
        arrays.append(_array(values.detach().cpu().contiguous()))
        if isinstance(column, Ragged):
            arrays.append(column.offsets.numpy())
    return heads, arrays


def batch_of(heads: Sequence[ColumnHead], arrays: Sequence[np.ndarray]) -> Batch:
    """The batch that was sent, in memory of its own; `ProtocolError` if heads and arrays do not fit together."""
    batch: Batch = {}
    left = iter(arrays)
    try:
        for head in heads:
            values = _tensor(_next(left, head.name), head)
            batch[head.name] = Ragged(values, _next(left, head.name).copy()) if head.ragged else values
        num_rows(batch)
    except InvalidArgumentError as error:
        raise ProtocolError(f"batch: {error}") from None
    if len(batch) != len(heads) or next(left, None) is not None:
        raise ProtocolError(f"batch: expected the arrays of {len(heads)} columns of different names, got others")
    return batch


def _array(values: torch.Tensor) -> np.ndarray:
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(BFLOAT16)
    return (values.view(torch.uint8) if values.dtype == torch.bool else values).numpy()


def _tensor(array: np.ndarray, head: ColumnHead) -> torch.Tensor:
    stored = np.dtype("u1") if head.dtype == "bool" else BFLOAT16 if head.dtype == "bfloat16" else np.dtype(head.dtype)
    if array.dtype != stored:
        raise ProtocolError(f"batch[{head.name!r}]: expected {stored}, got {array.dtype}")
    if head.dtype == "bfloat16":
        return torch.from_numpy(array.view("<i2").copy()).view(torch.bfloat16)
    values = torch.from_numpy(array.copy())
    return values.bool() if head.dtype == "bool" else values


def _next(arrays: Iterator[np.ndarray], name: str) -> np.ndarray:
    array = next(arrays, None)
    if array is None:
        raise ProtocolError(f"batch[{name!r}]: its array is missing")
    return array


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


Told = TypeVar("Told", bound=Config)


class Nothing(Config):
    """The text of a call without arguments, or of an answer that has none."""


class DataClientConfig(Config):
    """How to reach a data service.

    Example:
        >>> DataClientConfig(timeout=10).worker_timeout
        5.0
    """

    timeout: Positive = 30.0
    """Seconds a call to the dispatcher may take, retries included, and in which some data worker must be found."""
    worker_timeout: Positive = 5.0
    """Seconds without an answer after which another data worker is asked; they answer within one, ready or not."""
    token: Token = None
    """What the servers ask for."""
    tls_root_certs: Path | None = None
    """PEM of whom the servers' certificates are signed by; None: no TLS."""
    transport: Transport | None = None
    """How frames travel: "socket" or "flight"; None: Flight with TLS, sockets without."""


def link_to(address: str, config: DataClientConfig, *, timeout: float, max_streams: int = 4) -> Link:
    """The way to a server."""
    certificates = None if config.tls_root_certs is None else read_pem(config.tls_root_certs, "tls_root_certs")
    return Link(
        address,
        timeout=timeout,
        token=reveal(config.token),
        tls_root_certs=certificates,
        max_streams=max_streams,
        transport=config.transport,
    )


def ask(link: Link, call: DataCall, request: Config, answer: type[Told]) -> Told:
    """What the server says to one request."""
    return told(link.call(call, request.model_dump_json()), answer, link.address)


def told(frame: Frame, answer: type[Told], address: str) -> Told:
    """The text of an answer as what it must be."""
    try:
        return answer.from_json(frame.text)
    except ConfigError as error:
        raise ProtocolError(f"the server at {address} sent an answer that cannot be read: {error}") from None
