"""`SocketMesh`: ranks in processes of their own, connected by sockets and, within a machine, by shared memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from monolith._core import RankChannel, RankWatch
from monolith.errors import InvalidArgumentError, ProtocolError, RankLostError, RanksDisagreeError
from monolith.process_bound import ProcessBound, let_go_in_children
from monolith.ranks.mesh import Arrays, Channel, Kind
from monolith.ranks.messages import RankMember
from monolith.ranks.peers import MeshConfig, RankConnection
from monolith.transport.frames import decode, encode_parts

__all__ = ["CONTROL", "SocketMesh"]

_log = logging.getLogger(__name__)

CONTROL = len(Channel)
"""The connection of two ranks that carries heartbeats and news of failures."""
_MAX_BYTES = 2**36
# RankChannel::State and RankLoss::Kind of the core.
_DONE, _INTERRUPTED, _LOST, _DISAGREE, _CLOSED, _BROKEN = range(6)
_IS_LOST, _HAS_FAILED, _DISAGREES = 1, 2, 3

_DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_EVER_SECS = 1e9
_MAX_REASON = 4096  # RankWatch::kMaxReason


class Newcomers(Protocol):
    """Processes that want to join while the run is going on. See `monolith.ranks.leader.Lobby`."""

    is_heard: Callable[[int, float], bool]

    def newcomers(self) -> list[int]:
        """Return their ranks."""

    def close(self) -> None:
        """Stop listening."""


class SocketMesh:
    """A `Mesh` between processes. Made by `form_mesh`."""

    def __init__(
        self,
        *,
        rank: int,
        members: Sequence[RankMember],
        generation: int,
        connections: Mapping[tuple[int, int], RankConnection],
        config: MeshConfig,
        lobby: Newcomers | None = None,
    ) -> None:
        """Take over the connections, by rank and channel."""
        self.rank, self.size, self.generation = rank, len(members), generation
        self.members = tuple(members)
        """The processes of this generation, by rank."""
        self._config, self._lobby = config, lobby
        sockets: dict[int, list[int]] = {}
        shares: dict[int, list[bool]] = {}
        for channel in (*Channel, CONTROL):
            taken = [connections.get((peer, channel)) for peer in range(self.size)]
            sockets[channel] = [-1 if one is None else one.detach().detach() for one in taken]
            shares[channel] = [one is not None and one.is_local for one in taken]
        self._watch = RankWatch(rank, sockets[CONTROL], config.rank_timeout_secs)
        self._channels = [RankChannel(sockets[channel], shares[channel], self._watch) for channel in Channel]
        self._pipes = [one.pipe for one in connections.values() if one.pipe is not None]
        if lobby is not None:
            lobby.is_heard = self._watch.is_heard
        self._bound = ProcessBound("the connections of a rank")
        let_go_in_children(self)

    def exchange(
        self, kind: Kind, out: Sequence[Arrays], *, step: int = 0, channel: Channel = Channel.MAIN
    ) -> list[Arrays]:
        """Send `out[r]` to every rank r. Returns what each has sent here."""
        self._bound.require()
        if len(out) != self.size:
            raise InvalidArgumentError(f"out: expected arrays for each of {self.size} ranks, got {len(out)}")
        rank, through = self.rank, self._channels[channel]
        parts = [
            [] if peer == rank else encode_parts(call=kind, request=0, text="", arrays=arrays)
            for peer, arrays in enumerate(out)
        ]
        state, messages = through.exchange(kind, step, self.generation, parts, self._config.exchange_timeout_secs)
        if state != _DONE:
            raise self._failure(state, through, kind, step)
        try:
            return [
                out[rank] if peer == rank else decode(message, max_bytes=_MAX_BYTES).arrays
                for peer, message in enumerate(messages)
            ]
        except ProtocolError as error:
            raise RanksDisagreeError(f"rank {rank} cannot read a message of step {step}: {error}") from None

    def next_kind(self, *, channel: Channel = Channel.MAIN) -> Kind:
        """Wait for the next message of another rank and return its kind."""
        self._bound.require()
        if self.size == 1:
            raise InvalidArgumentError("next_kind: there is no other rank")
        through = self._channels[channel]
        state, kind = through.next_kind(self._config.exchange_timeout_secs)
        if state != _DONE:
            raise self._failure(state, through, Kind.WORD, 0)
        return Kind(kind)

    def newcomers(self) -> list[int]:
        """Return ranks that wait until the run is formed again with them, as they were launched. Called on rank 0."""
        return [] if self._lobby is None else self._lobby.newcomers()

    def loss(self, *, step: int, wait_secs: float = 0.0) -> Exception | None:
        """Return the error of a rank that is known to be lost. Waits at most `wait_secs` for such news."""
        deadline = time.monotonic() + wait_secs
        while (known := self._watch.loss()) is None and time.monotonic() < deadline:
            # A connection that ends is no loss by itself, a rank may have done its work. Here the caller knows that one is.
            gone = [
                rank for rank in range(self.size) if rank != self.rank and not self._watch.is_heard(rank, _EVER_SECS)
            ]
            if gone:
                known = self._watch.report(_IS_LOST, gone[0], "it has closed its connection")
                break
            time.sleep(_LOOK_SECONDS)
        return None if known is None else self._loss(known, step)

    def fail(self, reason: str) -> None:
        """Tell the others."""
        self._bound.require()
        self._watch.fail(_as_sent(reason))

    def close(self) -> None:
        """Close all connections. In a forked child it does nothing."""
        if not self._bound.is_here:
            return
        if self._lobby is not None:
            self._lobby.close()
        for channel in self._channels:
            channel.close()
        self._watch.close()
        # The others may still need what was sent last.
        for pipe in self._pipes:
            if not pipe.drain(timeout=_DRAIN_SECONDS):
                _log.warning("rank %s: another rank does not read what was sent to it last", self.rank)

    def let_go(self) -> None:
        """Close the sockets in a forked child."""
        for channel in self._channels:
            channel.abandon()
        self._watch.abandon()

    def _failure(self, state: int, through: RankChannel, kind: Kind, step: int) -> Exception:
        if state == _DISAGREE:
            text = self._difference(through, kind, step)
            self._watch.report(_DISAGREES, through.other[0], _as_sent(text))
            return RanksDisagreeError(text)
        if state == _LOST:
            return self._loss(through.loss, step)
        if state == _CLOSED:
            return RankLostError("the connections of this rank are closed", rank=self.rank, step=step)
        return RankLostError("an earlier exchange of this rank was not finished", rank=self.rank, step=step)

    def _loss(self, loss: tuple[int, int, str, int], step: int) -> Exception:
        what, rank, why, told_by = loss
        if what == _DISAGREES:
            return RanksDisagreeError(why)
        if rank == self.rank:
            return RankLostError(f"rank {told_by} has lost this rank, {rank}: {why}", rank=rank, step=step)
        does = "failed" if what == _HAS_FAILED else "was lost"
        by = f" (noticed by rank {told_by})" if told_by not in (-1, rank) else ""
        where = self.members[rank]
        return RankLostError(f"rank {rank}, {where}, {does} in step {step}: {why}{by}", rank=rank, step=step)

    def _difference(self, through: RankChannel, kind: Kind, step: int) -> str:
        rank, other, other_step, generation, number = through.other
        name = Kind(other).name if other in Kind.__members__.values() else f"message {other}"
        return (
            f"rank {self.rank} is in {kind.name} of step {step}, rank {rank} in {name} of step {other_step} "
            f"(exchanges {through.round} and {number} of generations {self.generation} and {generation})"
        )


def _as_sent(reason: str) -> str:
    """Return `reason` so that others can read it: of the length that the core sends, cut between two characters."""
    return reason.encode(errors="backslashreplace")[:_MAX_REASON].decode(errors="ignore")
