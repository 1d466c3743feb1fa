"""Messages with which processes become the ranks of a run.

    JOIN       to the leader: rank, world size, incarnation, address, generation that the rank was part of
    HERE       to the leader, every second: the rank still waits
    FORMED     of the leader: the generation and all members. Now every rank connects to those below it
    CONNECT    to another rank: generation and channel
    CONNECTED  its answer
    REFUSED    instead of FORMED or CONNECTED: an error, and whether to try again
    WHO        to a leader: which process is it? It answers with LEADER

Each is a frame whose text is JSON, on a connection that begins with the token.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from monolith.errors import ProtocolError
from monolith.transport.framed_socket import FramedSocket
from monolith.transport.frames import Frame, decode, encode

__all__ = [
    "Empty",
    "Formed",
    "JoinCall",
    "MAX_JOIN_BYTES",
    "RankConnect",
    "RankJoin",
    "RankMember",
    "RankRefused",
    "read_message",
    "receive_message",
    "send_message",
]

MAX_JOIN_BYTES = 2**20
"""No message is longer."""
MAX_RANKS = 4096

Message = TypeVar("Message", bound=BaseModel)


class JoinCall(IntEnum):
    """The kinds of messages."""

    JOIN = 1
    HERE = 2
    FORMED = 3
    CONNECT = 4
    CONNECTED = 5
    REFUSED = 6
    WHO = 7
    LEADER = 8


class RankMessage(BaseModel):
    """What all messages have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RankMember(RankMessage):
    """A process that is, or wants to be, a rank of a run."""

    rank: int = Field(ge=0, lt=MAX_RANKS)
    """As its launcher numbered it."""
    incarnation: int = Field(ge=0, lt=2**63)
    """When the process began, in nanoseconds."""
    address: str = Field(max_length=512)
    """Where it listens."""
    host: str = Field(max_length=256)
    """Name of its machine."""
    process: int = Field(ge=0)

    def __str__(self) -> str:
        return f"process {self.process} of {self.host} ({self.address})"


class RankJoin(RankMessage):
    """To the leader: a process wants to be a rank of the run."""

    member: RankMember
    size: int = Field(ge=1, le=MAX_RANKS)
    after: int = Field(ge=0, lt=2**63)


class Empty(RankMessage):
    """Of messages that say nothing but their kind."""


class Formed(RankMessage):
    """Of the leader: all are there."""

    generation: int = Field(gt=0, lt=2**63)
    members: list[RankMember] = Field(max_length=MAX_RANKS)


class RankConnect(RankMessage):
    """To another rank: what a connection is for."""

    generation: int = Field(gt=0, lt=2**63)
    rank: int = Field(ge=0, lt=MAX_RANKS)
    channel: int = Field(ge=0, lt=64)


class RankRefused(RankMessage):
    """Why a rank was not admitted."""

    error: str = Field(max_length=64)
    text: str = Field(max_length=4096)
    retry: bool = False
    rank: int = Field(default=-1, ge=-1, lt=MAX_RANKS)


def send_message(connection: FramedSocket, call: JoinCall, message: BaseModel, *, deadline: float) -> None:
    """Send one message of the formation of a run. Errors are those of sockets."""
    connection.send_frame(encode(call=call, request=1, text=message.model_dump_json()), deadline=deadline)


def receive_message(connection: FramedSocket, *, deadline: float) -> Frame:
    """Return the next message. Errors are those of sockets, and `ProtocolError`."""
    return decode(connection.receive_frame(max_bytes=MAX_JOIN_BYTES, deadline=deadline))


def read_message(frame: Frame, kind: type[Message]) -> Message:
    """Return the content of a message, checked."""
    try:
        return kind.model_validate_json(frame.text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ProtocolError(f"{kind.__name__}.{where}: {problem['msg']}") from None
