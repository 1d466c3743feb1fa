"""Rank 0 as the leader of a run: it collects the ranks, and holds those that come while the run is going on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from monolith.console import Reminder
from monolith.errors import (
    FencedError,
    MonolithError,
    ProtocolError,
    RankLostError,
    RanksDisagreeError,
    UnavailableError,
)
from monolith.ranks.messages import (
    Empty,
    Formed,
    JoinCall,
    RankJoin,
    RankMember,
    RankRefused,
    read_message,
    receive_message,
    send_message,
)
from monolith.ranks.peers import Arrival, Gate, MeshConfig, RankConnection, dial
from monolith.ranks.rendezvous import Rendezvous

__all__ = [
    "ANSWER_SECONDS",
    "HERE_SECONDS",
    "LEADER_SECONDS",
    "Leader",
    "Lobby",
    "PAUSE_SECONDS",
    "answer_who",
    "refuse",
]

ANSWER_SECONDS = 5.0
"""How long another rank may take to answer a message of the formation."""
HERE_SECONDS = 1.0
"""Interval at which a rank that has joined says that it still waits."""
LEADER_SECONDS = 10.0
"""How long rank 0 waits for another process that leads the run to end."""
RIVAL_SECONDS = 3.0
"""A rank that was not heard from for this long while it waits gives way to another process with its rank."""
PAUSE_SECONDS = 0.1
"""Between two looks at what is waited for."""


_log = logging.getLogger(__name__)


@dataclass
class _Joined:
    join: RankJoin
    connection: RankConnection
    heard: float


class Leader:
    """Collects the ranks of a run, as rank 0."""

    def __init__(
        self, gate: Gate, join: RankJoin, rendezvous: Rendezvous, config: MeshConfig, while_waiting: Callable[[], None]
    ) -> None:
        self._gate, self._own, self._rendezvous, self._config = gate, join, rendezvous, config
        self._while_waiting = while_waiting
        self._joined: dict[int, _Joined] = {}
        self._rivals: dict[int, _Joined] = {}
        self._reminder = Reminder(_log, who="rank 0")

    def form(self, *, least: int, replacement_secs: float, deadline: float) -> tuple[Formed, dict[int, RankConnection]]:
        """Wait for the others and tell them the generation. Returns also the connections to them, by their new ranks."""
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
                arrival = self._gate.take(timeout=min(left, PAUSE_SECONDS))
                if arrival is not None:
                    self._arrived(arrival)
        except BaseException as error:
            self._refuse_all(error)
            raise

    def _replace_leader(self) -> None:
        """Raise `FencedError` if another process leads this run."""
        until = time.monotonic() + LEADER_SECONDS
        while True:
            self._while_waiting()
            try:
                address = self._rendezvous.find()
                other = self._leader_at(address) if address and address != self._gate.address else None
            except (OSError, ProtocolError):
                return
            # This process's own mesh of before, which is not closed yet, is no rival.
            if other is None or other.incarnation == self._own.member.incarnation:
                return
            if time.monotonic() >= until:
                raise FencedError(
                    f"two processes are rank 0: {other} leads the run already, {self._own.member} is another; end one"
                )
            time.sleep(PAUSE_SECONDS)

    def _leader_at(self, address: str) -> RankMember | None:
        """Return which process leads at an address. None if nobody answers there."""
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            connection = dial(address, self._config, self._gate.tls, deadline=deadline)
        except UnavailableError:
            return None
        try:
            send_message(connection, JoinCall.WHO, Empty(), deadline=deadline)
            frame = receive_message(connection, deadline=deadline)
            return read_message(frame, RankMember) if frame.call == JoinCall.LEADER else None
        except OSError:
            return None
        finally:
            connection.close()

    def _arrived(self, arrival: Arrival) -> None:
        connection, frame = arrival
        try:
            if frame.call == JoinCall.WHO:
                answer_who(connection, self._own.member)
                return
            if frame.call != JoinCall.JOIN:
                refuse(connection, ProtocolError("the run is not formed yet"), retry=True)
                return
            join = read_message(frame, RankJoin)
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
        if why is not None:
            error = RanksDisagreeError(f"{why}; ranks 0: {own.member}, {rank}: {join.member}")
            refuse(new.connection, error)
            raise error
        old = self._joined.get(rank)
        if old is None or old.join.member.incarnation == join.member.incarnation:
            self._seat(rank, new)
        elif old.join.after == join.after:
            # Both began afresh: the first may have died, or be a second process with the same number.
            self._drop(self._rivals.pop(rank, None))
            old.heard, self._rivals[rank] = 0.0, new
        elif 0 < join.after < old.join.after or old.join.after == 0:
            refuse(new.connection, _fenced(join.member, old.join.member))
        else:
            refuse(old.connection, _fenced(old.join.member, join.member))
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
                raise RanksDisagreeError(_two_processes(old.join.member, rival.join.member))

    def _tell_all(self) -> tuple[Formed, dict[int, RankConnection]]:
        seen = [self._own.after, *(joined.join.after for joined in self._joined.values())]
        generation = max(int(time.time() * 1000), max(seen) + 1)
        members = [self._own.member, *(self._joined[rank].join.member for rank in sorted(self._joined))]
        formed = Formed(generation=generation, members=members)
        for rank, joined in self._joined.items():
            try:
                send_message(joined.connection, JoinCall.FORMED, formed, deadline=time.monotonic() + ANSWER_SECONDS)
            except OSError as error:
                raise RankLostError(f"rank {rank} left while the run was formed: {error}", rank=rank) from None
        # Not closed: a rank could lose what was sent last if something that it has sent is not read.
        return formed, {at: self._joined[rank].connection for at, rank in enumerate(sorted(self._joined), 1)}

    def _refuse_all(self, error: BaseException) -> None:
        retry = not isinstance(error, RanksDisagreeError)
        for joined in (*self._joined.values(), *self._rivals.values()):
            refuse(joined.connection, error, retry=retry)


def _fenced(stale: RankMember, other: RankMember) -> FencedError:
    return FencedError(f"rank {stale.rank} was given to {other}; {stale} is no longer part of the run")


def _two_processes(one: RankMember, other: RankMember) -> str:
    return f"two processes are rank {one.rank}: {one} and {other}; give each its own rank"


def answer_who(connection: RankConnection, leader: RankMember) -> None:
    """Tell a process that asks which one leads."""
    with suppress(OSError):
        send_message(connection, JoinCall.LEADER, leader, deadline=time.monotonic() + ANSWER_SECONDS)
    connection.close()


def refuse(connection: RankConnection, error: BaseException, *, retry: bool = False) -> None:
    """Tell a process why it is not admitted, and close its connection."""
    name = type(error).__name__ if isinstance(error, MonolithError) else "MonolithError"
    rank = error.rank if isinstance(error, RankLostError) else -1
    refused = RankRefused(error=name, text=str(error)[:4096], retry=retry, rank=rank)
    with suppress(OSError):
        send_message(connection, JoinCall.REFUSED, refused, deadline=time.monotonic() + HERE_SECONDS)
    connection.close()


class Lobby:
    """Where processes wait that want to join while the run is going on. Rank 0 has it."""

    def __init__(self, gate: Gate, members: Sequence[RankMember], held: Iterable[RankConnection]) -> None:
        """Take over the gate and the connections on which `members` have joined, which end when the run does."""
        self._gate, self._members, self._held = gate, tuple(members), tuple(held)
        self._waiting: dict[int, _Joined] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self.is_heard: Callable[[int, float], bool] = lambda rank, seconds: False
        """Whether a rank of the run was heard from in the last seconds."""
        gate.attend = self._attend
        while (arrival := gate.take(timeout=0.0)) is not None:
            self._attend(arrival)

    def newcomers(self) -> list[int]:
        """Return the ranks that wait to join and are not part of the run, as they were launched."""
        with self._lock:
            for rank, joined in list(self._waiting.items()):
                try:
                    while joined.connection.is_readable():
                        receive_message(joined.connection, deadline=time.monotonic() + HERE_SECONDS)
                except (OSError, ProtocolError):
                    joined.connection.close()
                    del self._waiting[rank]
            return sorted(set(self._waiting) - {member.rank for member in self._members})

    def close(self) -> None:
        """Stop listening. Those who wait look for the leader again."""
        self._gate.close()
        for connection in self._held:
            connection.close()
        with self._lock:
            self._is_closed = True
            for joined in self._waiting.values():
                joined.connection.close()
            self._waiting.clear()

    def _attend(self, arrival: Arrival) -> None:
        connection, frame = arrival
        try:
            if frame.call == JoinCall.WHO:
                answer_who(connection, self._members[0])
            elif frame.call == JoinCall.JOIN:
                self._hold(_Joined(read_message(frame, RankJoin), connection, time.monotonic()))
            else:
                refuse(connection, FencedError("this generation of the run is complete; join it again"))
        except (OSError, ProtocolError) as error:
            _log.warning("refused a message of a rank: %s", error)
            connection.close()

    def _hold(self, new: _Joined) -> None:
        member = new.join.member
        for rank, old in enumerate(self._members):
            if old.rank != member.rank or old.incarnation == member.incarnation:
                continue
            if member.incarnation < old.incarnation:
                refuse(new.connection, _fenced(member, old))
                return
            # A process that was killed has ended its connections. One that is alive is heard from meanwhile.
            until = time.monotonic() + RIVAL_SECONDS
            while self.is_heard(rank, RIVAL_SECONDS) and time.monotonic() < until and not self._is_closed:
                time.sleep(PAUSE_SECONDS)
            if self.is_heard(rank, RIVAL_SECONDS) and not self._is_closed:
                refuse(new.connection, RanksDisagreeError(_two_processes(old, member)))
                return
        with self._lock:
            before = self._waiting.pop(member.rank, None)
            if before is not None:
                before.connection.close()
            if self._is_closed:
                new.connection.close()
            else:
                self._waiting[member.rank] = new
                _log.info("rank %s, %s, waits to join", member.rank, member)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:10]))
    return f"{shown}, ..." if len(ranks) > 10 else shown
