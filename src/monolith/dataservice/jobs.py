"""The jobs of a dispatcher: which dataset, which trainers, who has which split. Every change is written down first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from monolith.dataservice.dataset import Split
from monolith.dataservice.events import (
    Event,
    JobState,
    Registered,
    SplitGranted,
    TrainerEnded,
    TrainerJoined,
    TrainerLeft,
)
from monolith.dataservice.job import Job
from monolith.dataservice.messages import (
    DescribeSplit,
    Granted,
    Joined,
    JoinJob,
    LeaveJob,
    NextSplit,
    Part,
    RegisterDataset,
)
from monolith.errors import InvalidArgumentError, StalePushError

__all__ = ["Jobs"]

MAX_EPOCHS_AHEAD = 1
"""How far a trainer may be ahead of the first epoch that nobody has begun: one that asks for epoch 10**9 is wrong."""


class Jobs:
    """All jobs. `record` is told every event before it happens; if it raises, nothing has changed. `happened` is called behind
    each. Safe from many threads.

    Example:
        >>> from monolith.dataservice.dataset import DatasetConfig
        >>> journal: list[Event] = []
        >>> jobs = Jobs(record=journal.append)
        >>> jobs.register(RegisterDataset(job="clicks", dataset=DatasetConfig(kind="click_stream")))
        >>> jobs.join(JoinJob(job="clicks", trainer=0, trainers=1, epoch=0, granted=0, session=1, nonce=7))
        Joined(joined=True, session=1)
        >>> jobs.next_split(NextSplit(job="clicks", trainer=0, session=1, epoch=0, granted=0))
        Granted(split=0, splits=1, position='')
        >>> [event.event for event in journal]
        ['registered', 'joined', 'made', 'granted']
    """

    def __init__(self, *, record: Callable[[Event], None], happened: Callable[[], None] = lambda: None) -> None:
        self._record, self._happened = record, happened
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    def apply(self, event: Event) -> None:
        """Let `event`, read from a journal, happen again."""
        if isinstance(event, Registered):
            self._jobs[event.job] = Job(event.dataset)
        elif isinstance(event, JobState):
            self._jobs[event.job] = Job.of_state(event)
        else:
            self._jobs[event.job].apply(event)

    def states(self) -> list[Event]:
        """What all events so far have led to, in as few; for `happened`, which nothing runs beside."""
        return [job.state(name) for name, job in self._jobs.items()]

    def register(self, request: RegisterDataset) -> None:
        """Make a job, unless it is there and reads the same."""
        with self._lock:
            there = self._jobs.get(request.job)
            if there is None:
                self._happens(Registered(job=request.job, dataset=request.dataset))
            elif there.dataset != request.dataset:
                raise InvalidArgumentError(
                    f"dataset: job {request.job!r} reads {there.dataset!r}; give the same, or another job"
                )

    def join(self, request: JoinJob) -> Joined:
        """Begin the session that the trainer proposes, unless there was a newer one."""
        with self._lock:
            job = self._job(request.job)
            if (newest := _newest(job, request)) is not None:
                return newest
            self._require_number(job, request)
            self._require_fitting(job, request)
            self._happens(TrainerJoined(**request.model_dump()))
            return Joined(joined=True, session=request.session)

    def leave(self, request: LeaveJob) -> Joined:
        """Give what a trainer had not read yet to the others, from the places where it stopped; in a session of its own."""
        with self._lock:
            job = self._job(request.job)
            if (newest := _newest(job, request)) is not None:
                return newest
            if job.dataset.sharding == "static":
                raise InvalidArgumentError(
                    f"release: job {request.job!r} shares out its splits for good; only trainer {request.trainer} can read them"
                )
            self._require_fitting(job, request)
            epoch = job.epochs.get(request.epoch)
            had = [] if epoch is None else epoch.given[request.trainer][: request.granted]
            if foreign := sorted({split for split, _ in request.opened} - set(had)):
                raise InvalidArgumentError(
                    f"open: split {foreign[0]} of epoch {request.epoch} was not trainer {request.trainer}'s; the state is of "
                    "another run"
                )
            self._happens(TrainerLeft(**request.model_dump()))
            return Joined(joined=True, session=request.session)

    def next_split(self, request: NextSplit) -> Granted:
        """The split behind the first `granted` ones of this trainer: granted now, or before to the same question."""
        with self._lock:
            job = self._job_of(request)
            self._require_near(job, request.epoch)
            epoch = job.epochs[request.epoch]
            given = epoch.given[request.trainer]
            if request.granted > len(given):
                raise _unknown_grants(request.granted, len(given))
            if request.granted == len(given) and request.trainer not in epoch.ended:
                self._grant(job, request)
            if request.granted == len(given):
                return Granted(split=None, splits=len(epoch.splits))
            split = given[request.granted]
            return Granted(split=split, splits=len(epoch.splits), position=epoch.places.get(split, ""))

    def describe(self, request: DescribeSplit) -> Part:
        """What to read for a split; only for the trainer that has it."""
        with self._lock:
            job = self._job_of(request)
            epoch = job.epochs.get(request.epoch)
            if epoch is None or request.split not in epoch.given[request.trainer]:
                raise StalePushError(
                    f"split {request.split} of epoch {request.epoch} is not trainer {request.trainer}'s; "
                    "join again with its newest state"
                )
            # Without the patterns, which may be long: the split has its file.
            return Part(dataset=job.dataset.model_copy(update={"paths": ()}), split=epoch.splits[request.split])

    def sessions(self) -> dict[str, dict[int, int]]:
        """The newest session of each trainer, by job."""
        return {name: job.sessions.copy() for name, job in self._jobs.copy().items()}

    def progress(self) -> dict[str, dict[str, int]]:
        """How far each job is: trainers that joined, its newest epoch, and the splits made and given in that one."""
        with self._lock:
            return {name: _progress(job) for name, job in self._jobs.items()}

    def _grant(self, job: Job, request: NextSplit) -> None:
        epoch = job.epochs[request.epoch]
        while (split := epoch.waiting_for(trainer=request.trainer, trainers=job.trainers)) is None:
            made = epoch.cut(request.job, request.epoch)
            if made is None:
                # For good: it will not ask again, and a split that comes back must not go to a question that was delayed.
                self._happens(TrainerEnded(job=request.job, epoch=request.epoch, trainer=request.trainer))
                return
            self._happens(made)
        self._happens(SplitGranted(job=request.job, epoch=request.epoch, trainer=request.trainer, split=split))

    def _happens(self, event: Event) -> None:
        self._record(event)
        self.apply(event)
        self._happened()

    def _job(self, name: str) -> Job:
        if name not in self._jobs:
            known = ", ".join(map(repr, self._jobs)) or "none"
            raise InvalidArgumentError(f"job: {name!r} is not registered, known are {known}; give its dataset")
        return self._jobs[name]

    def _job_of(self, request: NextSplit | DescribeSplit) -> Job:
        """The job of a trainer that nobody has replaced."""
        job = self._job(request.job)
        if job.sessions.get(request.trainer) != request.session:
            raise StalePushError(
                f"trainer {request.trainer} of job {request.job!r} has begun anew elsewhere; this one should end"
            )
        return job

    def _require_number(self, job: Job, request: JoinJob) -> None:
        if request.trainer >= request.trainers:
            raise InvalidArgumentError(f"trainer: expected less than {request.trainers}, got {request.trainer}")
        if job.dataset.sharding == "static" and job.trainers not in (0, request.trainers):
            raise InvalidArgumentError(
                f"trainers: job {request.job!r} is shared out to {job.trainers}, got {request.trainers}; use dynamic sharding "
                "to change their number"
            )

    def _require_fitting(self, job: Job, request: JoinJob | LeaveJob) -> None:
        self._require_near(job, request.epoch)
        epoch = job.epochs.get(request.epoch)
        known = 0 if epoch is None else len(epoch.given[request.trainer])
        if request.granted > known:
            raise _unknown_grants(request.granted, known)

    def _require_near(self, job: Job, epoch: int) -> None:
        most = max(job.epochs, default=-1) + MAX_EPOCHS_AHEAD
        if epoch > most:
            raise InvalidArgumentError(
                f"epoch: expected at most {most}, got {epoch}; was the journal of another run given?"
            )


def _newest(job: Job, request: JoinJob | LeaveJob) -> Joined | None:
    """The answer to a request whose session is not new: whether it is the same request again."""
    newest = job.sessions.get(request.trainer, 0)
    if request.session > newest:
        return None
    again = request.session == newest and request.nonce == job.nonces[request.trainer]
    return Joined(joined=again, session=newest)


def _unknown_grants(granted: int, known: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"granted: the trainer says it had {granted} splits, the dispatcher knows of {known}; its journal is of "
        "another run, or the trainer was released"
    )


def _progress(job: Job) -> dict[str, int]:
    newest = max(job.epochs, default=0)
    epoch = job.epochs.get(newest)
    splits: list[Split] = [] if epoch is None else epoch.splits
    given = 0 if epoch is None else sum(map(len, epoch.given.values()))
    return {"trainers": len(job.sessions), "epoch": newest, "splits": len(splits), "given": given}
