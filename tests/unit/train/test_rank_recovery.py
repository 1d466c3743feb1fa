"""Danger: ranks that give up although a lost rank comes back, or that repeat for ever what fails every time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from monolith.errors import FencedError, RankLostError, RanksDisagreeError, RepeatedFailureError, RunInterruptedError
from monolith.ranks.formation import RankMember
from monolith.ranks.socket_mesh import SocketMesh
from monolith.train.distributed.rank_recovery import FailureRecord, RankRecovery


class FakeMesh:
    """What `RankRecovery` sees of connected ranks."""

    def __init__(self, generation: int, size: int = 2) -> None:
        self.generation, self.size, self.rank = generation, size, 0
        self.members = tuple(
            RankMember(rank=rank, incarnation=1, address="h:1", host=f"host{rank}", process=100 + rank)
            for rank in range(size)
        )
        self.said: list[str] = []
        self.closed = False

    def fail(self, reason: str) -> None:
        self.said.append(reason)

    def close(self) -> None:
        self.closed = True


class Ranks:
    """Meshes as they are formed one after another."""

    def __init__(self, *sizes: int) -> None:
        self.meshes = [FakeMesh(10 * number + 10, size) for number, size in enumerate(sizes)]
        self.after: list[int] = []

    def form(self, after: int) -> SocketMesh:
        self.after.append(after)
        return cast(SocketMesh, self.meshes[len(self.after) - 1])


def recovery(ranks: Ranks, folder: Path | None = None, **options: Callable[[], float]) -> RankRecovery:
    made = RankRecovery(ranks.form, FailureRecord(None if folder is None else str(folder), rank=0), **options)
    made.step = lambda: 6
    return made


def test_the_run_is_formed_again_after_each_loss(caplog: pytest.LogCaptureFixture) -> None:
    ranks, times = Ranks(2, 2, 1), iter([0.0, 2.5, 10.0, 14.0])
    recover = recovery(ranks, clock=times.__next__)

    def attempt(mesh: SocketMesh) -> str:
        recover.continued(5 if mesh.generation < 30 else 6)
        if mesh.generation == 30:
            return "done"
        raise RankLostError("rank 1 has closed its connection in step 7", rank=1, step=7)

    with caplog.at_level(logging.INFO):
        assert recover.run(attempt) == "done"
    assert ranks.after == [0, 10, 20]
    assert all(mesh.closed for mesh in ranks.meshes)
    assert all(mesh.said == [] for mesh in ranks.meshes), "the others know who was lost"
    assert recover.failovers == 2
    lost = (
        "rank 1 has closed its connection in step 7 (process 101 of host1 (h:1)); dropping the unfinished step and forming the "
        "run again"
    )
    assert caplog.messages == [
        lost,
        "continuing from step 5 with 2 ranks, 2.5 s after the loss; 1 step made before the loss will be made again",
        lost,
        "continuing from step 6 with 1 rank, 4.0 s after the loss",
    ]


def test_an_error_of_this_rank_is_told_to_the_others(tmp_path: Path) -> None:
    ranks = Ranks(2)

    def attempt(mesh: SocketMesh) -> None:
        raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        recovery(ranks, tmp_path).run(attempt)
    assert ranks.meshes[0].said == ["ValueError: bad data"]
    assert ranks.meshes[0].closed


@pytest.mark.parametrize(
    ("step", "error", "repeated"),
    [
        (6, ValueError("bad data"), True),
        (7, ValueError("bad data"), False),
        (6, OSError("bad data"), False),
        (6, RanksDisagreeError("other tables"), False),
    ],
)
def test_the_same_error_in_the_same_step_is_not_tried_a_third_time(
    tmp_path: Path, step: int, error: Exception, repeated: bool
) -> None:
    def fail(step: int, error: Exception) -> None:
        def attempt(mesh: SocketMesh) -> None:
            raise error

        recover = recovery(Ranks(2), tmp_path)
        recover.step = lambda: step
        recover.run(attempt)

    with pytest.raises(ValueError, match="bad data"):
        fail(6, ValueError("bad data"))
    with pytest.raises(RepeatedFailureError if repeated else type(error)) as caught:
        fail(step, error)
    if repeated:
        assert "failed in step 7 with the same error as the time before" in str(caught.value)
        assert "ValueError: bad data" in str(caught.value)


@pytest.mark.parametrize("error", [RunInterruptedError("SIGTERM"), FencedError("replaced"), KeyboardInterrupt()])
def test_what_is_no_failure_is_never_a_repeated_one(tmp_path: Path, error: BaseException) -> None:
    def attempt(mesh: SocketMesh) -> None:
        raise error

    for _ in range(2):
        with pytest.raises(type(error)):
            recovery(Ranks(2), tmp_path).run(attempt)


def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "rank_failures").mkdir()
    (tmp_path / "rank_failures" / "1").write_text("{half")
    assert not FailureRecord(str(tmp_path), rank=1).is_repeated(7, ValueError("x"))
    assert FailureRecord(str(tmp_path), rank=1).is_repeated(7, ValueError("y"))
    assert not FailureRecord(str(tmp_path), rank=0).is_repeated(7, ValueError("x")), "that of another rank"
