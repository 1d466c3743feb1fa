"""`GlooMesh`: a mesh over torch's gloo, for networks where ranks cannot connect to each other by themselves."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from monolith.errors import RankLostError, RanksDisagreeError
from monolith.ranks.mesh import Arrays, Channel, Kind
from monolith.ranks.rendezvous import Rendezvous, StoreRendezvous

__all__ = ["GlooMesh", "agree_on_generation", "gloo_store"]

_POLL_SECS = 0.02
_CONNECT_SECS = 5.0
_HEADER = 4  # int64: kind, step, generation, bytes of the message
_HEADER_TAG, _BODY_TAG = 0, 1
_FORMED, _JOINED, _FAILED = "monolith/formed", "monolith/joined", "monolith/failed"


def gloo_store(rendezvous: Rendezvous, *, rank: int, host: str, timeout: float) -> Store:
    """Return a store that all ranks reach: that of torchrun, or one that rank 0 runs at `host` and announces.

    Raises:
        RankLostError: rank 0 did not announce one that answers within `timeout` seconds.
    """
    if isinstance(rendezvous, StoreRendezvous):
        return rendezvous.store
    limit = timedelta(seconds=timeout)
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        rendezvous.announce(f"{host}:{store.port}")
        return store
    deadline, why = time.monotonic() + timeout, "has not announced its address yet"
    while time.monotonic() < deadline:
        if (address := rendezvous.find()) is not None:
            there, _, port = address.rpartition(":")
            try:
                return TCPStore(there, int(port), timeout=timedelta(seconds=_CONNECT_SECS), wait_for_workers=False)
            except RuntimeError as error:
                # It may be that of a process that has died. Its successor announces another one.
                why = f"does not answer at {address}: {str(error).splitlines()[0]}"
        time.sleep(_POLL_SECS)
    raise RankLostError(f"the store of rank 0 {why}, for {timeout:g} s", rank=0)


def agree_on_generation(store: Store, *, rank: int, size: int, timeout: float) -> int:
    """Return a number that all ranks which are there now agree on, and that no earlier formation had.

    The store may have outlived processes of an earlier formation, as that of torchrun's agent does. Rank 0 forms a new one when
    every rank has shown itself again.

    Raises:
        RankLostError: a rank did not come within `timeout` seconds.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> first = agree_on_generation(store, rank=0, size=1, timeout=1.0)
        >>> agree_on_generation(store, rank=0, size=1, timeout=1.0) > first
        True
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"{_JOINED}/{rank}", own)
    while time.monotonic() < deadline:
        formed = _read(store, _FORMED)
        if formed is not None and formed["members"].get(str(rank)) == own:
            return int(formed["generation"])
        if rank == 0:
            _form(store, size, formed)
        time.sleep(_POLL_SECS)
    known = {} if formed is None else formed["members"]
    missing = [r for r in range(size) if _text(store, f"{_JOINED}/{r}") in (None, known.get(str(r)))]
    lost = missing[0] if missing else 0
    raise RankLostError(f"rank {lost} did not come within {timeout:g} s; started were {size} ranks", rank=lost)


def _form(store: Store, size: int, before: dict[str, Any] | None) -> None:
    members = {str(rank): _text(store, f"{_JOINED}/{rank}") for rank in range(size)}
    old = {} if before is None else before["members"]
    if all(nonce is not None and nonce != old.get(rank) for rank, nonce in members.items()):
        # From the clock: larger than every earlier one, even if rank 0 was replaced by another process.
        store.set(_FORMED, json.dumps({"generation": str(time.time_ns()), "members": members}))


