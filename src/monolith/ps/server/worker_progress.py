"""How far a worker is in each bucket and in each dense parameter of a server.

A batch counts once in every bucket. Buckets move between servers that have had different batches of a worker, and a worker may
die after some servers have had a batch and others have not. So the position belongs to the bucket: it moves with it, and a
successor that pushes a batch again changes the buckets that have not had it, and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from monolith.ps.protocol.messages import BucketsAt, HeldPosition, ParametersAt
from monolith.ps.protocol.ownership import mask_of, ranges_of
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.store import Position

__all__ = ["BucketProgress", "ParameterProgress"]


class BucketProgress:
    """The last batch of one worker that each bucket has had.

    A living worker pushes every batch to all buckets, so they are usually all at the same position, and a push costs one
    assignment whatever the number of buckets. Others are kept as masks for as long as they differ.

    Example:
        >>> progress = BucketProgress()
        >>> progress.advance(HeldPosition(batches=7, epoch=1), None)
        >>> progress.put([BucketsAt(position=HeldPosition(batches=6, epoch=1), ranges=((0, 10),))])
        >>> [(at.position.batches, at.ranges) for at in progress.at()]
        [(7, ((10, 4096),)), (6, ((0, 10),))]
    """

    def __init__(self) -> None:
        self._rest: HeldPosition | None = None
        # Disjoint. Replaced as a whole, never changed in place.
        self._others: list[tuple[np.ndarray, HeldPosition | None]] = []

    @property
    def first(self) -> HeldPosition | None:
        """The position of the first bucket. None: it has had no batch."""
        return next((at for mask, at in self._others if mask[0]), self._rest)

    def had(self, position: Position, epoch: int) -> np.ndarray | None:
        """bool [NUM_BUCKETS]: buckets that have had the batch of `position` before `epoch`. None: no bucket has."""
        rest = _has_had(self._rest, position, epoch)
        if not rest and not any(_has_had(held, position, epoch) for _, held in self._others):
            return None
        had = np.full(NUM_BUCKETS, rest)
        for mask, held in self._others:
            had[mask] = _has_had(held, position, epoch)
        return had

    def advance(self, position: HeldPosition, buckets: np.ndarray | None) -> None:
        """Record that `buckets`, a mask, are at `position` now. None: all buckets of the server."""
        if buckets is None:
            self._rest, self._others = position, []
        else:
            self._set(buckets, position)

    def put(self, parts: Iterable[BucketsAt], buckets: np.ndarray | None = None) -> None:
        """Record the positions of `parts`. Those of `buckets` that are in none of them have had no batch."""
        if buckets is not None:
            self._set(buckets, None)
        for part in parts:
            mask = mask_of(part.ranges)
            self._set(mask if buckets is None else mask & buckets, part.position)

    def at(self, buckets: np.ndarray | None = None) -> list[BucketsAt]:
        """The positions of all buckets, or of those of a mask. Buckets that have had no batch are in none."""
        rest = np.ones(NUM_BUCKETS, dtype=np.bool_)
        for mask, _ in self._others:
            rest &= ~mask
        parts = [(rest, self._rest), *self._others]
        shown = [(mask if buckets is None else mask & buckets, position) for mask, position in parts]
        return [
            BucketsAt(position=position, ranges=ranges_of(mask))
            for mask, position in shown
            if position is not None and mask.any()
        ]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        positions = [self._rest, *(position for _, position in self._others)]
        return sum(map(_size, positions)) + NUM_BUCKETS * len(self._others)

    def _set(self, buckets: np.ndarray, position: HeldPosition | None) -> None:
        others, joined = [], buckets
        for mask, at in self._others:
            left = mask & ~buckets
            if at == position:
                joined = joined | left
            elif left.any():
                others.append((left, at))
        if position != self._rest and joined.any():
            others.append((joined, position))
        self._others = others


class ParameterProgress:
    """The last batch of one worker that each dense parameter has had.

    Example:
        >>> progress = ParameterProgress()
        >>> progress.advance(HeldPosition(batches=7, epoch=1), ["w", "b"])
        >>> progress.missing(Position(batches=7), 2, ["w", "c"])
        ['c']
    """

    def __init__(self) -> None:
        self._positions: dict[str, HeldPosition] = {}

    def missing(self, position: Position, epoch: int, names: Sequence[str]) -> list[str]:
        """Those of `names` that have not had the batch of `position` before `epoch`."""
        return [name for name in names if not _has_had(self._positions.get(name), position, epoch)]

    def advance(self, position: HeldPosition, names: Iterable[str]) -> None:
        """Record that `names` are at `position` now."""
        self._positions |= dict.fromkeys(names, position)

    def put(self, parts: Iterable[ParametersAt], names: Collection[str]) -> None:
        """Record the positions of `names` in `parts`. Those that are in none of them have had no batch."""
        kept = {name: at for name, at in self._positions.items() if name not in names}
        found = {name: part.position for part in parts for name in part.names if name in names}
        self._positions = kept | found

    def at(self, names: Collection[str] | None = None) -> list[ParametersAt]:
        """The positions of all parameters, or of `names`. Parameters that have had no batch are in none."""
        parts: list[tuple[HeldPosition, list[str]]] = []
        for name, position in list(self._positions.items()):
            if names is not None and name not in names:
                continue
            # Nearly always the position of the parameter before it.
            same = next((part for part in reversed(parts) if part[0] is position or part[0] == position), None)
            if same is None:
                parts.append((position, [name]))
            else:
                same[1].append(name)
        return [ParametersAt(position=position, names=tuple(of)) for position, of in parts]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        distinct = {id(position): position for position in list(self._positions.values())}
        return sum(map(_size, distinct.values())) + sum(len(name) + _OVERHEAD for name in list(self._positions))


_OVERHEAD = 128
"""Approximate bytes of a small Python object and its entry in a dict."""


def _size(position: HeldPosition | None) -> int:
    return 0 if position is None else len(position.state or "") + 4 * _OVERHEAD


def _has_had(held: HeldPosition | None, position: Position, epoch: int) -> bool:
    # Within one epoch the sequence numbers are enough. Only a successor, which cannot know where the last one stopped, repeats
    # batches.
    return held is not None and held.epoch < epoch and position.batches <= held.batches
