"""`DataShards`: the data of a run in a fixed number of shards, dealt to its ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from monolith.data.sources.source import HasLag, StreamLag
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch

__all__ = [
    "DataShards",
    "DataStart",
    "PartsAhead",
    "ShardBatches",
    "ShardsInTurn",
    "join_positions",
    "joined_position",
    "shards_of_position",
    "skip_history",
]

_log = logging.getLogger(__name__)

ShardBatches = list[tuple[int, Batch]]
"""The batches of one rank in one step, each with the number of the data shard that it is from."""
_SHARDS = "data_shards"


class _Shard:
    """One shard of the data, and how far it has been read in this pass."""

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source = source
        self.batches = 0
        self.ended = False
        self._reading: Iterator[Batch] | None = None

    def next(self) -> Batch | None:
        if self._reading is None:
            self._reading = iter(self.source)
        batch = next(self._reading, None)
        if batch is None:
            self.ended, self._reading = True, None
        else:
            self.batches += 1
        return batch

    def restart(self, start: object) -> None:
        # A source that was read to its end has started again by itself.
        if not self.ended and start is not None:
            self.source.load_state_dict(start)  # type: ignore[attr-defined]
        self.batches, self.ended, self._reading = 0, False, None

    def position(self) -> dict[str, Any]:
        own = {"batches": self.batches, "ended": self.ended}
        return own if not _has_position(self.source) else {**own, "state": self.source.state_dict()}  # type: ignore[attr-defined]

    def load_arrived(self, position: Mapping[str, Any]) -> None:
        """Continue from a position of a source that waits: that it had ended does not mean that nothing has come since."""
        self._reading, self.batches, self.ended = None, 0, False
        self.source.load_state_dict(position["state"])  # type: ignore[attr-defined]
        if position.get("ended"):
            skip_history(self.source)

    def load(self, position: Mapping[str, Any]) -> None:
        self._reading, self.batches, self.ended = None, int(position["batches"]), bool(position["ended"])
        if _has_position(self.source):
            self.source.load_state_dict(position["state"])  # type: ignore[attr-defined]


class DataShards:
    """The shards of one rank. Iterating gives the `ShardBatches` of each step.

    Data is divided into `shards`, for the whole life of a run. Rank r of n reads shards r, r + n, r + 2n and so on. The position
    is kept by shard, so a run that continues with another number of ranks reads every batch once, and none twice.

    A step takes the next batch of one shard, of those that are furthest behind. With `together` it takes one of every shard that
    has not ended, so that it does not depend on the number of ranks.

    Args:
        source: with `shard(index, count)`. One without is read as a whole by every rank.
        shards: how many, on all ranks together.
        rank: of this process.
        ranks: how many there are.
        together: a step takes a batch of every shard.

    Example:
        >>> import torch
        >>> from monolith.data.synthetic import ClickStream, ClickStreamConfig
        >>> stream = ClickStream(ClickStreamConfig(users=9, items=9, batches=4, batch_size=2))
        >>> own = DataShards(stream, shards=4, rank=1, ranks=2)
        >>> [[number for number, batch in parts] for parts in own]
        [[1], [3]]
    """

    def __init__(
        self, source: Iterable[Batch], *, shards: int, rank: int = 0, ranks: int = 1, together: bool = False
    ) -> None:
        if shards < 1:
            raise InvalidArgumentError(f"shards: expected at least 1, got {shards}")
        self.shards, self.together = shards, together
        divides = hasattr(source, "shard")
        if not divides and (together or shards != ranks):
            raise ConfigError(
                f"source: a {type(source).__name__} has no shard(index, count), so it cannot be divided into the {shards} parts "
                "that data_shards or micro_batches ask for; give a Source, such as IteratorSource(function)"
            )
        if not divides and ranks > 1:
            _log.warning(
                "%s cannot be divided among ranks, it has no shard(index, count): rank %d of %d trains on all of it",
                type(source).__name__,
                rank,
                ranks,
            )
        numbers = range(rank, shards, ranks)
        if not numbers:
            _log.warning("rank %d of %d has no data: there are %d data shards for life", rank, ranks, shards)
        self.waits = bool(getattr(source, "waits", False))
        """Whether a read may wait for records that do not exist yet."""
        self._whole = source
        self._shards = {n: _Shard(source.shard(n, shards) if divides else source) for n in numbers}  # type: ignore[attr-defined]
        self.resumable = all(_has_position(shard.source) for shard in self._shards.values())
        """Whether the position of all shards is known."""
        self._starts = {n: shard.position().get("state") for n, shard in self._shards.items()}

    def __iter__(self) -> Iterator[ShardBatches]:
        """Continue after the batches that were given last. At the end of the pass, `restart` begins the next one."""
        while True:
            parts = self._together() if self.together else self._next()
            if not parts:
                return
            yield parts

    def interrupt(self) -> None:
        """Let a read that waits for records end at once. Called by another thread."""
        for shard in self._shards.values():
            shard.source.interrupt()  # type: ignore[attr-defined]

    def fix_start(self) -> bool:
        """Decide now where the shards begin, see `Source.fix_start`. Returns whether a position has changed by that."""
        changed = [shard.source.fix_start() for shard in self._shards.values()]  # type: ignore[attr-defined]
        return any(changed)

    def lag(self) -> StreamLag | None:
        """Return how far this rank is behind its part of a stream. None if that is not known."""
        sources = [shard.source for shard in self._shards.values()]
        return sources[0].lag() if len(sources) == 1 and isinstance(sources[0], HasLag) else None

    def _together(self) -> ShardBatches:
        drawn = ((number, shard.next()) for number, shard in self._shards.items() if not shard.ended)
        return [(number, batch) for number, batch in drawn if batch is not None]

    def _next(self) -> ShardBatches:
        while left := [(shard.batches, number) for number, shard in self._shards.items() if not shard.ended]:
            number = min(left)[1]
            if (batch := self._shards[number].next()) is not None:
                return [(number, batch)]
        return []

    def restart(self) -> None:
        """Begin the next pass over the data."""
        for number, shard in self._shards.items():
            shard.restart(self._starts[number])

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the shards of this rank. `join_positions` makes one of those of all ranks."""
        return {_SHARDS: self.shards, "positions": {number: s.position() for number, s in self._shards.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the positions of all shards, those of this rank among them.

        The position of a source that waits may be that of another number of shards, or of a run that did not divide it.
        """
        saved = shards_of_position(state)
        if self.waits:
            own = saved == self.shards and all(number in state["positions"] for number in self._shards)
            joined = None if own else joined_position(self._whole, state)
            for number, shard in self._shards.items():
                shard.load_arrived(state["positions"][number] if own else {"state": joined})
            return
        if saved is None:
            raise InvalidArgumentError(
                "the position in the data was saved by a run whose data was not divided into shards: ranks cannot go on there. "
                "Continue with one process, or start with the first batch or other data with RunConfig(resume_data=False)"
            )
        if saved != self.shards:
            raise InvalidArgumentError(
                f"the position in the data was saved by a run with {saved} data shards, there are {self.shards} now; set "
                f"data_shards={saved} (or micro_batches), which never changes, or RunConfig(resume_data=False)"
            )
        missing = [number for number in self._shards if number not in state["positions"]]
        if missing:
            raise InvalidArgumentError(f"the position in the data lacks that of data shards {missing}")
        for number, shard in self._shards.items():
            shard.load(state["positions"][number])


class ShardsInTurn:
    """All shards of the data in one process that trains alone: where ranks have stopped, and where ranks may continue.

    Example:
        >>> from monolith.data.synthetic import ClickStream, ClickStreamConfig
        >>> stream = ClickStream(ClickStreamConfig(users=9, items=9, batches=4, batch_size=2))
        >>> len(list(ShardsInTurn(stream, shards=3)))
        4
    """

    def __init__(self, source: Iterable[Batch], *, shards: int) -> None:
        self._shards = DataShards(source, shards=shards)
        self.resumable = self._shards.resumable
        """Whether the position of all shards is known."""

    def __iter__(self) -> Iterator[Batch]:
        """Continue after the last batch. At the end the source starts again."""
        for parts in self._shards:
            yield from (batch for _, batch in parts)
        self._shards.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out."""
        return self._shards.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._shards.load_state_dict(state)


class PartsAhead:
    """Shows the parts of the next step before they are taken, because all ranks must agree on a step before it is made.

    Args:
        ahead: `DataShards`, or something that reads them ahead.
        sees_last: know whether there are parts after the next ones, which reads one step further.

    Example:
        >>> from monolith.data.synthetic import ClickStream, ClickStreamConfig
        >>> stream = ClickStream(ClickStreamConfig(users=9, items=9, batches=2, batch_size=2))
        >>> ahead = PartsAhead(DataShards(stream, shards=1), sees_last=True)
        >>> ahead.peek()[0][0], ahead.is_last, ahead.state_dict()["positions"][0]["batches"]
        (0, False, 0)
        >>> ahead.take()
        >>> ahead.state_dict()["positions"][0]["batches"], len(ahead.peek()), ahead.is_last
        (1, 1, True)
    """

    def __init__(self, ahead: Any, *, sees_last: bool) -> None:  # noqa: ANN401 - `DataShards`, `Prefetch` of them
        self._ahead, self._depth = ahead, 2 if sees_last else 1
        self._drawn: list[tuple[ShardBatches, dict[str, Any]]] = []
        self._taken: dict[str, Any] = ahead.state_dict()
        self._reading: Iterator[ShardBatches] | None = iter(ahead)

    def peek_arrived(self, timeout: float) -> ShardBatches | None:
        """Return the parts of the next step of a source that waits, nothing if none come for `timeout` seconds.

        None at the end of the pass. `ahead` must be a `Prefetch`.
        """
        if not self._drawn and self._reading is not None:
            try:
                parts = self._ahead.take(timeout)
            except TimeoutError:
                return []
            if parts is None:
                self._reading = None
            else:
                self._drawn.append((parts, self._ahead.state_dict()))
        return self.peek() if self._drawn or self._reading is None else []

    def peek(self) -> ShardBatches | None:
        """Return the parts of the next step. None at the end of the pass."""
        while len(self._drawn) < self._depth and self._reading is not None:
            parts = next(self._reading, None)
            if parts is None:
                self._reading = None
            else:
                self._drawn.append((parts, self._ahead.state_dict()))
        if not self._drawn and self._reading is None:
            # Behind the last batch the source knows that it has ended.
            self._taken = self._ahead.state_dict()
        return self._drawn[0][0] if self._drawn else None

    @property
    def is_last(self) -> bool:
        """Whether the pass ends with the parts that `peek` returned, if it was made to know that."""
        return len(self._drawn) == 1 and self._depth == 2

    def take(self) -> None:
        """The parts that `peek` returned are trained."""
        self._taken = self._drawn.pop(0)[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the parts that were taken."""
        return self._taken


class DataStart:
    """Where data that ranks read as a whole began, so that a run that starts over in the same process begins there too.

    Example:
        >>> from monolith.data import IteratorSource
        >>> start, stream = DataStart(), IteratorSource(lambda: iter([{"id": 1}, {"id": 2}]))
        >>> start.rewind(stream)
    """

    def __init__(self) -> None:
        self._state: object = None

    def rewind(self, data: object) -> None:
        """Remember the position of `data` when first called, and return to it later. Shards are made anew for each start."""
        if hasattr(data, "shard") or not _has_position(data):
            return
        if self._state is None:
            self._state = deepcopy(data.state_dict())  # type: ignore[attr-defined]
        else:
            data.load_state_dict(deepcopy(self._state))  # type: ignore[attr-defined]


def skip_history(source: object) -> None:
    """Let a source that reads files first, and then a stream, begin with the stream. Does nothing to others.

    Example:
        >>> skip_history([])
    """
    if hasattr(source, "skip_history"):
        source.skip_history()


def joined_position(source: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401 - a source that waits
    """Return the position of a whole source that waits, given that of a run of ranks or of one process.

    Example:
        >>> joined_position(None, {"partitions": "{}"})
        {'partitions': '{}'}
    """
    if shards_of_position(state) is None:
        return state
    shards: list[Mapping[str, Any]] = [position["state"] for position in state["positions"].values()]
    joined: Mapping[str, Any] = source.join_state_dicts(shards)
    return joined


def shards_of_position(state: object) -> int | None:
    """Return the number of data shards that a position in the data is of. None: it is no position of ranks.

    Example:
        >>> shards_of_position({"data_shards": 4, "positions": {}}), shards_of_position({"file": 2})
        (4, None)
    """
    return int(state[_SHARDS]) if isinstance(state, Mapping) and _SHARDS in state else None


def join_positions(states: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return one position of all shards, given that of each rank. None if a rank does not know its own.

    Ranks that have read nothing may still have the position of a run that was not divided, all the same one.

    Example:
        >>> join_positions([{"data_shards": 2, "positions": {0: "a"}}, {"data_shards": 2, "positions": {1: "b"}}])
        {'data_shards': 2, 'positions': {0: 'a', 1: 'b'}}
    """
    found = list(states)
    known = [state for state in found if state is not None]
    if len(known) < len(found) or not known:
        return None
    if shards_of_position(known[0]) is None:
        return dict(known[0])
    positions = {number: position for state in known for number, position in state["positions"].items()}
    return {_SHARDS: known[0][_SHARDS], "positions": dict(sorted(positions.items()))}


def _has_position(source: object) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
