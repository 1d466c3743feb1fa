"""How processes become the ranks of a run.

Every rank listens. Rank 0 leads: it announces its address through a `Rendezvous`, and the others connect to it.

    JOIN of all others -> FORMED of the leader -> CONNECT of each rank to those below it

A generation is a number that grows with every formation: the time in milliseconds, and always more than any rank has seen.
Connections of another generation are refused, so a process that was stopped and replaced cannot reach its old peers.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from monolith import errors
from monolith.console import Reminder
from monolith.errors import (
    AuthenticationError,
    FencedError,
    InvalidArgumentError,
    MonolithError,
    ProtocolError,
    RankLostError,
    RanksDisagreeError,
    UnavailableError,
)
from monolith.ranks.leader import (
    ANSWER_SECONDS,
    HERE_SECONDS,
    LEADER_SECONDS,
    PAUSE_SECONDS,
    Leader,
    Lobby,
    answer_who,
    refuse,
)
from monolith.ranks.mesh import Channel
from monolith.ranks.messages import (
    Empty,
    Formed,
    JoinCall,
    RankConnect,
    RankJoin,
    RankMember,
    RankRefused,
    read_message,
    receive_message,
    send_message,
)
from monolith.ranks.peers import Arrival, Gate, MeshConfig, RankConnection, dial
from monolith.ranks.rendezvous import Rendezvous
from monolith.ranks.socket_mesh import CONTROL, SocketMesh
from monolith.ranks.tls import Tls
from monolith.transport.frames import Frame

__all__ = ["form_mesh"]

_log = logging.getLogger(__name__)
# By process: a forked one is not the incarnation that its parent is.
_began: dict[int, int] = {}


def form_mesh(
    rank: int,
    size: int,
    rendezvous: Rendezvous,
    *,
    config: MeshConfig | None = None,
    after: int = 0,
    min_ranks: int | None = None,
    replacement_secs: float = 0.0,
    while_waiting: Callable[[], None] = lambda: None,
    incarnation: int | None = None,
) -> SocketMesh:
    """Wait until all ranks of a run are there, and connect them. Every rank calls it, at the start and after a `RankLostError`.

    Args:
        rank: of this process. Rank 0 leads.
        size: the number of ranks.
        rendezvous: through which the others find the leader.
        config: where to listen, and time limits.
        after: the last generation that this process, or the state it has restored, was part of.
        min_ranks: form with fewer ranks, numbered without gaps, once `replacement_secs` have passed. None: `size`. Only rank 0's
            value counts.
        replacement_secs: how long the leader waits for the others before it goes on with `min_ranks`.
        while_waiting: called again and again while this rank waits. What it raises ends the wait.
        incarnation: a number that is larger than that of every process which had this rank before. None: the time in
            nanoseconds at which this process first called this function.

    Raises:
        RankLostError: some rank did not join within `config.formation_secs`, or died while the run was formed.
        RanksDisagreeError: two processes have the same rank, or ranks expect another size.
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
    held: dict[int, RankConnection] = {}
    try:
        me = RankMember(
            rank=rank,
            incarnation=_began.setdefault(os.getpid(), time.time_ns()) if incarnation is None else incarnation,
            address=gate.address,
            host=socket.gethostname(),
            process=os.getpid(),
        )
        join = RankJoin(member=me, size=size, after=after)
        if rank == 0:
            leader = Leader(gate, join, rendezvous, config, while_waiting)
            formed, held = leader.form(least=least, replacement_secs=replacement_secs, deadline=deadline)
        else:
            formed, held[0] = _Joining(join, rendezvous, config, gate.tls, while_waiting).form(deadline=deadline)
        mesh = _connect(formed, me, gate, config, held)
    except BaseException as error:
        gate.close()
        for connection in held.values():
            refuse(connection, error, retry=True)
        raise
    if rank:
        held[0].close()
    _log.info("rank %s of %s, generation %s", mesh.rank, mesh.size, mesh.generation)
    return mesh


