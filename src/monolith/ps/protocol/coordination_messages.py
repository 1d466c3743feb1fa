"""The JSON text of the calls by which workers find out about each other through a server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from monolith.cluster.coordination import Phase
from monolith.config import Config, Positive
from monolith.transport.calls import Name, Whole

__all__ = ["CountFrom", "Greet", "Hold", "PlaceBarrier", "ReadKeys", "SetKey"]

_Value = Annotated[str, Field(max_length=65536)]


class Greet(Config):
    """Who calls. Every call has it and renews the worker's lease, so a server that was started again knows its workers soon.

    Answer of a call that has nothing else: `Seen`.
    """

    index: Annotated[int, Field(ge=0, lt=65536)]
    """Number of the worker; 0 is the chief."""
    epoch: Whole
    """Which incarnation of the worker it is. From the moment a larger one is seen, smaller ones are refused."""
    lease: Annotated[Positive, Field(le=86400)]
    """Seconds for which the worker counts as alive after each call."""
    phase: Phase = "joined"
    run: Annotated[str, Field(max_length=255)] = ""
    """Name of this launch of the job. Members of an earlier launch are forgotten when a worker of the next one calls."""


class PlaceBarrier(Config):
    """Hold all workers. Answer: `{"placed": bool, "barrier": Barrier}`, with the barrier that is there then."""

    who: Greet
    action: Annotated[str, Field(max_length=255)] = ""
    token: Whole
    """Drawn by the caller: the same one again, because the answer was lost, finds the barrier placed."""


class Hold(Config):
    """A worker waits behind a barrier, and asks whether it still has to. Answer: `{"held": bool}`."""

    who: Greet
    number: Whole


class CountFrom(Config):
    """The chief has restored global step `step`. Changes nothing on a server that knows the global step already."""

    step: Whole


class ReadKeys(Config):
    """Answer: `{"values": {key: value}}` of all keys that begin with `prefix`."""

    prefix: Annotated[str, Field(max_length=255)]


class SetKey(Config):
    """Set a key that has no value yet. Answer: `{"value": the one it has then}`."""

    key: Name
    value: _Value
