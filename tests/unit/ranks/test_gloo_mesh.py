"""A mesh over gloo does what the contract of a mesh says, between real processes too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from monolith.errors import RankLostError, RanksDisagreeError
from monolith.ranks.agreement import Agreement
from monolith.ranks.gloo_mesh import GlooMesh, agree_on_generation
from monolith.ranks.mesh import Channel, Kind


def run(size: int, rank: Callable[[GlooMesh], object], *, timeout: float = 10.0) -> list[object]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))

    def body(number: int) -> object:
        mesh = GlooMesh(store, rank=number, size=size, timeout=timeout)
        try:
            return rank(mesh)
        finally:
            mesh.close()

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(body, number) for number in range(size)]]


def test_every_rank_gets_what_every_other_sends_to_it() -> None:
    def rank(mesh: GlooMesh) -> object:
        out = [[np.full(to, 10 * mesh.rank + to, dtype=np.float32), np.array([mesh.rank])] for to in range(mesh.size)]
        return [[a.tolist() for a in arrays] for arrays in mesh.exchange(Kind.IDS, out, step=4)]

    found = run(3, rank)
    assert found[2] == [[[2.0, 2.0], [0]], [[12.0, 12.0], [1]], [[22.0, 22.0], [2]]]
    assert found[0] == [[[], [0]], [[], [1]], [[], [2]]]


def test_large_messages_in_both_directions_at_once() -> None:
    def rank(mesh: GlooMesh) -> object:
        out = [[np.full(2**21, mesh.rank, dtype=np.int64)] for _ in range(2)]
        received = mesh.exchange(Kind.ROWS, out)[1 - mesh.rank][0]
        return int(received.sum())

    assert run(2, rank) == [2**21, 0]


def test_a_rank_without_a_message_learns_the_kind_of_the_next_exchange() -> None:
    def rank(mesh: GlooMesh) -> object:
        if mesh.rank == 1:
            assert mesh.next_kind() is Kind.IDS
            assert mesh.next_kind() is Kind.IDS
        return [len(arrays) for arrays in mesh.exchange(Kind.IDS, [[]] * 2 if mesh.rank else [[np.arange(1)]] * 2)]

    assert run(2, rank) == [[1, 0], [1, 0]]


def test_channels_are_independent() -> None:
    def rank(mesh: GlooMesh) -> object:
        order = [Channel.MAIN, Channel.PUSH] if mesh.rank else [Channel.PUSH, Channel.MAIN]
        found: dict[Channel, object] = {}

        def one(channel: Channel) -> None:
            received = mesh.exchange(Kind.WORD, [[np.array([channel])]] * 2, channel=channel)
            found[channel] = received[1 - mesh.rank][0].tolist()

        threads = [threading.Thread(target=one, args=(channel,)) for channel in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert run(2, rank) == [{Channel.MAIN: [0], Channel.PUSH: [2]}] * 2


def test_ranks_in_different_exchanges_are_named() -> None:
    def rank(mesh: GlooMesh) -> None:
        mesh.exchange(Kind.IDS if mesh.rank else Kind.ROWS, [[], []], step=3)

    with pytest.raises(RanksDisagreeError, match=r"rank 0 is in ROWS of step 3, rank 1 in IDS of step 3"):
        run(2, rank)


def test_a_rank_that_fails_says_why() -> None:
    told = threading.Event()

    def rank(mesh: GlooMesh) -> None:
        if mesh.rank == 1:
            mesh.fail("its disk is full")
            told.set()
            return
        told.wait(10)
        mesh.exchange(Kind.IDS, [[], []], step=7)

    with pytest.raises(RankLostError, match="rank 1 failed in step 7: its disk is full") as lost:
        run(2, rank, timeout=2.0)
    assert (lost.value.rank, lost.value.step) == (1, 7)


class EndedStore:
    """The store of a rank 0 that was killed."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("failed to recv, got 0 bytes")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("failed to send: Broken pipe")


def test_a_rank_is_lost_although_the_store_has_ended_with_it() -> None:
    left = threading.Event()

    def rank(mesh: GlooMesh) -> None:
        mesh._store = EndedStore()  # type: ignore[assignment]
        if mesh.rank == 0:
            mesh.fail("nobody hears it")
            left.set()
            return
        left.wait(10)
        mesh.exchange(Kind.IDS, [[], []], step=4)

    with pytest.raises(RankLostError, match="was lost in step 4"):
        run(2, rank, timeout=2.0)


def test_a_silent_rank_is_lost_at_the_deadline() -> None:
    done = threading.Event()

    def rank(mesh: GlooMesh) -> None:
        if mesh.rank == 1:
            done.wait(20)
            return
        try:
            mesh.exchange(Kind.IDS, [[], []], step=2)
        finally:
            done.set()

    with pytest.raises(RankLostError, match="rank 1 was lost in step 2"):
        run(2, rank, timeout=1.0)


def test_steps_are_agreed_on_over_gloo() -> None:
    assert run(2, lambda mesh: Agreement(mesh).next_step(rows=mesh.rank).rows) == [(0, 1), (0, 1)]


def test_a_new_formation_waits_until_every_rank_has_come_again() -> None:
    store = dist.HashStore()

    def form(rank: int) -> int:
        return agree_on_generation(store, rank=rank, size=2, timeout=10.0)

    with ThreadPoolExecutor(2) as threads:
        first = list(threads.map(form, range(2)))
        with pytest.raises(RankLostError, match=r"rank 1 did not come within 0\.2 s"):
            agree_on_generation(store, rank=0, size=2, timeout=0.2)
        second = list(threads.map(form, range(2)))
    assert first[0] == first[1] < second[0] == second[1]
