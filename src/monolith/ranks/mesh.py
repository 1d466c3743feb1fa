"""`Mesh`: what the ranks of a run exchange messages over."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np

from monolith.errors import RanksDisagreeError

__all__ = ["Arrays", "Channel", "Kind", "LoneMesh", "Mesh"]

Arrays = Sequence[np.ndarray]
"""What one rank sends to another in one exchange."""


class Kind(IntEnum):
    """What an exchange is for. All ranks must be in an exchange of the same kind."""

    WORD = 1
    """What each rank does next, see `Agreement`."""
    ANSWER = 2
    """What an action has returned on each rank."""
    IDS = 3
    """Ids, to the ranks that own them."""
    ROWS = 4
    """Rows, back to the ranks that asked for them."""
    GRADIENTS = 5
    """Summed gradients of ids, to the ranks that own them."""
    DENSE = 6
    """Parts of the dense gradients, to the ranks that add them."""
    SUMS = 7
    """Added dense gradients, to all ranks."""
    STATE = 8
    """State of a run, such as dense parameters and positions in the data."""


class Channel(IntEnum):
    """Independent sequences of exchanges, each used by one thread at a time."""

    MAIN = 0
    """The thread that trains."""
    AHEAD = 1
    """Lookups of the next batch."""
    PUSH = 2
    """Gradients that are applied late."""
    SAVES = 3
    """What each rank has written of checkpoints and of cuts of the log, while training continues."""


class Mesh(Protocol):
    """Connections between all ranks of one generation of a run."""

    rank: int
    """This process."""
    size: int
    """The number of ranks."""
    generation: int
    """The formation of the run. Every later one has a larger number."""

    def exchange(
        self, kind: Kind, out: Sequence[Arrays], *, step: int = 0, channel: Channel = Channel.MAIN
    ) -> list[Arrays]:
        """Send `out[r]` to every rank r. Returns what each rank has sent here, that of this rank as it was given.

        All ranks call it with the same `kind` and `step`. The arrays are valid until the next exchange of the channel begins, and
        may be sent on in it.

        Raises:
            RankLostError: a rank has died, has failed, or did not send in time.
            RanksDisagreeError: a rank is in another exchange.
        """

    def next_kind(self, *, channel: Channel = Channel.MAIN) -> Kind:
        """Wait until another rank has sent its message of the next exchange, and return its kind. Takes nothing."""

    def loss(self, *, step: int, wait_secs: float = 0.0) -> Exception | None:
        """Return the error that the next exchange would raise because a rank is known to be lost, None if none is.

        Waits at most `wait_secs` for such news.
        """

    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends. Their next exchange raises `RankLostError` with the reason."""

    def close(self) -> None:
        """Close all connections. Others that still wait for this rank get `RankLostError`."""


class LoneMesh:
    """The mesh of a run with one rank.

    Example:
        >>> LoneMesh().exchange(Kind.WORD, [["own"]])
        [['own']]
    """

    rank, size, generation = 0, 1, 1

    def exchange(
        self, kind: Kind, out: Sequence[Arrays], *, step: int = 0, channel: Channel = Channel.MAIN
    ) -> list[Arrays]:
        """Return what this rank sends to itself."""
        return [out[0]]

    def next_kind(self, *, channel: Channel = Channel.MAIN) -> Kind:
        """Raise: there is nobody to wait for."""
        raise RanksDisagreeError("the only rank of a run waits for a message of another one")

    def loss(self, *, step: int, wait_secs: float = 0.0) -> None:
        """Return None: there is nobody to lose."""

    def fail(self, reason: str) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing."""
