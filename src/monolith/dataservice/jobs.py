"""The jobs of a dispatcher: datasets, trainers, and which trainer has which split. Every change is journaled first."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from monolith.data.sources.files import FileQueue
from monolith.dataservice.dataset import DatasetConfig, Split
from monolith.dataservice.journal import (
    EpochState,
    JobEvent,
    JobState,
    Registered,
    SplitGranted,
    SplitMade,
    TrainerEnded,
    TrainerJoined,
    TrainerLeft,
)
from monolith.dataservice.protocol import (
    DescribedSplit,
    DescribeSplit,
    Granted,
    JoinedJob,
    JoinJob,
    LeaveJob,
    NextSplit,
    RegisterDataset,
)
from monolith.errors import InvalidArgumentError, StalePushError

__all__ = ["DataJob", "EpochSplits", "Jobs"]


class EpochSplits:
    """The splits of one epoch and the trainers that have them. It changes by events only, so that a journal can replay it.

    Example:
        >>> epoch = EpochSplits(DatasetConfig(kind="click_stream", splits=2))
        >>> cut = epoch.cut("job", 0)
        >>> epoch.add(cut.split, cut.files)
        >>> epoch.waiting_for(trainer=0, trainers=1)
        0
        >>> epoch.grant(trainer=0, split=0)
        >>> epoch.given[0], epoch.waiting_for(trainer=0, trainers=1)
        ([0], None)
    """

    def __init__(self, dataset: DatasetConfig) -> None:
        self._dataset = dataset
        self._files = FileQueue(dataset.paths) if dataset.paths else None
        self.splits: list[Split] = []
        """All splits made so far, by number."""
        self.given: dict[int, list[int]] = defaultdict(list)
        """The splits of each trainer, in the order they were granted."""
        self.ended: set[int] = set()
        """Trainers that have been notified that there are no more splits."""
        self._waiting: deque[int] = deque()
        """Splits without a trainer, in the order in which they are granted."""
        self.starts: dict[int, str] = {}
        """Start positions of splits that a trainer read in part before it left."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the splits made so far, in order."""
        return tuple(split.file for split in self.splits[:: self._dataset.splits] if split.file is not None)

    def state(self, before: EpochSplits | None) -> EpochState:
        """Return the state of the epoch. Files that equal those of the epoch `before` are left out."""
        same = before is not None and before.files == self.files
        return EpochState(
            splits=len(self.splits),
            files=None if same or self._files is None else self.files,
            queue=None if self._files is None else self._files.state_dict(),
            given=tuple((trainer, tuple(splits)) for trainer, splits in self.given.items()),
            ended=tuple(sorted(self.ended)),
            waiting=tuple(self._waiting),
            places=tuple(self.starts.items()),
        )

    @classmethod
    def of_state(cls, dataset: DatasetConfig, state: EpochState, before: EpochSplits | None) -> EpochSplits:
        """Return the epoch that has this state."""
        epoch, parts = cls(dataset), dataset.splits
        files = before.files if state.files is None and before is not None else state.files or ()
        for number in range(state.splits):
            file = files[number // parts] if files else None
            epoch.splits.append(Split(number=number, file=file, part=number % parts, parts=parts))
        if epoch._files is not None and state.queue is not None:
            epoch._files.load_state_dict(state.queue)
        epoch.given.update({trainer: list(splits) for trainer, splits in state.given})
        epoch.ended.update(state.ended)
        epoch._waiting.extend(state.waiting)
        epoch.starts.update(state.places)
        return epoch

    def cut(self, job: str, epoch: int) -> SplitMade | None:
        """Return the event that makes the next split. None at the end of the data."""
        number, parts = len(self.splits), self._dataset.splits
        if number % parts:
            split = self.splits[-1].model_copy(update={"number": number, "part": number % parts})
            files = None if self._files is None else self._files.state_dict()
        elif self._files is None:
            if number:
                return None
            split, files = Split(number=0, parts=parts), None
        else:
            found = self._files.peek()
            if found is None:
                return None
            split, files = Split(number=number, file=found[0], parts=parts), found[1]
        return SplitMade(job=job, epoch=epoch, split=split, files=files)

    def add(self, split: Split, files: dict[str, int | str] | None) -> None:
        """Record that a split was made."""
        if self._files is not None and files is not None:
            self._files.load_state_dict(files)
        self.splits.append(split)
        self._waiting.append(split.number)

    def waiting_for(self, *, trainer: int, trainers: int) -> int | None:
        """Return the first free split that `trainer` may have, which with static sharding is every `trainers`-th. Or None."""
        static = self._dataset.sharding == "static"
        return next((split for split in self._waiting if not static or split % trainers == trainer), None)

    def grant(self, *, trainer: int, split: int) -> None:
        """Record that a split was granted to a trainer."""
        self._waiting.remove(split)
        self.given[trainer].append(split)

    def take_back(self, *, trainer: int, granted: int) -> None:
        """Take back the splits of a trainer after the first `granted`. They are granted again before all others."""
        given = self.given[trainer]
        self.ended.discard(trainer)
        self._waiting.extendleft(reversed(given[granted:]))
        del given[granted:]

    def leave(self, *, trainer: int, opened: dict[int, str]) -> None:
        """Free the splits in `opened` of a trainer that has left, to be read from these positions on. It has read the rest."""
        self.starts |= opened
        self._waiting.extendleft(reversed(opened))
        self.given[trainer].clear()


class DataJob:
    """A dataset that trainers read epoch by epoch."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self.dataset = dataset
        self.trainers = 0
        """How many there are, according to the last one that joined."""
        self.sessions: dict[int, int] = {}
        """The newest session of each trainer."""
        self.nonces: dict[int, int] = {}
        """The nonce of each newest session."""
        self.epochs: dict[int, EpochSplits] = defaultdict(lambda: EpochSplits(dataset))

    def apply(self, event: JobEvent) -> None:
        """Apply an event."""
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
        """Return the state after all events so far."""
        numbers = sorted(self.epochs)
        return JobState(
            job=name,
            dataset=self.dataset,
            trainers=self.trainers,
            sessions=tuple((trainer, session, self.nonces[trainer]) for trainer, session in self.sessions.items()),
            epochs=tuple((number, self.epochs[number].state(self.epochs.get(number - 1))) for number in numbers),
        )

    @classmethod
    def of_state(cls, state: JobState) -> DataJob:
        """Return the job that has this state."""
        job = cls(state.dataset)
        job.trainers = state.trainers
        for trainer, session, nonce in state.sessions:
            job.sessions[trainer], job.nonces[trainer] = session, nonce
        for number, epoch in state.epochs:
            job.epochs[number] = EpochSplits.of_state(state.dataset, epoch, job.epochs.get(number - 1))
        return job


MAX_EPOCHS_AHEAD = 1
"""How many epochs a trainer may be ahead of the newest one. A request for epoch 10**9 is an error."""


class Jobs:
    """All jobs. Thread-safe.

    `record` is called with every event before it takes effect, and nothing changes if it raises. `happened` is called after it.

    Example:
        >>> from monolith.dataservice.dataset import DatasetConfig
        >>> journal: list[JobEvent] = []
        >>> jobs = Jobs(record=journal.append)
        >>> jobs.register(RegisterDataset(job="clicks", dataset=DatasetConfig(kind="click_stream")))
        >>> jobs.join(JoinJob(job="clicks", trainer=0, trainers=1, epoch=0, granted=0, session=1, nonce=7))
        JoinedJob(joined=True, session=1)
        >>> jobs.next_split(NextSplit(job="clicks", trainer=0, session=1, epoch=0, granted=0))
        Granted(split=0, splits=1, position='')
        >>> [event.event for event in journal]
        ['registered', 'joined', 'made', 'granted']
    """

    def __init__(self, *, record: Callable[[JobEvent], None], happened: Callable[[], None] = lambda: None) -> None:
        self._record, self._happened = record, happened
        self._jobs: dict[str, DataJob] = {}
        self._lock = threading.Lock()

    def apply(self, event: JobEvent) -> None:
        """Apply an event that was read from a journal."""
        if isinstance(event, Registered):
            self._jobs[event.job] = DataJob(event.dataset)
        elif isinstance(event, JobState):
            self._jobs[event.job] = DataJob.of_state(event)
        else:
            self._jobs[event.job].apply(event)

    def states(self) -> list[JobEvent]:
        """Return the state of every job, as events. Called by `happened`, while nothing else changes."""
        return [job.state(name) for name, job in self._jobs.items()]

    def register(self, request: RegisterDataset) -> None:
        """Create a job, unless it exists with the same dataset."""
        with self._lock:
            there = self._jobs.get(request.job)
            if there is None:
                self._happens(Registered(job=request.job, dataset=request.dataset))
            elif there.dataset != request.dataset:
                raise InvalidArgumentError(
                    f"dataset: job {request.job!r} reads {there.dataset!r}; give the same, or another job"
                )

    def join(self, request: JoinJob) -> JoinedJob:
        """Start the session that the trainer proposes, unless there was a newer one."""
        with self._lock:
            job = self._job(request.job)
            if (newest := _newest(job, request)) is not None:
                return newest
            self._require_number(job, request)
            self._require_fitting(job, request)
            self._happens(TrainerJoined(**request.model_dump()))
            return JoinedJob(joined=True, session=request.session)

    def leave(self, request: LeaveJob) -> JoinedJob:
        """Free what a trainer had not read yet for others, from the positions where it stopped. It starts a session."""
        with self._lock:
            job = self._job(request.job)
            if (newest := _newest(job, request)) is not None:
                return newest
            if job.dataset.sharding == "static":
                raise InvalidArgumentError(
                    f"release: job {request.job!r} has static sharding; only trainer {request.trainer} can read its splits"
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
            return JoinedJob(joined=True, session=request.session)

    def next_split(self, request: NextSplit) -> Granted:
        """Return the split after the first `granted` ones of this trainer. It is granted now, unless this is a retry."""
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
            return Granted(split=split, splits=len(epoch.splits), position=epoch.starts.get(split, ""))

    def describe(self, request: DescribeSplit) -> DescribedSplit:
        """Return what to read for a split. Only for the trainer that has it."""
        with self._lock:
            job = self._job_of(request)
            epoch = job.epochs.get(request.epoch)
            if epoch is None or request.split not in epoch.given[request.trainer]:
                raise StalePushError(
                    f"split {request.split} of epoch {request.epoch} is not trainer {request.trainer}'s; "
                    "join again with its newest state"
                )
            # Without the patterns, which may be long: the split names its file.
            return DescribedSplit(
                dataset=job.dataset.model_copy(update={"paths": ()}), split=epoch.splits[request.split]
            )

    def sessions(self) -> dict[str, dict[int, int]]:
        """Return the newest session of each trainer, by job."""
        return {name: job.sessions.copy() for name, job in self._jobs.copy().items()}

    def progress(self) -> dict[str, dict[str, int]]:
        """Return the progress of each job: its trainers, its newest epoch, and the splits made and granted in that epoch."""
        with self._lock:
            return {name: _progress(job) for name, job in self._jobs.items()}

    def _grant(self, job: DataJob, request: NextSplit) -> None:
        epoch = job.epochs[request.epoch]
        while (split := epoch.waiting_for(trainer=request.trainer, trainers=job.trainers)) is None:
            made = epoch.cut(request.job, request.epoch)
            if made is None:
                # Final: the trainer will not ask again, and a split that is freed must not go to a delayed request.
                self._happens(TrainerEnded(job=request.job, epoch=request.epoch, trainer=request.trainer))
                return
            self._happens(made)
        self._happens(SplitGranted(job=request.job, epoch=request.epoch, trainer=request.trainer, split=split))

    def _happens(self, event: JobEvent) -> None:
        self._record(event)
        self.apply(event)
        self._happened()

    def _job(self, name: str) -> DataJob:
        if name not in self._jobs:
            known = ", ".join(map(repr, self._jobs)) or "none"
            raise InvalidArgumentError(f"job: {name!r} is not registered, known are {known}; give its dataset")
        return self._jobs[name]

    def _job_of(self, request: NextSplit | DescribeSplit) -> DataJob:
        """Return the job of a trainer that was not replaced."""
        job = self._job(request.job)
        if job.sessions.get(request.trainer) != request.session:
            raise StalePushError(
                f"trainer {request.trainer} of job {request.job!r} has been started again elsewhere; this process should end"
            )
        return job

    def _require_number(self, job: DataJob, request: JoinJob) -> None:
        if request.trainer >= request.trainers:
            raise InvalidArgumentError(f"trainer: expected less than {request.trainers}, got {request.trainer}")
        if job.dataset.sharding == "static" and job.trainers not in (0, request.trainers):
            raise InvalidArgumentError(
                f"trainers: job {request.job!r} has static sharding over {job.trainers}, got {request.trainers}; use "
                "dynamic sharding to change their number"
            )

    def _require_fitting(self, job: DataJob, request: JoinJob | LeaveJob) -> None:
        self._require_near(job, request.epoch)
        epoch = job.epochs.get(request.epoch)
        known = 0 if epoch is None else len(epoch.given[request.trainer])
        if request.granted > known:
            raise _unknown_grants(request.granted, known)

    def _require_near(self, job: DataJob, epoch: int) -> None:
        most = max(job.epochs, default=-1) + MAX_EPOCHS_AHEAD
        if epoch > most:
            raise InvalidArgumentError(
                f"epoch: expected at most {most}, got {epoch}; was the journal of another run given?"
            )


def _newest(job: DataJob, request: JoinJob | LeaveJob) -> JoinedJob | None:
    """Return the answer to a request whose session is not new, which may be a retry. None if the session is new."""
    newest = job.sessions.get(request.trainer, 0)
    if request.session > newest:
        return None
    again = request.session == newest and request.nonce == job.nonces[request.trainer]
    return JoinedJob(joined=again, session=newest)


def _unknown_grants(granted: int, known: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"granted: the trainer says it had {granted} splits, the dispatcher knows of {known}; its journal is of "
        "another run, or the trainer was released"
    )


def _progress(job: DataJob) -> dict[str, int]:
    newest = max(job.epochs, default=0)
    epoch = job.epochs.get(newest)
    splits: list[Split] = [] if epoch is None else epoch.splits
    given = 0 if epoch is None else sum(map(len, epoch.given.values()))
    return {"trainers": len(job.sessions), "epoch": newest, "splits": len(splits), "given": given}
