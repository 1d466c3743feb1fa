"""The splits of one epoch: cut one by one, each granted to one trainer, taken back when that one begins again."""

from __future__ import annotations

from collections import defaultdict, deque

from monolith.data.sources.files import FileQueue
from monolith.dataservice.dataset import DatasetConfig, Split
from monolith.dataservice.events import EpochState, SplitMade

__all__ = ["EpochSplits"]


class EpochSplits:
    """Who has which split. Nothing here happens but by events, so that a journal can repeat it.

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
        """All that were cut, by number."""
        self.given: dict[int, list[int]] = defaultdict(list)
        """The splits of each trainer, in the order it got them."""
        self.ended: set[int] = set()
        """Trainers that were told that there is no more."""
        self._waiting: deque[int] = deque()
        """Splits that nobody has, in the order they are to be given."""
        self.places: dict[int, str] = {}
        """Where splits begin that somebody read a part of before leaving."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that were cut, in order."""
        return tuple(split.file for split in self.splits[:: self._dataset.splits] if split.file is not None)

    def state(self, before: EpochSplits | None) -> EpochState:
        """All of it; files that are those of the epoch `before` are not said again."""
        same = before is not None and before.files == self.files
        return EpochState(
            splits=len(self.splits),
            files=None if same or self._files is None else self.files,
            queue=None if self._files is None else self._files.state_dict(),
            given=tuple((trainer, tuple(splits)) for trainer, splits in self.given.items()),
            ended=tuple(sorted(self.ended)),
            waiting=tuple(self._waiting),
            places=tuple(self.places.items()),
        )

    @classmethod
    def of_state(cls, dataset: DatasetConfig, state: EpochState, before: EpochSplits | None) -> EpochSplits:
        """What `state` of an epoch said."""
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
        epoch.places.update(state.places)
        return epoch

    def cut(self, job: str, epoch: int) -> SplitMade | None:
        """The event of the next split that has not been cut yet; None when the data has ended."""
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
        """A split was cut."""
        if self._files is not None and files is not None:
            self._files.load_state_dict(files)
        self.splits.append(split)
        self._waiting.append(split.number)

    def waiting_for(self, *, trainer: int, trainers: int) -> int | None:
        """The first split that nobody has and `trainer` may have; with static sharding that is every `trainers`-th."""
        static = self._dataset.sharding == "static"
        return next((split for split in self._waiting if not static or split % trainers == trainer), None)

    def grant(self, *, trainer: int, split: int) -> None:
        """A trainer was given a split."""
        self._waiting.remove(split)
        self.given[trainer].append(split)

    def take_back(self, *, trainer: int, granted: int) -> None:
        """A trainer gave back what it got behind the first `granted` splits: they are given again, before all others."""
        given = self.given[trainer]
        self.ended.discard(trainer)
        self._waiting.extendleft(reversed(given[granted:]))
        del given[granted:]

    def leave(self, *, trainer: int, opened: dict[int, str]) -> None:
        """A trainer is gone for good: what it has of `opened` is for others, from those places on; the rest it has read."""
        self.places |= opened
        self._waiting.extendleft(reversed(opened))
        self.given[trainer].clear()