class _TryAgainError(Exception):
    """The leader could not be reached or has ended. Another may be announced."""


class _Joining:
    """Joins the run as a rank other than 0, as often as its leader is replaced."""

    def __init__(
        self,
        join: RankJoin,
        rendezvous: Rendezvous,
        config: MeshConfig,
        tls: Tls | None,
        while_waiting: Callable[[], None],
    ) -> None:
        self._join, self._rendezvous, self._config, self._tls = join, rendezvous, config, tls
        self._while_waiting = while_waiting
        self._reminder = Reminder(_log, who=f"rank {join.member.rank}")
        self._refused_since: float | None = None

    def form(self, *, deadline: float) -> tuple[Formed, RankConnection]:
        """Wait for the leader, and for all others to join it. Returns also the connection to the leader."""
        why = "has not announced its address yet"
        while (left := deadline - time.monotonic()) > 0:
            address = None
            try:
                address = self._rendezvous.find()
            except OSError as error:
                why = f"cannot be looked up: {error}"
            if address is not None:
                try:
                    return self._join_at(address, deadline=deadline)
                except _TryAgainError as error:
                    why = str(error)
            self._while_waiting()
            self._reminder.waiting("rank 0, which %s", why, left_secs=left)
            time.sleep(min(PAUSE_SECONDS, left))
        raise RankLostError(
            f"rank {self._join.member.rank} could not join within {self._config.formation_secs:.0f} s: rank 0 {why}",
            rank=0,
        )

    def _join_at(self, address: str, *, deadline: float) -> tuple[Formed, RankConnection]:
        connection = self._dial(address, deadline)
        try:
            frame = self._answer(connection, address, deadline)
            if frame.call == JoinCall.FORMED:
                return read_message(frame, Formed), connection
            if frame.call != JoinCall.REFUSED:
                raise _TryAgainError(f"answers with message {frame.call}")
            refused = read_message(frame, RankRefused)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | ProtocolError):
                raise _TryAgainError(f"has left: {error}") from None
            raise
        connection.close()
        if refused.retry:
            raise _TryAgainError(f"refuses: {refused.text}")
        raise _error_of(refused)

    def _answer(self, connection: RankConnection, address: str, deadline: float) -> Frame:
        """Join, and return what the leader says to it in the end."""
        send_message(connection, JoinCall.JOIN, self._join, deadline=time.monotonic() + ANSWER_SECONDS)
        while not connection.wait_readable(HERE_SECONDS):
            left = deadline - time.monotonic()
            if left <= 0:
                raise _TryAgainError("did not form the run")
            self._while_waiting()
            self._reminder.waiting("rank 0 at %s to form the run", address, left_secs=left)
            send_message(connection, JoinCall.HERE, Empty(), deadline=time.monotonic() + ANSWER_SECONDS)
            if self._find() not in (None, address):
                raise _TryAgainError("was replaced")
        return receive_message(connection, deadline=time.monotonic() + ANSWER_SECONDS)

    def _find(self) -> str | None:
        try:
            return self._rendezvous.find()
        except OSError:
            return None

    def _dial(self, address: str, deadline: float) -> RankConnection:
        now = time.monotonic()
        try:
            connection = dial(address, self._config, self._tls, deadline=min(deadline, now + ANSWER_SECONDS))
        except (AuthenticationError, ProtocolError) as error:
            # The address of a leader that has died may be that of another program by now.
            self._refused_since = self._refused_since or now
            if now - self._refused_since > LEADER_SECONDS:
                raise
            raise _TryAgainError(f"cannot be joined: {error}") from None
        except UnavailableError as error:
            raise _TryAgainError(f"does not answer: {error}") from None
        self._refused_since = None
        return connection


def _error_of(refused: RankRefused) -> MonolithError:
    kind = getattr(errors, refused.error, None)
    if isinstance(kind, type) and issubclass(kind, MonolithError):
        return kind(refused.text)
    return RanksDisagreeError(refused.text)


