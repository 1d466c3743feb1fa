"""What trainers, data workers and the dispatcher send to each other: calls, messages, batches as frames, and the client."""

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
from monolith.transport.calls import CallNumber, WireInt, WireName
from monolith.transport.frames import BFLOAT16, Frame
from monolith.transport.link import Link, Transport
from monolith.transport.server import read_pem
from monolith.transport.tokens import Token, reveal

__all__ = [
    "ColumnHead",
    "DataCall",
    "DataClientConfig",
    "DescribeSplit",
    "DescribedSplit",
    "FindWorker",
    "Found",
    "Granted",
    "Heartbeat",
    "JoinJob",
    "JoinedJob",
    "LeaveJob",
    "Living",
    "NextSplit",
    "Nothing",
    "ReadBatch",
    "ReadPart",
    "RegisterDataset",
    "answer_of",
    "arrays_of",
    "ask",
    "batch_of",
    "data_link",
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
    """A column of a batch. A tensor is sent as one array, a Ragged as two, values and offsets."""

    name: Annotated[str, Field(min_length=1)]
    ragged: bool
    dtype: Stored
    """Of the values. bool is sent as uint8."""


def arrays_of(batch: Batch) -> tuple[list[ColumnHead], list[np.ndarray]]:
    """Return the columns of `batch` and their arrays. Raises `InvalidArgumentError` for other dtypes.

    Example:
        >>> heads, arrays = arrays_of({"user": torch.tensor([7, 8]), "tags": Ragged.from_lists([[1], []])})
        >>> [head.name for head in heads], [array.tolist() for array in arrays]
        (['user', 'tags'], [[7, 8], [1], [0, 1, 1]])
    """
    heads, arrays = [], []
    num_rows(batch)  # raises if the columns differ in length
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
    """Return the batch that was sent, in memory of its own. Raises `ProtocolError` if heads and arrays do not match."""
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
        raise ProtocolError(f"batch: expected the arrays of {len(heads)} distinct columns")
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


HostPort = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$", max_length=280)]
MAX_POSITION_CHARS = 2**20
SplitPosition = Annotated[str, Field(max_length=MAX_POSITION_CHARS)]
"""The state of a source as JSON. Empty at the beginning of a split."""


class RegisterDataset(Config):
    """A job reads this dataset. An existing job must read the same one."""

    job: WireName
    dataset: DatasetConfig


class JoinJob(Config):
    """A trainer starts or restarts. Splits that it was granted after the first `granted` of the epoch are taken back.

    It proposes the number of its session, which must be larger than all before. The same number with the same nonce is a
    retry of the same request, so a delayed request changes nothing.
    """

    job: WireName
    trainer: WireInt
    trainers: Annotated[int, Field(ge=1, lt=2**31)]
    """How many trainers there are, for static sharding."""
    epoch: WireInt
    granted: WireInt
    session: Annotated[int, Field(ge=1, lt=2**62)]
    nonce: WireInt
    """Drawn by the process."""


class JoinedJob(Config):
    """Answer: whether the session started, and the number of the newest session. Calls of earlier ones are refused."""

    joined: bool
    session: WireInt


class LeaveJob(Config):
    """A trainer has left for good in this state, and others get the splits that it has not read. Answer: `JoinedJob`.

    Like `JoinJob` it starts a session, so that the trainer is refused if it still runs.
    """

    job: WireName
    trainer: WireInt
    epoch: WireInt
    granted: WireInt
    opened: tuple[tuple[WireInt, SplitPosition], ...]
    """Splits that it had begun, and the position in each."""
    session: Annotated[int, Field(ge=1, lt=2**62)]
    nonce: WireInt


class NextSplit(Config):
    """Ask for the split after the first `granted` ones of this trainer. Idempotent."""

    job: WireName
    trainer: WireInt
    session: WireInt
    epoch: WireInt
    granted: WireInt


class Granted(Config):
    """Answer: the number of a split, or None at the end of the epoch."""

    split: WireInt | None
    splits: WireInt
    """How many splits the epoch has so far."""
    position: SplitPosition = ""
    """Where to start in the split."""


class DescribeSplit(Config):
    """Ask what to read for a split that a trainer was granted."""

    job: WireName
    trainer: WireInt
    session: WireInt
    epoch: WireInt
    split: WireInt


class DescribedSplit(Config):
    """Answer: the split and its dataset."""

    dataset: DatasetConfig
    split: Split


class FindWorker(Config):
    """Ask for a data worker that is alive, other than those to `avoid` if possible."""

    avoid: tuple[HostPort, ...] = ()


class Found(Config):
    """Answer: the address of a data worker, None if none is alive."""

    address: HostPort | None


class Heartbeat(Config):
    """A data worker is alive and reads `streams` splits."""

    address: HostPort
    streams: WireInt


class Living(Config):
    """Answer: after how many seconds without a heartbeat it counts as dead, and the valid sessions by job and trainer."""

    lease_secs: float
    sessions: dict[str, dict[int, int]]


class ReadBatch(Config):
    """Ask for the batch after `position` of a split. Every data worker gives the same answer."""

    job: WireName
    trainer: WireInt
    session: WireInt
    epoch: WireInt
    split: WireInt
    position: SplitPosition = ""


class ReadPart(Config):
    """Answer: a batch and the position after it, or that none is ready yet, or that the split has ended."""

    state: Literal["batch", "wait", "end"]
    position: SplitPosition = ""
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
    """Seconds that a call to the dispatcher may take with its retries, and in which a data worker must be found."""
    worker_timeout: Positive = 5.0
    """Seconds without an answer after which another data worker is asked. They answer within one second, ready or not."""
    token: Token = None
    """The secret that the servers require."""
    tls_root_certs: Path | None = None
    """CA bundle (PEM) that signed the servers' certificates. None: no TLS."""
    transport: Transport | None = None
    """How frames are sent: "socket" or "flight". None: Flight with TLS, sockets without."""


def data_link(address: str, config: DataClientConfig, *, timeout: float, max_streams: int = 4) -> Link:
    """Return a link to a server of the data service."""
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
    """Send one request and return its answer."""
    return answer_of(link.call(call, request.model_dump_json()), answer, link.address)


def answer_of(frame: Frame, answer: type[Told], address: str) -> Told:
    """Return the text of an answer as a message. Raises `ProtocolError` if it is none."""
    try:
        return answer.from_json(frame.text)
    except ConfigError as error:
        raise ProtocolError(f"the server at {address} sent an answer that cannot be read: {error}") from None
