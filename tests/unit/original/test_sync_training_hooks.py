"""Danger: a control file that one rank follows and another does not, so that they wait for each other for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from monolith.errors import InvalidArgumentError, RankLostError
from monolith.original import (
    ReqTimeControlDumpHook,
    SyncTrainingBarrierSaverListener,
    SyncTrainingForceDumpHook,
    SyncTrainingInfoHook,
    SyncTrainingSaverControlHook,
)
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Mesh
from monolith.state.restore_points import restore_points
from monolith.testing.rank_threads import run_ranks
from monolith.train import RunConfig, Trainer
from monolith.train.hooks import Hook, SecondOrStepTimerWithTideSetting
from training import ClickModel, batch_of


def at_hour(hour: int) -> Callable[[], datetime]:
    return lambda: datetime(2026, 3, 1, hour, 30, tzinfo=UTC)


class Watch(Hook):
    """Whether each step found the timer on."""

    def __init__(self, timer: SecondOrStepTimerWithTideSetting) -> None:
        self.timer, self.on = timer, dict[int, bool]()

    def after_step(self, trainer: Trainer, result: object) -> None:
        self.on[trainer.step] = self.timer._enabled


def fit(hooks: Sequence[Hook], steps: int, **config: Any) -> Trainer:  # noqa: ANN401
    model = ClickModel()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=RunConfig(**config), hooks=hooks)
    trainer.fit([batch_of(number) for number in range(steps)])
    return trainer


def timer() -> SecondOrStepTimerWithTideSetting:
    return SecondOrStepTimerWithTideSetting(every_secs=3600)


@pytest.mark.parametrize(("hour", "on"), [(17, False), (18, True), (20, True), (21, False)])
def test_checkpoints_are_written_from_18_to_20_o_clock(tmp_path: Path, hour: int, on: bool) -> None:
    watch = Watch(timer())
    fit([SyncTrainingForceDumpHook(str(tmp_path), watch.timer, 2, now=at_hour(hour)), watch], 4)
    assert watch.on == {1: True, 2: on, 3: on, 4: on}


def test_a_dump_file_saves_its_step_at_any_hour(tmp_path: Path) -> None:
    (tmp_path / "dump_4").touch()
    hook = SyncTrainingForceDumpHook(str(tmp_path), step_interval=2, now=at_hour(3))
    fit([hook], 9, model_dir=str(tmp_path), save_checkpoints_secs=3600.0)
    assert [point.step for point in restore_points(str(tmp_path))] == [4, 9]


def test_a_stop_file_ends_the_run_at_its_step(tmp_path: Path) -> None:
    (tmp_path / "stop_4").touch()
    hook = SyncTrainingForceDumpHook(str(tmp_path), timer(), 2, now=at_hour(3))
    trainer = fit([hook], 9)
    assert (trainer.step, trainer.stop_reason) == (4, "the file stop_<step> asks for it")


def test_a_step_between_two_looks_is_not_missed_and_an_old_one_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "stop_5").touch()
    assert fit([SyncTrainingForceDumpHook(str(tmp_path), timer(), 4)], 20).step == 8
    (tmp_path / "stop_0").touch()
    (tmp_path / "stop_5").unlink()
    assert fit([SyncTrainingForceDumpHook(str(tmp_path), timer(), 4)], 20).step == 20


class Touch(Hook):
    """Creates a file at one step and removes it at another."""

    def __init__(self, file: Path, *, at: int, until: int) -> None:
        self._file, self._at, self._until = file, at, until

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == self._at:
            self._file.touch()
        if trainer.step == self._until:
            self._file.unlink()


def test_a_saver_is_on_while_the_run_is_online(tmp_path: Path) -> None:
    watch = Watch(timer())
    online = Touch(tmp_path / "ONLINE", at=2, until=6)
    fit([online, SyncTrainingSaverControlHook(str(tmp_path), watch.timer, 2), watch], 9)
    assert [step for step, on in watch.on.items() if on] == [1, 4, 5, 6, 7]


def test_the_saver_of_dense_only_checkpoints_is_meant_by_default(tmp_path: Path) -> None:
    settings = {"model_dir": str(tmp_path), "dense_only_save_checkpoints_steps": 1}
    fit([SyncTrainingSaverControlHook(str(tmp_path), step_interval=1)], 3, **settings)
    assert restore_points(str(tmp_path / "dense_only")) == []
    (tmp_path / "ONLINE").touch()
    fit([SyncTrainingSaverControlHook(str(tmp_path), step_interval=1)], 6, **settings, epochs=2)
    assert restore_points(str(tmp_path / "dense_only"))


def test_a_run_ends_when_it_has_trained_up_to_a_request_time(tmp_path: Path) -> None:
    # Batch n has the time 1000 + n.
    (tmp_path / "limit_req_time").write_text("1005\n")
    trainer = fit(
        [ReqTimeControlDumpHook(str(tmp_path), step_interval=1)], 9, event_time="time", model_dir=str(tmp_path)
    )
    assert (trainer.step, trainer.stop_reason) == (6, "request time 1005 has reached the limit of 1005")
    assert [point.step for point in restore_points(str(tmp_path))] == [6]


@pytest.mark.parametrize("limit", [None, "0", "soon"])
def test_without_a_number_there_is_no_limit(
    tmp_path: Path, limit: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if limit is not None:
        (tmp_path / "limit_req_time").write_text(limit)
    assert fit([ReqTimeControlDumpHook(str(tmp_path), timer(), 1)], 4, event_time="time").step == 4
    assert ("expected seconds since 1970, got 'soon'" in caplog.text) == (limit == "soon")


def test_a_limit_needs_a_request_time(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"RunConfig\.event_time"):
        fit([ReqTimeControlDumpHook(str(tmp_path))], 1)


def test_the_size_of_tables_is_logged_every_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="monolith")
    now = [0.0]

    class Clock(Hook):
        def before_step(self, trainer: Trainer) -> None:
            now[0] += 250.0

    trainer = fit([Clock(), SyncTrainingInfoHook(clock=lambda: now[0])], 8)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    tables = list(trainer.table_stats())
    # After 750 seconds, and 600 after that.
    assert [line.split(" has ")[0] for line in lines] == [f"step {n}: table {name}" for n in (3, 6) for name in tables]
    assert all(" rows in " in line for line in lines)


# Ranks as threads: only rank 0 has the files.


def rank_of(hook: Callable[[int], Hook], steps: int, **config: Any) -> Callable[[Mesh], tuple[int, str | None]]:  # noqa: ANN401
    def rank(mesh: Mesh) -> tuple[int, str | None]:
        trainer, agreement, mine = Trainer(nn.Identity(), config=RunConfig(**config)), Agreement(mesh), hook(mesh.rank)
        trainer.ranks = SimpleNamespace(agreement=agreement, is_chief=mesh.rank == 0)  # type: ignore[assignment]
        mine.begin(trainer)
        mine.after_start(trainer)
        while trainer.step < steps:
            plan = agreement.next_step(rows=1, stop=trainer.stop_reason)
            if plan.stops:
                agreement.step_ended()
                break
            trainer.step += 1
            trainer.event_time = 1000 + trainer.step
            agreement.step = trainer.step
            agreement.step_ended()
            mine.after_step(trainer, None)  # type: ignore[arg-type]
        agreement.release("end") if mesh.rank == 0 else agreement.serve("end")
        return trainer.step, trainer.stop_reason

    return rank


def test_all_ranks_follow_what_rank_0_has_read(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    (tmp_path / "0" / "stop_4").touch()
    (tmp_path / "1" / "stop_2").touch()
    timers = [timer() for _ in range(2)]
    hooks = [SyncTrainingForceDumpHook(str(tmp_path / str(r)), timers[r], 2, now=at_hour(18 + 3 * r)) for r in range(2)]
    reason = "the file stop_<step> asks for it"
    assert run_ranks(2, rank_of(lambda rank: hooks[rank], 9)) == [(4, reason), (4, reason)]
    # It was 18 o'clock on rank 0 and 21 on rank 1.
    assert [one._enabled for one in timers] == [True, True]


def test_all_ranks_end_at_the_request_time_that_rank_0_has_read(tmp_path: Path) -> None:
    (tmp_path / "limit_req_time").write_text("1004")
    hooks = [ReqTimeControlDumpHook(str(tmp_path / ("." if r == 0 else "nowhere")), timer(), 1) for r in range(2)]
    reason = "request time 1004 has reached the limit of 1004"
    assert run_ranks(2, rank_of(lambda rank: hooks[rank], 9, event_time="time")) == [(4, reason), (4, reason)]


def test_all_ranks_switch_their_savers_alike(tmp_path: Path) -> None:
    timers = [timer() for _ in range(3)]
    hooks = [SyncTrainingSaverControlHook(str(tmp_path), timers[r], 1) for r in range(3)]
    assert run_ranks(3, rank_of(lambda rank: hooks[rank], 2)) == [(2, None)] * 3
    assert [one._enabled for one in timers] == [False] * 3


def test_a_save_ends_when_all_ranks_know_of_it() -> None:
    def rank(mesh: Mesh) -> int:
        trainer, agreement = Trainer(nn.Identity()), Agreement(mesh)
        trainer.ranks = SimpleNamespace(agreement=agreement, is_chief=mesh.rank == 0)  # type: ignore[assignment]
        seen: list[object] = []
        agreement.actions["barrier"] = seen.append  # type: ignore[assignment]
        if mesh.rank == 0:
            SyncTrainingBarrierSaverListener().after_save(trainer, 7)
        agreement.next_step(rows=1)
        return len(seen)

    assert run_ranks(3, rank) == [1, 1, 1]


def test_a_barrier_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RankLostError("rank 1 has left", rank=1)

    trainer = Trainer(nn.Identity())
    trainer.ranks = SimpleNamespace(agreement=SimpleNamespace(barrier=fail))  # type: ignore[assignment]
    SyncTrainingBarrierSaverListener().after_save(trainer, 7)
    assert "could not be told that step 7 is saved" in caplog.text
