"""Danger: ranks that wait for ever for one that cannot answer, or give up one that only computes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from mesh_ranks import as_threads, connected
from monolith.errors import ForkedProcessError, RankLostError, RanksDisagreeError
from monolith.ranks import Channel, Kind, SocketMesh


def word(mesh: SocketMesh, step: int = 0) -> object:
    """Return the ranks that were heard from, or the error."""
    try:
        return [
            int(arrays[0][0]) for arrays in mesh.exchange(Kind.WORD, [[np.array([mesh.rank])]] * mesh.size, step=step)
        ]
    except (RankLostError, RanksDisagreeError) as error:
        return error


@pytest.mark.parametrize("local", [True, False])
def test_ranks_that_are_cut_off_from_each_other_are_noticed_by_all(local: bool) -> None:
    # Nothing arrives between 1 and 2. Rank 0 reaches both, and is told by the one that notices first.
    meshes = connected(3, local=local, cut=(1, 2), rank_timeout_secs=0.5, exchange_timeout_secs=600.0)

    def exchange(mesh: SocketMesh) -> object:
        # Rank 0 completes an exchange that the two others cannot complete.
        first = word(mesh, 7)
        return word(mesh, 7) if mesh.rank == 0 and first == [0, 1, 2] else first

    for error in as_threads([lambda mesh=mesh: exchange(mesh) for mesh in meshes]):
        assert isinstance(error, RankLostError)
        assert error.rank in (1, 2)
        assert error.step == 7
        assert "was not heard from for 0.5 s" in str(error)
    for mesh in meshes:
        mesh.close()


def test_a_rank_that_is_alive_but_does_not_come_ends_the_exchange() -> None:
    meshes = connected(3, exchange_timeout_secs=2.0)
    for error in as_threads([lambda mesh=mesh: word(mesh) for mesh in meshes[:2]]):
        assert isinstance(error, RankLostError)
        assert error.rank == 2
        assert "it did not come in time" in str(error)
    # It is told why it is alone when it comes.
    late = word(meshes[2])
    if late == [0, 1, 2]:
        # The words of the others were read before the news of their end, which comes with the next exchange.
        late = word(meshes[2])
    assert isinstance(late, RankLostError)
    assert "has lost this rank, 2: it did not come in time" in str(late)
    for mesh in meshes:
        mesh.close()


def test_a_rank_that_holds_the_interpreter_for_long_is_not_lost() -> None:
    meshes = connected(2, rank_timeout_secs=0.5)
    # Unlike time.sleep, this keeps every Python thread of the process waiting.
    holding = ctypes.PyDLL(None).usleep
    holding(1_500_000)
    assert as_threads([lambda mesh=mesh: word(mesh) for mesh in meshes]) == [[0, 1], [0, 1]]
    for mesh in meshes:
        mesh.close()


def test_a_rank_that_comes_later_hears_who_disagrees() -> None:
    meshes = connected(3)

    def rows(mesh: SocketMesh) -> object:
        with pytest.raises(RanksDisagreeError) as failed:
            mesh.exchange(Kind.ROWS, [[]] * mesh.size)
        return failed.value

    results = as_threads([lambda: word(meshes[1]), lambda: rows(meshes[2])])
    assert all(isinstance(result, RanksDisagreeError) for result in results), results
    assert str(results[0]).startswith("rank 1 is in WORD of step 0, rank 2 in ROWS of step 0")
    # On a channel that nobody else uses rank 0 cannot see it for itself.
    with pytest.raises(RanksDisagreeError) as told:
        meshes[0].exchange(Kind.WORD, [[]] * 3, channel=Channel.PUSH)
    assert str(told.value) in {str(result) for result in results}
    for mesh in meshes:
        mesh.close()


def test_a_mesh_that_was_closed_says_so() -> None:
    meshes = connected(2)
    waiting = threading.Event()

    def closes() -> None:
        waiting.wait(10)
        time.sleep(0.05)
        meshes[0].close()

    def waits() -> object:
        waiting.set()
        return word(meshes[0])

    result, _ = as_threads([waits, closes])
    assert isinstance(result, RankLostError)
    assert "the connections of this rank are closed" in str(result)
    meshes[0].close()
    meshes[1].close()


def test_a_signal_interrupts_an_exchange_and_nothing_follows_it() -> None:
    class InterruptedByTestError(Exception):
        pass

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise InterruptedByTestError

    meshes = connected(2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedByTestError):
            word(meshes[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    again = word(meshes[0])
    assert isinstance(again, RankLostError)
    assert "an earlier exchange of this rank was not finished" in str(again)
    for mesh in meshes:
        mesh.close()


def test_a_signal_that_raises_nothing_does_not_disturb_an_exchange() -> None:
    meshes = connected(2)
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _frame: heard.append(number))
    other = threading.Thread(target=lambda: (time.sleep(0.5), word(meshes[1])))
    try:
        other.start()
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        assert word(meshes[0]) == [0, 1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        other.join()
    assert heard
    for mesh in meshes:
        mesh.close()


def test_a_forked_child_can_neither_use_nor_end_the_connections() -> None:
    meshes = connected(2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                word(meshes[0])
            except ForkedProcessError:
                for mesh in meshes:
                    mesh.close()
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert as_threads([lambda mesh=mesh: word(mesh) for mesh in meshes]) == [[0, 1], [0, 1]]
    for mesh in meshes:
        mesh.close()


def test_threads_end_with_the_mesh() -> None:
    def used() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    rounds = 5
    threads, files = used()
    for _ in range(rounds):
        meshes = connected(3)
        as_threads([lambda mesh=mesh: word(mesh) for mesh in meshes])
        for mesh in meshes:
            mesh.close()
        del meshes, mesh
    # Fewer than one for each round: threads of other tests in this process may come and go meanwhile.
    assert used()[0] < threads + rounds
    assert used()[1] < files + rounds
