"""One job of a dispatcher: what its events have made of it."""

from __future__ import annotations

from collections import defaultdict

from monolith.dataservice.dataset import DatasetConfig
from monolith.dataservice.epoch import EpochSplits
from monolith.dataservice.events import (
    Event,
    JobState,
    SplitGranted,
    SplitMade,
    TrainerEnded,
    TrainerJoined,
    TrainerLeft,
)

__all__ = ["Job"]


class Job:
    """One dataset that is read, epoch by epoch, by some trainers."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self.dataset = dataset
        self.trainers = 0
        """How many there are, as the last one that joined said."""
        self.sessions: dict[int, int] = {}
        """The newest session of each trainer."""
        self.nonces: dict[int, int] = {}
        """Who began it."""
        self.epochs: dict[int, EpochSplits] = defaultdict(lambda: EpochSplits(dataset))

    def apply(self, event: Event) -> None:
        """Let `event` happen."""
        if isinstance(event, TrainerJoined):
            self.trainers = event.trainers
            self._begin(event)
        elif isinstance(event, TrainerLeft):
            self._begin(event)
            for number, epoch in self.epochs.items():
                if number <= event.epoch:
                    epoch.leave(trainer=event.trainer, opened=dict(event.opened) if number == event.epoch else {})
        elif isinstance(event, SplitMade):
            self.epochs[event.epoch].add(event.split, event.files)
        elif isinstance(event, SplitGranted):
            self.epochs[event.epoch].grant(trainer=event.trainer, split=event.split)
        elif isinstance(event, TrainerEnded):
            self.epochs[event.epoch].ended.add(event.trainer)

    def _begin(self, event: TrainerJoined | TrainerLeft) -> None:
        self.sessions[event.trainer], self.nonces[event.trainer] = event.session, event.nonce
        for number, epoch in self.epochs.items():
            if number >= event.epoch:
                epoch.take_back(trainer=event.trainer, granted=event.granted if number == event.epoch else 0)

    def state(self, name: str) -> JobState:
        """What its events have led to, as one."""
        numbers = sorted(self.epochs)
        return JobState(
            job=name,
            dataset=self.dataset,
            trainers=self.trainers,
            sessions=tuple((trainer, session, self.nonces[trainer]) for trainer, session in self.sessions.items()),
            epochs=tuple((number, self.epochs[number].state(self.epochs.get(number - 1))) for number in numbers),
        )

    @classmethod
    def of_state(cls, state: JobState) -> Job:
        """What `state` said."""
        job = cls(state.dataset)
        job.trainers = state.trainers
        for trainer, session, nonce in state.sessions:
            job.sessions[trainer], job.nonces[trainer] = session, nonce
        for number, epoch in state.epochs:
            job.epochs[number] = EpochSplits.of_state(state.dataset, epoch, job.epochs.get(number - 1))
        return job
