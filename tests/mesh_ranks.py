"""Ranks as threads of one process that are connected by real sockets."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from monolith.cluster import HostServiceDiscovery
from monolith.ranks import Channel, DiscoveryRendezvous, MeshConfig, RankMember, SocketMesh, form_mesh
from monolith.ranks.peers import RankConnection
from monolith.ranks.socket_mesh import CONTROL

T = TypeVar("T")

LIMITS: dict[str, Any] = {"formation_secs": 30.0, "rank_timeout_secs": 10.0, "exchange_timeout_secs": 20.0}
"""Time limits of tests: nothing waits for ever."""


def in_folder(folder: Path) -> DiscoveryRendezvous:
    """Return a rendezvous through files."""
    return DiscoveryRendezvous(HostServiceDiscovery(folder))


def as_threads(bodies: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Call all of them at the same time. Returns what each has returned or raised."""
    results: dict[int, T | BaseException] = {}

    def call(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [results[number] for number in range(len(bodies))]


def run_formed(folder: Path, size: int, body: Callable[[SocketMesh], T], **config: object) -> list[T | BaseException]:
    """Form a run and call `body` on each rank."""
    settings = MeshConfig(**{**LIMITS, **config})

    def rank(number: int) -> T:
        with ExitStack() as stack:
            mesh = form_mesh(number, size, in_folder(folder), config=settings)
            stack.callback(mesh.close)
            return body(mesh)

    return as_threads([lambda number=number: rank(number) for number in range(size)])


def connected(
    size: int, *, local: bool = True, cut: tuple[int, int] | None = None, **config: object
) -> list[SocketMesh]:
    """Return connected ranks that were never formed, which takes less time.

    Args:
        size: the number of ranks.
        local: whether they share memory.
        cut: two ranks between which nothing arrives, though neither end is closed.
        config: of `MeshConfig`.
    """
    members = [RankMember(rank=r, incarnation=1, address="127.0.0.1:1", host="here", process=1) for r in range(size)]
    ends: list[dict[tuple[int, int], RankConnection]] = [{} for _ in range(size)]
    unheard: list[socket.socket] = []
    for one in range(size):
        for other in range(one + 1, size):
            for channel in (*Channel, CONTROL):
                first, second = _pair(local)
                if (one, other) == cut:
                    unheard.append(second)
                    second, unread = _pair(local)
                    unheard.append(unread)
                ends[one][other, channel] = RankConnection(first)
                ends[other][one, channel] = RankConnection(second)
    settings = MeshConfig(**{**LIMITS, **config})
    meshes = [
        SocketMesh(rank=rank, members=members, generation=1, connections=ends[rank], config=settings)
        for rank in range(size)
    ]
    # Kept open as long as the first mesh.
    weakref.finalize(meshes[0], lambda: [one.close() for one in unheard])
    return meshes


def _pair(local: bool) -> tuple[socket.socket, socket.socket]:
    if local:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]