def _text(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _read(store: Store, key: str) -> dict[str, Any] | None:
    text = _text(store, key)
    return None if text is None else json.loads(text)


class GlooMesh:
    """A `Mesh` whose messages are sent by gloo. It is slower than `SocketMesh` and does not encrypt.

    Args:
        store: reaches all ranks, such as the `TCPStore` of torchrun.
        rank: this process.
        size: the number of ranks.
        timeout: seconds after which a silent rank counts as lost.
        formation_secs: seconds in which all ranks must come together. None: `timeout`.

    Example:
        >>> from torch.distributed import HashStore
        >>> mesh = GlooMesh(HashStore(), rank=0, size=1, timeout=5.0)
        >>> [arrays[0].tolist() for arrays in mesh.exchange(Kind.WORD, [[np.arange(2)]])]
        [[0, 1]]
        >>> mesh.close()
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, timeout: float, formation_secs: float | None = None
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.generation = agree_on_generation(store, rank=rank, size=size, timeout=formation_secs or timeout)
        # A prefix of its own: gloo would take the addresses of dead processes from an earlier formation.
        self._store = PrefixStore(f"monolith/mesh/{self.generation}", store)
        # Torch's stubs lack the methods of its base class that send and receive.
        self._groups: dict[Channel, Any] = {}
        self._headers: dict[Channel, dict[int, np.ndarray]] = {channel: {} for channel in Channel}
        self._closed = threading.Event()
        for channel in Channel if size > 1 else ():
            # All at once and now: a group that is made with its first message does not respect the time limit.
            self._groups[channel] = ProcessGroupGloo(
                PrefixStore(channel.name, self._store), rank, size, timedelta(seconds=timeout)
            )

    def exchange(
        self, kind: Kind, out: Sequence[Arrays], *, step: int = 0, channel: Channel = Channel.MAIN
    ) -> list[Arrays]:
        """Send `out[r]` to every rank r. Returns what each has sent here."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        bodies = {rank: _packed(out[rank]) for rank in peers}
        sending = []
        try:
            for rank in peers:
                header = torch.tensor([kind, step, self.generation, bodies[rank].numel()], dtype=torch.int64)
                sending.append(self._groups[channel].send([header], rank, _HEADER_TAG))
                sending.append(self._groups[channel].send([bodies[rank]], rank, _BODY_TAG))
            received = {rank: self._receive(rank, kind, step, channel) for rank in peers}
            for work in sending:
                work.wait()
        except RuntimeError as error:
            raise self._lost(step, error) from None
        return [out[rank] if rank == self.rank else received[rank] for rank in range(self.size)]

    def next_kind(self, *, channel: Channel = Channel.MAIN) -> Kind:
        """Wait until another rank has sent its message of the next exchange, and return its kind."""
        pending = self._headers[channel]
        if not pending:
            header = torch.zeros(_HEADER, dtype=torch.int64)
            try:
                work = self._groups[channel].recv_anysource([header], _HEADER_TAG)
                work.wait()
            except RuntimeError as error:
                raise self._lost(0, error) from None
            pending[work._source_rank()] = header.numpy()
        return Kind(int(next(iter(pending.values()))[0]))

    def loss(self, *, step: int, wait_secs: float = 0.0) -> None:
        """Return None: gloo says that a rank is lost only when something is sent to it."""

    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends."""
        if self.size > 1 and not self._closed.is_set():
            # The store ends with rank 0. Then the others notice that this rank is gone.
            with suppress(RuntimeError):
                self._store.set(f"{_FAILED}/{self.rank}", reason)
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self._groups.clear()

    def _receive(self, rank: int, kind: Kind, step: int, channel: Channel) -> Arrays:
        header = self._headers[channel].pop(rank, None)
        if header is None:
            incoming = torch.zeros(_HEADER, dtype=torch.int64)
            self._wait(self._groups[channel].recv([incoming], rank, _HEADER_TAG), rank, step)
            header = incoming.numpy()
        other, at, generation, size = header.tolist()
        if (other, at, generation) != (kind, step, self.generation):
            raise RanksDisagreeError(
                f"rank {self.rank} is in {kind.name} of step {step}, rank {rank} in {Kind(other).name} of step {at}"
            )
        body = torch.empty(size, dtype=torch.uint8)
        self._wait(self._groups[channel].recv([body], rank, _BODY_TAG), rank, step)
        return _unpacked(body.numpy())

    def _wait(self, work: Work, rank: int, step: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(step, error, rank) from None

    def _lost(self, step: int, error: Exception, rank: int | None = None) -> RankLostError:
        """Describe a failure of gloo, which says neither who was lost nor why, by what ranks have said before they ended."""
        # Without an answer if the store has ended with rank 0.
        with suppress(RuntimeError):
            for other in range(self.size):
                if other != self.rank and (reason := _text(self._store, f"{_FAILED}/{other}")) is not None:
                    return RankLostError(f"rank {other} failed in step {step}: {reason}", rank=other, step=step)
        who = "a rank" if rank is None else f"rank {rank}"
        why = f"{who} was lost in step {step}, or lost another one: {str(error).splitlines()[0]}"
        return RankLostError(why, rank=-1 if rank is None else rank, step=step)


def _packed(arrays: Arrays) -> torch.Tensor:
    """Return one message: the description of all arrays as JSON, its length before it, then their bytes, all aligned."""
    shapes = json.dumps([[array.dtype.str, array.shape] for array in arrays]).encode()
    shapes += b" " * (-len(shapes) % 8)
    parts = [np.array([len(shapes)], dtype=np.int64).view(np.uint8), np.frombuffer(shapes, dtype=np.uint8)]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [flat, np.zeros(-flat.size % 8, dtype=np.uint8)]
    return torch.from_numpy(np.concatenate(parts))


def _unpacked(body: np.ndarray) -> Arrays:
    length = int(body[:8].view(np.int64)[0])
    at, arrays = 8 + length, []
    for dtype, shape in json.loads(body[8:at].tobytes()):
        array: np.ndarray = np.ndarray(shape, np.dtype(dtype), body.data, at)
        arrays.append(array)
        at += array.nbytes + -array.nbytes % 8
    return arrays
