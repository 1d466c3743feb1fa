"""Danger: ranks that exchange wrong bytes, hang, or never learn that one of them is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mesh_ranks import in_folder, run_formed
from monolith.errors import RankLostError, RanksDisagreeError, RunInterruptedError
from monolith.ranks import Channel, Kind, SocketMesh, form_mesh


@pytest.mark.parametrize("within_host", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_gets_what_the_others_sent_to_it(tmp_path: Path, size: int, within_host: bool) -> None:
    def body(mesh: SocketMesh) -> bool:
        for step in range(5):
            out = [[np.arange(r + 1), np.full((3, mesh.rank), step, np.float32)] for r in range(mesh.size)]
            for rank, arrays in enumerate(mesh.exchange(Kind.IDS, out, step=step)):
                np.testing.assert_array_equal(arrays[0], np.arange(mesh.rank + 1))
                np.testing.assert_array_equal(arrays[1], np.full((3, rank), step, np.float32))
            large = [[np.full(2**20, mesh.rank * 10 + r)] for r in range(mesh.size)]
            for rank, arrays in enumerate(mesh.exchange(Kind.ROWS, large, step=step, channel=Channel.AHEAD)):
                assert (arrays[0] == rank * 10 + mesh.rank).all()
        return True

    assert run_formed(tmp_path, size, body, within_host=within_host) == [True] * size


def test_ranks_in_different_exchanges_are_told_which(tmp_path: Path) -> None:
    def body(mesh: SocketMesh) -> object:
        return mesh.exchange(Kind(Kind.IDS + mesh.rank), [[], []], step=7)

    for result in run_formed(tmp_path, 2, body):
        assert isinstance(result, RanksDisagreeError)
        assert "IDS of step 7" in str(result)
        assert "ROWS of step 7" in str(result)


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    def body(mesh: SocketMesh) -> object:
        if mesh.rank == 1:
            mesh.fail("out of memory")
            return None
        return mesh.exchange(Kind.WORD, [[], [], []], step=3)

    first, _, third = run_formed(tmp_path, 3, body)
    for result in (first, third):
        assert isinstance(result, RankLostError)
        assert result.rank == 1
        assert "out of memory" in str(result)


@pytest.mark.parametrize("reason", ["x" + "é" * 5000, "a file named \udcff"])
def test_any_reason_can_be_told(tmp_path: Path, reason: str) -> None:
    """Reasons are cut, which must not leave half a character, and may have what no message can have."""

    def body(mesh: SocketMesh) -> object:
        return mesh.fail(reason) if mesh.rank else mesh.exchange(Kind.WORD, [[], []], step=3)

    first, second = run_formed(tmp_path, 2, body)
    assert isinstance(first, RankLostError)
    assert reason[:10] in str(first)
    assert second is None


def test_a_rank_without_data_learns_what_the_others_do(tmp_path: Path) -> None:
    def body(mesh: SocketMesh) -> object:
        kind = Kind.IDS if mesh.rank else mesh.next_kind()
        return [list(arrays[0]) for arrays in mesh.exchange(kind, [[np.array([mesh.rank])]] * 2)]

    assert run_formed(tmp_path, 2, body) == [[[0], [1]], [[0], [1]]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_can_be_interrupted(tmp_path: Path, rank: int) -> None:
    def interrupt() -> None:
        raise RunInterruptedError("received SIGTERM")

    with pytest.raises(RunInterruptedError, match="received SIGTERM"):
        form_mesh(rank, 2, in_folder(tmp_path), while_waiting=interrupt)
