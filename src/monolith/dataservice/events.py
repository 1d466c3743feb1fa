"""What happens to the jobs of a dispatcher, as its journal keeps it: a job is what its events made of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from monolith.config import Config
from monolith.dataservice.dataset import DatasetConfig, Split

__all__ = [
    "EVENTS",
    "EpochState",
    "Event",
    "JobState",
    "Registered",
    "SplitGranted",
    "SplitMade",
    "TrainerEnded",
    "TrainerJoined",
    "TrainerLeft",
]


class Registered(Config):
    """A job was made."""

    event: Literal["registered"] = "registered"
    job: str
    dataset: DatasetConfig


class TrainerJoined(Config):
    """A trainer began, and gave back what it was granted behind the first `granted` splits of `epoch`."""

    event: Literal["joined"] = "joined"
    job: str
    trainer: int
    trainers: int
    session: int
    nonce: int
    epoch: int
    granted: int


class SplitMade(Config):
    """The next split of an epoch was cut; the queue of files is at `files` then, None if there is none."""

    event: Literal["made"] = "made"
    job: str
    epoch: int
    split: Split
    files: dict[str, int | str] | None = None


class SplitGranted(Config):
    """A trainer was given a split."""

    event: Literal["granted"] = "granted"
    job: str
    epoch: int
    trainer: int
    split: int


class TrainerEnded(Config):
    """A trainer was told that the epoch has no more splits for it: in this session it gets none any more."""

    event: Literal["ended"] = "ended"
    job: str
    epoch: int
    trainer: int


class TrainerLeft(Config):
    """A trainer is gone for good: what it had not read of `epoch` is for others, from its places in `opened` on."""

    event: Literal["left"] = "left"
    job: str
    trainer: int
    session: int
    nonce: int
    epoch: int
    granted: int
    opened: tuple[tuple[int, str], ...]


class EpochState(Config):
    """What became of one epoch."""

    splits: int
    """How many were cut."""
    files: tuple[str, ...] | None
    """The file of each group of splits; None: as in the epoch before, or none at all."""
    queue: dict[str, int | str] | None
    """Where the queue of files is."""
    given: tuple[tuple[int, tuple[int, ...]], ...]
    """Trainers, and the splits of each in the order it got them."""
    ended: tuple[int, ...]
    waiting: tuple[int, ...]
    places: tuple[tuple[int, str], ...] = ()
    """Splits that do not begin at their beginning, and where they do."""


class JobState(Config):
    """What all events of a job so far have led to."""

    event: Literal["state"] = "state"
    job: str
    dataset: DatasetConfig
    trainers: int
    sessions: tuple[tuple[int, int, int], ...]
    """Trainers, the newest session of each, and its nonce."""
    epochs: tuple[tuple[int, EpochState], ...]


Event = Registered | TrainerJoined | SplitMade | SplitGranted | TrainerEnded | TrainerLeft | JobState
EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
"""Reads an event back from its JSON."""
