"""How processes become the ranks of a run.

Every rank listens. Rank 0 leads: it announces its address through a `Rendezvous`, and the others connect to it.

    JOIN       to the leader: rank, world size, incarnation, address, hash of the tables, generation that the rank was part of
    HERE       to the leader, every second: the rank still waits
    FORMED     of the leader: the generation and all members. Now every rank connects to those below it
    CONNECT    to another rank: generation and channel
    CONNECTED  its answer
    REFUSED    instead of FORMED or CONNECTED: an error, and whether to try again
    WHO        to a leader: which process is it? It answers with LEADER

A generation is a number that grows with every formation: the time in milliseconds, and always more than any rank has seen.
Connections of another generation are refused, so a process that was stopped and replaced cannot reach its old peers.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from pydantic import BaseModel, ConfigDict, Field

from monolith import errors
from monolith.console import Reminder
from monolith.errors import (
    FencedError,
    InvalidArgumentError,
    MonolithError,
    ProtocolError,
    RankLostError,
    RanksDisagreeError,
    UnavailableError,
)
from monolith.ranks.mesh import Channel
from monolith.ranks.peers import Arrival, Gate, MeshConfig, dial, read_message, receive_message, send_message
from monolith.ranks.rendezvous import Rendezvous
from monolith.ranks.socket_mesh import CONTROL, SocketMesh
from monolith.transport.framed_socket import FramedSocket

__all__ = ["RankMember", "form_mesh", "late_ranks"]

ANSWER_SECONDS = 5.0
"""How long another rank may take to answer a message of the formation."""
HERE_SECONDS = 1.0
"""Interval at which a rank that has joined says that it still waits."""
RIVAL_SECONDS = 3.0
"""A rank that was not heard from for this long while it waits gives way to another process with its rank."""
_PAUSE_SECONDS = 0.1
_MAX_RANKS = 4096

_log = logging.getLogger(__name__)
_INCARNATION = time.time_ns()


class _Call(IntEnum):
    JOIN = 1
    HERE = 2
    FORMED = 3
    CONNECT = 4
    CONNECTED = 5
    REFUSED = 6
    WHO = 7
    LEADER = 8


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RankMember(_Message):
    """A process that is, or wants to be, a rank of a run."""

    rank: int = Field(ge=0, lt=_MAX_RANKS)
    """As its launcher numbered it."""
    incarnation: int = Field(ge=0, lt=2**63)
    """When the process began, in nanoseconds."""
    address: str = Field(max_length=512)
    """Where it listens."""
    host: str = Field(max_length=256)
    """Name of its machine."""
    process: int = Field(ge=0)

    def __str__(self) -> str:
        return f"process {self.process} of {self.host} ({self.address})"


class _Join(_Message):
    member: RankMember
    size: int = Field(ge=1, le=_MAX_RANKS)
    tables: str = Field(max_length=256)
    after: int = Field(ge=0, lt=2**63)


class _Here(_Message):
    pass


class _Formed(_Message):
    generation: int = Field(gt=0, lt=2**63)
    members: list[RankMember] = Field(max_length=_MAX_RANKS)


class _Connect(_Message):
    generation: int = Field(gt=0, lt=2**63)
    rank: int = Field(ge=0, lt=_MAX_RANKS)
    channel: int = Field(ge=0, le=CONTROL)


class _Refused(_Message):
    error: str = Field(max_length=64)
    text: str = Field(max_length=4096)
    retry: bool = False


@dataclass
class _Joined:
    join: _Join
    connection: FramedSocket
    heard: float


def form_mesh(
    rank: int,
    size: int,
    rendezvous: Rendezvous,
    *,
    config: MeshConfig | None = None,
    tables: str = "",
    after: int = 0,
    min_ranks: int | None = None,
    replacement_secs: float = 0.0,
    while_waiting: Callable[[], None] = lambda: None,
) -> SocketMesh:
    """Wait until all ranks of a run are there, and connect them. Every rank calls it, at the start and after a `RankLostError`.

    Args:
        rank: of this process. Rank 0 leads.
        size: the number of ranks.
        rendezvous: through which the others find the leader.
        config: where to listen, and time limits.
        tables: hash of the declared tables, which must be the same on all ranks. "": not checked.
        after: the last generation that this process, or the state it has restored, was part of.
        min_ranks: form with fewer ranks, numbered without gaps, once `replacement_secs` have passed. None: `size`. Only rank 0's
            value counts.
        replacement_secs: how long the leader waits for the others before it goes on with `min_ranks`.
        while_waiting: called again and again while this rank waits. What it raises ends the wait.

    Raises:
        RankLostError: some rank did not join within `config.formation_secs`, or died while the run was formed.
        RanksDisagreeError: two processes have the same rank, or ranks expect another size or other tables.
        FencedError: another process has taken the rank of this one, or leads in its place.
    """
    config = config or MeshConfig()
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank: expected a number from 0 to {size - 1}, got {rank}")
    least = size if min_ranks is None else min_ranks
    if not 1 <= least <= size:
        raise InvalidArgumentError(f"min_ranks: expected a number from 1 to {size}, got {min_ranks}")
    deadline = time.monotonic() + config.formation_secs
    gate = Gate(config)
    try:
        me = RankMember(
            rank=rank, incarnation=_INCARNATION, address=gate.address, host=socket.gethostname(), process=os.getpid()
        )
        join = _Join(member=me, size=size, tables=tables, after=after)
        if rank == 0:
            leader = _Leader(gate, join, rendezvous, config, while_waiting)
            formed = leader.form(least=least, replacement_secs=replacement_secs, deadline=deadline)
        else:
            formed = _join(join, rendezvous, config, while_waiting, deadline=deadline)
        mesh = _connect(formed, me, gate, config)
    except BaseException:
        gate.close()
        raise
    _log.info("rank %s of %s, generation %s", mesh.rank, mesh.size, mesh.generation)
    return mesh


class _Leader:
    """Collects the ranks of a run, as rank 0."""

    def __init__(
        self, gate: Gate, join: _Join, rendezvous: Rendezvous, config: MeshConfig, while_waiting: Callable[[], None]
    ) -> None:
        self._gate, self._own, self._rendezvous, self._config = gate, join, rendezvous, config
        self._while_waiting = while_waiting
        self._joined: dict[int, _Joined] = {}
        self._rivals: dict[int, _Joined] = {}
        self._reminder = Reminder(_log, who="rank 0")

    def form(self, *, least: int, replacement_secs: float, deadline: float) -> _Formed:
        """Wait for the others and tell them the generation."""
        self._replace_leader()
        self._rendezvous.announce(self._gate.address)
        size, fewer_from = self._own.size, time.monotonic() + replacement_secs
        try:
            while True:
                self._listen_to_joined()
                self._judge_rivals()
                there = 1 + len(self._joined)
                if there == size or (there >= least and time.monotonic() >= fewer_from and not self._rivals):
                    return self._tell_all()
                missing = sorted(set(range(1, size)) - set(self._joined))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RankLostError(
                        f"ranks {_listed(missing)} of {size} did not join rank 0 at {self._gate.address} within "
                        f"{self._config.formation_secs:.0f} s",
                        rank=missing[0],
                    )
                self._while_waiting()
                self._reminder.waiting("ranks %s of %s to join", _listed(missing), size, left_secs=left)
                arrival = self._gate.take(timeout=min(left, _PAUSE_SECONDS))
                if arrival is not None:
                    self._arrived(arrival)
        except BaseException as error:
            self._refuse_all(error)
            raise

    def _replace_leader(self) -> None:
        """Raise `FencedError` if another process leads this run."""
        until = time.monotonic() + RIVAL_SECONDS
        while True:
            try:
                address = self._rendezvous.find()
                other = _leader_at(address, self._config) if address and address != self._gate.address else None
            except (OSError, ProtocolError):
                return
            # This process's own mesh of before, which is not closed yet, is no rival.
            if other is None or other.incarnation == _INCARNATION:
                return
            if time.monotonic() >= until:
                raise FencedError(
                    f"two processes are rank 0: {other} leads the run already, {self._own.member} is another; end one"
                )
            time.sleep(_PAUSE_SECONDS)

    def _arrived(self, arrival: Arrival) -> None:
        connection, frame = arrival
        try:
            if frame.call == _Call.WHO:
                answer_who(connection, self._own.member)
                return
            if frame.call != _Call.JOIN:
                _refuse(connection, ProtocolError("the run is not formed yet"), retry=True)
                return
            join = read_message(frame, _Join)
        except (OSError, ProtocolError) as error:
            _log.warning("refused a message of a rank: %s", error)
            connection.close()
            return
        self._admit(_Joined(join, connection, time.monotonic()))

    def _admit(self, new: _Joined) -> None:
        own, join, rank = self._own, new.join, new.join.member.rank
        why = None
        if join.size != own.size:
            why = f"rank {rank} expects {join.size} ranks, rank 0 expects {own.size}"
        elif not 0 < rank < own.size:
            why = f"rank: expected a number from 1 to {own.size - 1}, got {rank}"
        elif own.tables and join.tables and own.tables != join.tables:
            why = f"rank {rank} has declared other tables than rank 0: {join.tables} and {own.tables}"
        if why is not None:
            error = RanksDisagreeError(f"{why}; ranks 0: {own.member}, {rank}: {join.member}")
            _refuse(new.connection, error)
            raise error
        old = self._joined.get(rank)
        if old is None or old.join.member.incarnation == join.member.incarnation:
            self._seat(rank, new)
        elif old.join.after == join.after:
            # Both began afresh: the first may have died, or be a second process with the same number.
            self._drop(self._rivals.pop(rank, None))
            old.heard, self._rivals[rank] = 0.0, new
        elif 0 < join.after < old.join.after or old.join.after == 0:
            _refuse(new.connection, _fenced(rank, new, old))
        else:
            _refuse(old.connection, _fenced(rank, old, new))
            self._seat(rank, new)

    def _seat(self, rank: int, new: _Joined) -> None:
        self._drop(self._joined.get(rank))
        self._joined[rank] = new

    def _drop(self, joined: _Joined | None) -> None:
        if joined is not None:
            joined.connection.close()

    def _listen_to_joined(self) -> None:
        for rank, joined in list(self._joined.items()):
            try:
                while joined.connection.is_readable():
                    receive_message(joined.connection, deadline=time.monotonic() + HERE_SECONDS)
                    joined.heard = time.monotonic()
            except (OSError, ProtocolError):
                joined.connection.close()
                del self._joined[rank]

    def _judge_rivals(self) -> None:
        for rank, rival in list(self._rivals.items()):
            old = self._joined.get(rank)
            if old is None or (not old.heard and time.monotonic() > rival.heard + RIVAL_SECONDS):
                del self._rivals[rank]
                self._seat(rank, rival)
            elif old.heard > rival.heard:
                raise RanksDisagreeError(
                    f"two processes are rank {rank}: {old.join.member} and {rival.join.member}; give each its own rank"
                )

    def _tell_all(self) -> _Formed:
        seen = [self._own.after, *(joined.join.after for joined in self._joined.values())]
        generation = max(int(time.time() * 1000), max(seen) + 1)
        members = [self._own.member, *(self._joined[rank].join.member for rank in sorted(self._joined))]
        formed = _Formed(generation=generation, members=members)
        for rank, joined in self._joined.items():
            try:
                send_message(joined.connection, _Call.FORMED, formed, deadline=time.monotonic() + ANSWER_SECONDS)
            except OSError as error:
                raise RankLostError(f"rank {rank} left while the run was formed: {error}", rank=rank) from None
        for joined in self._joined.values():
            joined.connection.close()
        return formed

    def _refuse_all(self, error: BaseException) -> None:
        retry = not isinstance(error, RanksDisagreeError)
        for joined in (*self._joined.values(), *self._rivals.values()):
            _refuse(joined.connection, error, retry=retry)


def late_ranks(mesh: SocketMesh) -> list[int]:
    """Return which ranks want to join although the run was formed without them, by the number their launcher gave them.

    Called by the leader now and then. They try again until it forms the run again.
    """
    found: set[int] = set()
    there = {member.rank for member in mesh.members}
    while (arrival := mesh.take_arrival()) is not None:
        connection, frame = arrival
        if frame.call == _Call.WHO:
            answer_who(connection, mesh.members[0])
            continue
        with suppress(ProtocolError):
            if frame.call == _Call.JOIN:
                found.add(read_message(frame, _Join).member.rank)
        _refuse(connection, UnavailableError("the run continues and will be formed again soon"), retry=True)
    return sorted(found - there)


def _fenced(rank: int, stale: _Joined, other: _Joined) -> FencedError:
    return FencedError(
        f"rank {rank} was given to {other.join.member}; {stale.join.member} is no longer part of the run"
    )


def _leader_at(address: str, config: MeshConfig) -> RankMember | None:
    """Return which process leads at an address. None if nobody answers there."""
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        connection = dial(address, config, deadline=deadline)
    except UnavailableError:
        return None
    try:
        send_message(connection, _Call.WHO, _Here(), deadline=deadline)
        frame = receive_message(connection, deadline=deadline)
        return read_message(frame, RankMember) if frame.call == _Call.LEADER else None
    except OSError:
        return None
    finally:
        connection.close()


def answer_who(connection: FramedSocket, leader: RankMember) -> None:
    """Tell a process that asks which one leads."""
    with suppress(OSError):
        send_message(connection, _Call.LEADER, leader, deadline=time.monotonic() + ANSWER_SECONDS)
    connection.close()


def _refuse(connection: FramedSocket, error: BaseException, *, retry: bool = False) -> None:
    name = type(error).__name__ if isinstance(error, MonolithError) else "MonolithError"
    refused = _Refused(error=name, text=str(error)[:4096], retry=retry)
    with suppress(OSError):
        send_message(connection, _Call.REFUSED, refused, deadline=time.monotonic() + HERE_SECONDS)
    connection.close()


def _join(
    join: _Join,
    rendezvous: Rendezvous,
    config: MeshConfig,
    while_waiting: Callable[[], None],
    *,
    deadline: float,
) -> _Formed:
    """Join the run as a rank other than 0, as often as its leader is replaced."""
    rank = join.member.rank
    reminder = Reminder(_log, who=f"rank {rank}")
    why = "was not announced"
    while (left := deadline - time.monotonic()) > 0:
        address = None
        try:
            address = rendezvous.find()
        except OSError as error:
            why = f"cannot be looked up: {error}"
        if address is not None:
            try:
                return _join_at(address, join, rendezvous, config, while_waiting, reminder=reminder, deadline=deadline)
            except _TryAgainError as error:
                why = str(error)
        while_waiting()
        reminder.waiting("rank 0, which %s", why, left_secs=left)
        time.sleep(min(_PAUSE_SECONDS, max(0.0, left)))
    raise RankLostError(f"rank {rank} could not join: rank 0 {why}, for {config.formation_secs:.0f} s", rank=0)


class _TryAgainError(Exception):
    """The leader could not be reached or has ended. Another may be announced."""


def _join_at(
    address: str,
    join: _Join,
    rendezvous: Rendezvous,
    config: MeshConfig,
    while_waiting: Callable[[], None],
    *,
    reminder: Reminder,
    deadline: float,
) -> _Formed:
    try:
        connection = dial(address, config, deadline=min(deadline, time.monotonic() + ANSWER_SECONDS))
    except UnavailableError as error:
        raise _TryAgainError(f"does not answer: {error}") from None
    try:
        soon = time.monotonic() + ANSWER_SECONDS
        send_message(connection, _Call.JOIN, join, deadline=soon)
        while not connection.wait_readable(HERE_SECONDS):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _TryAgainError("did not form the run")
            while_waiting()
            reminder.waiting("rank 0 at %s to form the run", address, left_secs=left)
            send_message(connection, _Call.HERE, _Here(), deadline=time.monotonic() + ANSWER_SECONDS)
            with suppress(OSError):
                if rendezvous.find() not in (None, address):
                    raise _TryAgainError("was replaced")
        frame = receive_message(connection, deadline=time.monotonic() + ANSWER_SECONDS)
    except OSError as error:
        raise _TryAgainError(f"has left: {error}") from None
    finally:
        connection.close()
    if frame.call == _Call.REFUSED:
        refused = read_message(frame, _Refused)
        if refused.retry:
            raise _TryAgainError(f"refuses: {refused.text}")
        raise getattr(errors, refused.error, RanksDisagreeError)(refused.text)
    if frame.call != _Call.FORMED:
        raise ProtocolError(f"rank 0 at {address}: expected the run to be formed, got message {frame.call}")
    return read_message(frame, _Formed)


def _connect(formed: _Formed, me: RankMember, gate: Gate, config: MeshConfig) -> SocketMesh:
    """Connect this rank with all others: it connects to lower ranks, and higher ones connect to it."""
    rank = formed.members.index(me)
    sockets: dict[tuple[int, int], FramedSocket] = {}
    deadline = time.monotonic() + config.rank_timeout_secs
    channels = [*Channel, CONTROL]
    try:
        for peer in range(rank):
            for channel in channels:
                sockets[peer, channel] = _connect_to(formed, rank, peer, channel, config, deadline)
        while len(sockets) < (len(formed.members) - 1) * len(channels):
            arrival = gate.take(timeout=max(0.0, deadline - time.monotonic()))
            if arrival is None:
                silent = next(p for p in range(len(formed.members)) if p != rank and (p, CONTROL) not in sockets)
                raise _lost(formed, silent, "did not connect in time")
            _accept_peer(arrival, formed, rank, sockets)
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise
    if rank:
        gate.close()
    return SocketMesh(
        rank=rank,
        members=formed.members,
        generation=formed.generation,
        connections={key: (connection.detach(), connection.is_local) for key, connection in sockets.items()},
        config=config,
        gate=None if rank else gate,
    )


def _lost(formed: _Formed, peer: int, why: object) -> RankLostError:
    return RankLostError(f"rank {peer}, {formed.members[peer]}, {why} while the run was formed", rank=peer)


def _connect_to(
    formed: _Formed, rank: int, peer: int, channel: int, config: MeshConfig, deadline: float
) -> FramedSocket:
    try:
        connection = dial(formed.members[peer].address, config, deadline=deadline)
    except UnavailableError as error:
        raise _lost(formed, peer, f"left ({error})") from None
    try:
        message = _Connect(generation=formed.generation, rank=rank, channel=channel)
        send_message(connection, _Call.CONNECT, message, deadline=deadline)
        frame = receive_message(connection, deadline=deadline)
        if frame.call != _Call.CONNECTED:
            raise _lost(formed, peer, f"refused a connection ({frame.text})")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise _lost(formed, peer, f"left ({error})") from None
        raise
    return connection


def _accept_peer(arrival: Arrival, formed: _Formed, rank: int, sockets: dict[tuple[int, int], FramedSocket]) -> None:
    connection, frame = arrival
    try:
        if frame.call == _Call.WHO and rank == 0:
            answer_who(connection, formed.members[0])
            return
        if frame.call != _Call.CONNECT:
            _refuse(connection, UnavailableError("the run is being formed"), retry=True)
            return
        message = read_message(frame, _Connect)
        key = (message.rank, message.channel)
        if message.generation != formed.generation:
            _refuse(connection, FencedError(f"generation {message.generation} is over: this is {formed.generation}"))
        elif not rank < message.rank < len(formed.members) or key in sockets:
            _refuse(connection, ProtocolError(f"rank {message.rank} is not expected on channel {message.channel}"))
        else:
            send_message(connection, _Call.CONNECTED, _Here(), deadline=time.monotonic() + ANSWER_SECONDS)
            sockets[key] = connection
    except (OSError, ProtocolError) as error:
        _log.warning("refused a connection of a rank: %s", error)
        connection.close()


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:10]))
    return f"{shown}, ..." if len(ranks) > 10 else shown
