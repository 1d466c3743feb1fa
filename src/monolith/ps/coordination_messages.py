"""What workers tell each other through a server: who they are, how far they are, whom they hold, what they have found out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from monolith.config import Config, Positive
from monolith.ps.messages import Name, Whole

__all__ = [
    "Barrier",
    "Greet",
    "Hold",
    "Member",
    "Members",
    "Phase",
    "PlaceBarrier",
    "ReadKeys",
    "Report",
    "Seen",
    "SetKey",
]

Phase = Literal["joined", "running", "finished"]
"""How far a worker is. The chief is running once it has restored, the others from the moment they wait for that."""

_Index = Annotated[int, Field(ge=0, lt=65536)]
_Value = Annotated[str, Field(max_length=65536)]


class Greet(Config):
    """Who asks. Every call has it, and renews the worker's lease: a server that was started anew so learns what there is."""

    index: _Index
    """Number of the worker; 0 is the chief."""
    epoch: Whole
    """Of the worker's life; from the moment a larger one is seen, smaller ones are refused."""
    lease: Annotated[Positive, Field(le=86400)]
    """Seconds for which the worker counts after each call."""
    phase: Phase = "joined"


class Barrier(Config):
    """Workers that come by are held."""

    number: Whole
    action: str
    """What for."""


class Member(Config):
    """A worker as the server knows it."""

    index: _Index
    epoch: Whole
    phase: Phase
    alive: bool
    """Whether its lease is not over."""
    held: bool
    """Whether it waits behind the barrier there is."""


class Members(Config):
    """Answer to `MEMBERS`: all workers that have greeted the server, in order, and what is common to them."""

    members: tuple[Member, ...]
    step: Whole
    barrier: Barrier | None


class Report(Config):
    """Steps made. Answer: `Seen`."""

    who: Greet
    made: Whole
    """Steps of this life of the worker."""
    seen: Whole
    """The largest global step it knows: what a server that has lost its count goes on from."""


class Seen(Config):
    """What a worker learns after a step."""

    step: Whole
    """Steps of all workers."""
    barrier: Barrier | None = None


class PlaceBarrier(Config):
    """Answer: `{"placed": bool, "barrier": Barrier}`, the one that is there then."""

    who: Greet
    action: Annotated[str, Field(max_length=255)] = ""


class Hold(Config):
    """A worker waits behind a barrier, and asks whether it still has to. Answer: `{"held": bool}`."""

    who: Greet
    number: Whole


class ReadKeys(Config):
    """Answer: `{"values": {key: value}}` of all keys that begin with `prefix`."""

    prefix: Annotated[str, Field(max_length=255)]


class SetKey(Config):
    """Set a key that has the value `expected`, or none. Answer: `{"set": bool, "value": the one it has then}`."""

    key: Name
    value: _Value
    expected: _Value | None = None
