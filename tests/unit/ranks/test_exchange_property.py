"""Danger: memory that is overwritten before it was read, messages that are mixed up, and ranks that wait for one that is gone.

Any sequence of exchanges, of any sizes, over any channels, with ranks of any speed, must deliver what was sent. When a rank
leaves or fails in between, every other rank must hear of that very rank, after the exchanges that it had completed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mesh_ranks import as_threads, connected
from monolith.errors import RankLostError
from monolith.ranks import Channel, Kind, SocketMesh

# Around the smallest message in shared memory, around the first buffer there, and larger than what sockets hold.
SIZES = (0, 1, 7, 16_383, 16_384, 100_000, 2**20 - 8, 2**20 + 8, 3_000_000)


@dataclass(frozen=True)
class Round:
    """One exchange: its channel, the index of each message's size, and who reads slowly."""

    channel: Channel
    seed: int
    slow: int

    def message(self, size: int, source: int, target: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, source, target))
        length = SIZES[int(random.integers(len(SIZES)))] if random.integers(4) else SIZES[1]
        return np.resize(random.integers(0, 256, 997, dtype=np.uint8), length)


rounds = st.lists(
    st.builds(Round, st.sampled_from(Channel), st.integers(0, 2**32), st.integers(0, 4)), min_size=1, max_size=12
)


def exchange(mesh: SocketMesh, number: int, one: Round) -> None:
    out = [[one.message(mesh.size, mesh.rank, to), np.array([number])] for to in range(mesh.size)]
    got = mesh.exchange(Kind.ROWS, out, step=number, channel=one.channel)
    if one.slow == mesh.rank:
        time.sleep(0.003)
    for source in range(mesh.size):
        np.testing.assert_array_equal(got[source][0], one.message(mesh.size, source, mesh.rank))
        np.testing.assert_array_equal(got[source][1], [number])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(size=st.integers(2, 4), local=st.booleans(), script=rounds)
@example(size=2, local=True, script=[Round(Channel.MAIN, seed, 0) for seed in range(12)])
def test_everything_arrives(size: int, local: bool, script: list[Round]) -> None:
    meshes = connected(size, local=local)

    def run(mesh: SocketMesh) -> bool:
        for number, one in enumerate(script):
            exchange(mesh, number, one)
        mesh.close()
        return True

    assert as_threads([lambda mesh=mesh: run(mesh) for mesh in meshes]) == [True] * size


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(size=st.integers(2, 3), local=st.booleans(), script=rounds)
def test_channels_do_not_wait_for_each_other(size: int, local: bool, script: list[Round]) -> None:
    """Every rank takes the channels in another order: one thread for each."""
    meshes = connected(size, local=local)

    def run(mesh: SocketMesh) -> bool:
        def use(channel: Channel) -> bool:
            for number, one in enumerate(script):
                if one.channel == channel:
                    exchange(mesh, number, one)
            return True

        order = [Channel((channel + mesh.rank) % len(Channel)) for channel in Channel]
        return as_threads([lambda channel=channel: use(channel) for channel in order]) == [True] * len(Channel)

    assert as_threads([lambda mesh=mesh: run(mesh) for mesh in meshes]) == [True] * size
    for mesh in meshes:
        mesh.close()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(2, 4),
    local=st.booleans(),
    script=rounds,
    dead=st.integers(0, 3),
    at=st.integers(0, 11),
    says=st.booleans(),
)
def test_a_rank_that_is_gone_is_named_by_all(
    size: int, local: bool, script: list[Round], dead: int, at: int, says: bool
) -> None:
    meshes = connected(size, local=local)
    dead, at = dead % size, at % (len(script) + 1)
    done = threading.Barrier(size)

    def run(mesh: SocketMesh) -> object:
        try:
            for number, one in enumerate(script[:at]):
                exchange(mesh, number, one)
            if mesh.rank == dead:
                if says:
                    mesh.fail("no memory")
                else:
                    mesh.close()
                return None
            mesh.exchange(Kind.WORD, [[]] * size, step=at)
        except RankLostError as error:
            return error.rank, says == ("no memory" in str(error))
        finally:
            done.wait(60)
            mesh.close()
        return "went on without it"

    results = as_threads([lambda mesh=mesh: run(mesh) for mesh in meshes])
    assert [result for rank, result in enumerate(results) if rank != dead] == [(dead, True)] * (size - 1)
