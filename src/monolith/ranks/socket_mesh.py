"""`SocketMesh`: ranks in processes of their own, connected by sockets."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from monolith.errors import InvalidArgumentError, ProtocolError, RankLostError, RanksDisagreeError
from monolith.process_bound import ProcessBound, let_go_in_children
from monolith.ranks.mesh import Arrays, Channel, Kind
from monolith.ranks.peers import Gate, MeshConfig
from monolith.transport.frames import decode, encode_parts

if TYPE_CHECKING:
    from monolith.ranks.formation import RankMember

__all__ = ["CONTROL", "SocketMesh"]

CONTROL = len(Channel)
"""The connection of two ranks that carries news of failures."""
_MAGIC = b"MORK"
_HEADER = struct.Struct("<4sHHQQqQQ")  # magic, kind, flags, bytes, round, step, generation, tables
_MAX_BYTES = 2**40
_MAX_REASON = 4096


@dataclass
class _Peer:
    """What is being received from one rank on one channel, and what is left to be sent."""

    socket: socket.socket
    head: bytearray = field(default_factory=bytearray)
    body: np.ndarray | None = None
    filled: int = 0
    left: list[memoryview] = field(default_factory=list)

    @property
    def header(self) -> tuple[bytes, int, int, int, int, int, int, int] | None:
        return _HEADER.unpack(self.head) if len(self.head) == _HEADER.size else None

    @property
    def is_complete(self) -> bool:
        return self.body is not None and self.filled == len(self.body)

    def receive(self, *, only_header: bool) -> None:
        """Take what has arrived. Raises `ConnectionError` at the end of the stream."""
        with suppress(BlockingIOError):
            if len(self.head) < _HEADER.size:
                got = self.socket.recv(_HEADER.size - len(self.head))
                if not got:
                    raise ConnectionResetError("it has closed its connection")
                self.head += got
                return
            if only_header:
                return
            if self.body is None:
                magic, _, _, size, *_ = _HEADER.unpack(self.head)
                if magic != _MAGIC or size > _MAX_BYTES:
                    raise ProtocolError(f"a message begins with {magic!r} and claims {size:,} bytes")
                self.body = np.empty(size, dtype=np.uint8)
            if self.filled < len(self.body):
                count = self.socket.recv_into(self.body[self.filled :].data)
                if not count:
                    raise ConnectionResetError("it has closed its connection")
                self.filled += count

    def send(self) -> None:
        with suppress(BlockingIOError):
            sent = self.socket.sendmsg(self.left[:16])
            while self.left and sent >= len(self.left[0]):
                sent -= len(self.left.pop(0))
            if self.left:
                self.left[0] = self.left[0][sent:]

    def take(self) -> np.ndarray:
        assert self.body is not None
        body, self.body, self.filled = self.body, None, 0
        self.head = bytearray()
        return body


class SocketMesh:
    """A `Mesh` between processes. Made by `form_mesh`."""

    def __init__(
        self,
        *,
        rank: int,
        members: Sequence[RankMember],
        generation: int,
        sockets: Mapping[tuple[int, int], socket.socket],
        config: MeshConfig,
        gate: Gate | None,
    ) -> None:
        """Take over connected sockets, by rank and channel."""
        self.rank, self.size, self.generation = rank, len(members), generation
        self.members = tuple(members)
        """The processes of this generation, by rank."""
        self.tables = 0
        """Hash of the declared tables, sent with every message. Ranks that have set different ones get an error."""
        self._config, self._gate = config, gate
        self._peers = {
            channel: {peer: _Peer(one) for (peer, of), one in sorted(sockets.items()) if of == channel}
            for channel in Channel
        }
        self._control = {peer: one for (peer, of), one in sockets.items() if of == CONTROL}
        self._rounds = dict.fromkeys(Channel, 0)
        self._lost: RankLostError | None = None
        self._bound = ProcessBound("the connections of a rank")
        for one in sockets.values():
            one.setblocking(False)
        let_go_in_children(self)

    def exchange(
        self, kind: Kind, out: Sequence[Arrays], *, step: int = 0, channel: Channel = Channel.MAIN
    ) -> list[Arrays]:
        """Send `out[r]` to every rank r. Returns what each has sent here."""
        self._bound.require()
        if len(out) != self.size:
            raise InvalidArgumentError(f"out: expected arrays for each of {self.size} ranks, got {len(out)}")
        peers, number = self._peers[channel], self._rounds[channel]
        for rank, peer in peers.items():
            parts = encode_parts(call=kind, request=number, text="", arrays=out[rank])
            size = sum(map(len, parts))
            header = _HEADER.pack(_MAGIC, kind, 0, size, number, step, self.generation, self.tables)
            peer.left = [memoryview(header), *(part.data for part in parts if len(part))]
        self._loop(peers, lambda peer: not peer.left and peer.is_complete, step, only_header=False)
        self._check(kind, step, number, peers)
        self._rounds[channel] += 1
        return [
            out[rank] if rank == self.rank else decode(peers[rank].take(), max_bytes=_MAX_BYTES).arrays
            for rank in range(self.size)
        ]

    def next_kind(self, *, channel: Channel = Channel.MAIN) -> Kind:
        """Wait for the next message of another rank and return its kind."""
        self._bound.require()
        peers = self._peers[channel]
        if not peers:
            raise InvalidArgumentError("next_kind: there is no other rank")
        self._loop(peers, lambda peer: peer.header is not None, 0, only_header=True, any_peer=True)
        return Kind(next(peer.header[1] for peer in peers.values() if peer.header is not None))

    def fail(self, reason: str) -> None:
        """Tell the others."""
        text = reason.encode()[:_MAX_REASON]
        for one in self._control.values():
            with suppress(OSError):
                one.send(struct.pack("<IQ", self.rank, len(text)) + text)

    def close(self) -> None:
        """Close all connections."""
        if not self._bound.is_here:
            return
        if self._gate is not None:
            self._gate.close()
        self.let_go()

    def let_go(self) -> None:
        """Close the sockets, also in a forked child."""
        for peers in self._peers.values():
            for peer in peers.values():
                peer.socket.close()
        for one in self._control.values():
            one.close()

    def _loop(
        self,
        peers: dict[int, _Peer],
        is_done: Callable[[_Peer], bool],
        step: int,
        *,
        only_header: bool,
        any_peer: bool = False,
    ) -> None:
        deadline = time.monotonic() + self._config.exchange_timeout_secs
        while True:
            waiting = [rank for rank, peer in peers.items() if not is_done(peer)]
            if not waiting or (any_peer and len(waiting) < len(peers)):
                return
            ready = select.poll()
            by_number: dict[int, tuple[int, _Peer | None]] = {}
            for rank in waiting:
                peer = peers[rank]
                number = peer.socket.fileno()
                if number < 0:
                    raise RankLostError("the connections of this rank are closed", rank=self.rank, step=step)
                by_number[number] = rank, peer
                reads = not peer.is_complete
                ready.register(number, (select.POLLIN if reads else 0) | (select.POLLOUT if peer.left else 0))
            for rank, one in list(self._control.items()):
                if rank in waiting:
                    by_number[one.fileno()] = rank, None
                    ready.register(one, select.POLLIN)
            found = ready.poll(max(0.0, 1000 * (deadline - time.monotonic())))
            if not found:
                raise RankLostError(
                    f"rank {waiting[0]} did not come to step {step} in time", rank=waiting[0], step=step
                )
            # What a rank said before it left comes before the end of its streams.
            for number, event in sorted(found, key=lambda one: by_number[one[0]][1] is not None):
                rank, found_peer = by_number[number]
                try:
                    if found_peer is None:
                        self._hear(rank, step)
                        continue
                    if event & ~select.POLLOUT:
                        found_peer.receive(only_header=only_header)
                    if event & select.POLLOUT:
                        found_peer.send()
                except OSError as error:
                    raise RankLostError(f"rank {rank} was lost in step {step}: {error}", rank=rank, step=step) from None

    def _hear(self, rank: int, step: int) -> None:
        with suppress(BlockingIOError):
            said = self._control[rank].recv(12 + _MAX_REASON)
            if not said:
                # A rank that has ended. What it sent before may still be on its way.
                self._control.pop(rank).close()
                return
            text = said[12:].decode(errors="replace")
            raise RankLostError(f"rank {rank} failed in step {step}: {text}", rank=rank, step=step)

    def _check(self, kind: Kind, step: int, number: int, peers: dict[int, _Peer]) -> None:
        for rank, peer in peers.items():
            assert peer.header is not None
            _, other, _, _, at, other_step, generation, tables = peer.header
            if (other, at, other_step, generation) != (kind, number, step, self.generation):
                name = Kind(other).name if other in Kind.__members__.values() else str(other)
                raise RanksDisagreeError(
                    f"rank {self.rank} is in {kind.name} of step {step}, rank {rank} in {name} of step {other_step} "
                    f"(rounds {number} and {at}, generations {self.generation} and {generation})"
                )
            if tables and self.tables and tables != self.tables:
                raise RanksDisagreeError(
                    f"ranks {self.rank} and {rank} have declared different tables: {self.tables:x} and {tables:x}"
                )