def _connect(
    formed: Formed, me: RankMember, gate: Gate, config: MeshConfig, held: dict[int, RankConnection]
) -> SocketMesh:
    """Connect this rank with all others: it connects to lower ranks, and higher ones connect to it.

    `held` are the connections on which ranks have joined. They tell whether the others are still there.
    """
    rank = formed.members.index(me)
    sockets: dict[tuple[int, int], RankConnection] = {}
    deadline = time.monotonic() + config.rank_timeout_secs
    channels = [*Channel, CONTROL]
    try:
        for peer in range(rank):
            for channel in channels:
                sockets[peer, channel] = _connect_to(formed, rank, peer, channel, config, gate.tls, deadline)
        while len(sockets) < (len(formed.members) - 1) * len(channels):
            arrival = gate.take(timeout=PAUSE_SECONDS)
            if arrival is not None:
                _accept_peer(arrival, formed, rank, sockets)
                continue
            missing = [
                peer for peer in range(rank + 1, len(formed.members)) if any((peer, c) not in sockets for c in channels)
            ]
            _require_there(formed, held, [0] if rank else missing)
            if time.monotonic() > deadline:
                raise _lost(formed, missing[0], "did not connect in time")
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
        connections=sockets,
        config=config,
        lobby=None if rank else Lobby(gate, formed.members, held.values()),
    )


def _require_there(formed: Formed, held: dict[int, RankConnection], peers: Sequence[int]) -> None:
    """Raise if one of `peers` has left, or says that another has."""
    for peer in peers:
        while held[peer].is_readable():
            try:
                frame = receive_message(held[peer], deadline=time.monotonic() + ANSWER_SECONDS)
                refused = read_message(frame, RankRefused) if frame.call == JoinCall.REFUSED else None
            except (OSError, ProtocolError) as error:
                raise _lost(formed, peer, f"left ({error})") from None
            if refused is not None:
                raise RankLostError(refused.text, rank=refused.rank)


def _lost(formed: Formed, peer: int, why: object) -> RankLostError:
    return RankLostError(f"rank {peer}, {formed.members[peer]}, {why} while the run was formed", rank=peer)


def _connect_to(
    formed: Formed, rank: int, peer: int, channel: int, config: MeshConfig, tls: Tls | None, deadline: float
) -> RankConnection:
    try:
        connection = dial(formed.members[peer].address, config, tls, deadline=deadline)
    except (UnavailableError, ProtocolError, AuthenticationError) as error:
        raise _lost(formed, peer, f"left ({error})") from None
    try:
        message = RankConnect(generation=formed.generation, rank=rank, channel=channel)
        send_message(connection, JoinCall.CONNECT, message, deadline=deadline)
        frame = receive_message(connection, deadline=deadline)
        if frame.call != JoinCall.CONNECTED:
            raise _lost(formed, peer, f"refused a connection ({frame.text})")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | ProtocolError):
            raise _lost(formed, peer, f"left ({error})") from None
        raise
    return connection


def _accept_peer(arrival: Arrival, formed: Formed, rank: int, sockets: dict[tuple[int, int], RankConnection]) -> None:
    connection, frame = arrival
    try:
        if frame.call == JoinCall.WHO and rank == 0:
            answer_who(connection, formed.members[0])
            return
        if frame.call != JoinCall.CONNECT:
            refuse(connection, UnavailableError("the run is being formed"), retry=True)
            return
        message = read_message(frame, RankConnect)
        key = (message.rank, message.channel)
        if message.generation != formed.generation:
            refuse(connection, FencedError(f"generation {message.generation} is over: this is {formed.generation}"))
        elif not rank < message.rank < len(formed.members) or key in sockets:
            refuse(connection, ProtocolError(f"rank {message.rank} is not expected on channel {message.channel}"))
        else:
            send_message(connection, JoinCall.CONNECTED, Empty(), deadline=time.monotonic() + ANSWER_SECONDS)
            sockets[key] = connection
    except (OSError, ProtocolError) as error:
        _log.warning("refused a connection of a rank: %s", error)
        connection.close()
