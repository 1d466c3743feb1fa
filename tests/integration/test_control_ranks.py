"""Danger: an operator's word that reaches one rank and not the others, so that they wait for each other or go apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import control_job
from controlled_run import SECONDS
from monolith.cli import main
from monolith.errors import MonolithError, RankLostError
from monolith.follow.run_service import ADDRESS_FILE
from monolith.nn import dense_state_dict
from monolith.original import EofAwareTask, QueryActionHook, SyncTrainingForceDumpHook
from monolith.ranks.mesh import Kind, Mesh
from monolith.state.restore_points import restore_points
from monolith.testing.rank_threads import run_ranks
from monolith.train import RunConfig, RunnerConfig, Trainer
from monolith.train.control_server import ControlClient
from monolith.train.distributed.ranks import RankSession
from monolith.train.hooks import Hook
from moving_buckets import wait_for
from rank_runs import Batches
from training import ClickModel


class Ranks:
    """Ranks as threads that train without end. The first one has the folder."""

    def __init__(
        self, folder: Path, size: int, *, source: Callable[[], Any], hooks: Callable[[int], list[Hook]]
    ) -> None:
        self.exchanges = [0] * size
        self.meshes: dict[int, Mesh] = {}
        self.trainers = [self._trainer(folder if rank == 0 else None) for rank in range(size)]
        self._source, self._hooks, self._size = source, hooks, size
        self.steps: list[int] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _trainer(self, folder: Path | None) -> Trainer:
        model = ClickModel()
        config = RunConfig(model_dir=None if folder is None else str(folder), save_checkpoints_secs=0.0)
        return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)

    def _run(self) -> None:
        try:
            self.steps = run_ranks(self._size, self._rank, timeout=SECONDS)
        except BaseException as error:
            self.error = error

    def _rank(self, mesh: Mesh) -> int:
        self.meshes[mesh.rank] = mesh
        exchange = mesh.exchange

        def counted(kind: Kind, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            self.exchanges[mesh.rank] += 1
            return exchange(kind, *arguments, **named)

        mesh.exchange = counted  # type: ignore[method-assign]
        config = RunnerConfig(num_workers=mesh.size, index=mesh.rank)
        with RankSession(self.trainers[mesh.rank], config, mesh=mesh) as session:
            return session.train(self._source(), hooks=self._hooks(mesh.rank))

    def ended(self) -> list[int]:
        """Wait for all ranks. Returns the step of each."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.steps


@contextmanager
def operated(
    folder: Path,
    size: int,
    *,
    source: Callable[[], Any] = lambda: Batches(10**9),
    hooks: Callable[[int], list[Hook]] = lambda rank: [],
) -> Iterator[tuple[ControlClient, Ranks]]:
    """Ranks that have made ten steps."""
    ranks = Ranks(folder, size, source=source, hooks=hooks)
    try:
        wait_for(lambda: ranks.error is not None or all(trainer.step >= 10 for trainer in ranks.trainers))
        with ControlClient.of_run(str(folder), timeout=SECONDS) as client:
            yield client, ranks
    finally:
        for trainer in ranks.trainers:
            trainer.request_stop("the test is over")
        ranks.ended()


def test_all_ranks_stand_still_and_do_not_lose_each_other(tmp_path: Path) -> None:
    with operated(tmp_path, 2) as (client, ranks):
        blocked = client.stop()
        assert (blocked.blocked, blocked.unblocked) == ((0, 1), ())
        step = ranks.trainers[0].step
        before = ranks.exchanges[1]
        # The others hear of the chief while it holds them, so that none of them takes it for dead.
        wait_for(lambda: ranks.exchanges[1] >= before + 4)
        assert [trainer.step for trainer in ranks.trainers] == [step, step]
        client.resume()
        wait_for(lambda: all(trainer.step > step for trainer in ranks.trainers))


def test_a_checkpoint_has_the_rows_of_all_ranks(tmp_path: Path) -> None:
    with operated(tmp_path, 2) as (client, ranks):
        client.stop()
        step = ranks.trainers[0].step
        assert client.save() == f"{tmp_path}/model.ckpt-{step}"
        rows = client.features(["user", "item"], range(20))
        found = client.variables(["mlp.0.weight", "global_step"])
        assert int(found["global_step"]) == step
    # One process reads what the two have saved.
    model = ClickModel()
    alone = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config=RunConfig(model_dir=str(tmp_path), restore_to=f"step={step}"),
    )
    assert alone.restore()
    assert torch.equal(dense_state_dict(model)["mlp.0.weight"], found["mlp.0.weight"])
    tables = model.embeddings.store.tables
    for one in rows.values():
        assert one.entries.found.any()
        mine = tables[one.table].lookup_entry(one.entries.ids)
        assert mine.found.tolist() == one.entries.found.tolist()
        assert torch.equal(mine.values, one.entries.values)
        for name, slot in mine.slots.items():
            assert torch.equal(slot, one.entries.slots[name])


def test_all_ranks_end_at_one_step(tmp_path: Path) -> None:
    with operated(tmp_path, 3) as (client, ranks):
        client.stop()
        client.end_run()
        steps = ranks.ended()
        assert len(set(steps)) == 1
        assert ranks.trainers[0].stop_reason == "an operator has ended the run"
        assert {trainer.stop_reason for trainer in ranks.trainers[1:]} == {"rank 0: an operator has ended the run"}
        assert restore_points(str(tmp_path))[-1].step == steps[0]
    assert not (tmp_path / ADDRESS_FILE).exists()


def test_a_question_that_cannot_be_answered_breaks_nothing(tmp_path: Path) -> None:
    with operated(tmp_path, 2) as (client, ranks):
        with pytest.raises(MonolithError, match="at most 10,000 rows"):
            client.features(["user"], range(10_001))
        assert client.features(["nothing"], [1]) == {}
        step = ranks.trainers[1].step
        wait_for(lambda: ranks.trainers[1].step > step)


def test_a_stop_file_ends_all_ranks_at_its_step(tmp_path: Path) -> None:
    (tmp_path / "stop_20").touch()
    ranks = Ranks(
        tmp_path,
        2,
        source=lambda: Batches(10**9),
        hooks=lambda rank: [SyncTrainingForceDumpHook(str(tmp_path / ("." if rank == 0 else "none")), step_interval=5)],
    )
    assert ranks.ended() == [20, 20]


def test_a_request_in_a_file_is_done_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "monolith_action").write_text("action: STOP")
    ranks = Ranks(tmp_path, 2, source=lambda: Batches(10**9), hooks=lambda rank: [QueryActionHook(poll_seconds=0)])
    assert ranks.ended() == [0, 0]
    assert (tmp_path / "monolith_action_response").read_text() == "OK"


class Uneven(Batches):
    """Shard 0 has three batches, shard 1 many."""

    def _read(self, position: Any) -> Iterator[Any]:  # noqa: ANN401
        for number, (batch, after) in enumerate(super()._read(position)):
            if self._shard_index == 0 and number == 3:
                return
            yield batch, after


def test_the_last_element_of_one_rank_ends_all(tmp_path: Path) -> None:
    class Task(ClickModel):
        def input_fn(self, mode: str) -> Uneven:
            return Uneven(1000)

    tasks = [EofAwareTask(Task(), use_dataservice=True) for _ in range(2)]

    def rank(mesh: Mesh) -> tuple[int, str | None]:
        task = tasks[mesh.rank]
        trainer = Trainer(task, torch.optim.SGD(task.parameters(), lr=0.1), heads=ClickModel.heads)
        with RankSession(trainer, RunnerConfig(num_workers=2, index=mesh.rank), mesh=mesh) as session:
            step = session.train(task.input_fn("train"), hooks=task.training_hooks())
        return step, trainer.stop_reason

    reason = "a rank has had its last element"
    assert run_ranks(2, rank) == [(3, reason), (3, f"rank 0: {reason}")]


def control(*arguments: str) -> int:
    return main(["control", *arguments])


def test_ranks_that_are_processes_obey_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
    environ = {**clean, "PYTHONPATH": str(Path(control_job.__file__).parent), "OMP_NUM_THREADS": "1"}
    folder = str(tmp_path / "run")
    settings = json.dumps({"model_dir": folder, "threads": 1})
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        control_job.__file__,
    ]
    job = subprocess.Popen([*command, settings], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: job.poll() is not None or Path(folder, ADDRESS_FILE).exists())
        assert control("stop", folder, "--json") == 0, job.poll()
        assert json.loads(capsys.readouterr().out) == {"stopped": True, "blocked": [0, 1], "unblocked": []}
        assert control("save", folder) == 0
        assert control("resume", folder) == 0
        capsys.readouterr()
        # One step at least has been made since it was resumed.
        assert (
            control(
                "rows", folder, "--feature", "user", *(part for n in range(20) for part in ("--id", str(n))), "--json"
            )
            == 0
        )
        found = json.loads(capsys.readouterr().out)["user"]
        assert any(row is not None and row["slots"]["0/norm"] for row in found.values())
        assert control("end", folder) == 0
        out, err = job.communicate(timeout=SECONDS)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, err[-4000:]
    ended = sorted((json.loads(line) for line in out.splitlines() if line.startswith("{")), key=lambda one: one["rank"])
    assert [one["reason"] for one in ended] == [
        "an operator has ended the run",
        "rank 0: an operator has ended the run",
    ]
    assert ended[0]["step"] == ended[1]["step"] == restore_points(folder)[-1].step > 0


def test_a_rank_that_dies_while_the_run_is_stopped_ends_the_wait(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, source=lambda: Batches(10**9), hooks=lambda rank: [])
    wait_for(lambda: all(trainer.step >= 10 for trainer in ranks.trainers))
    with ControlClient.of_run(str(tmp_path), timeout=SECONDS) as client:
        client.stop()
        ranks.meshes[1].fail("killed by the test")
        ranks.meshes[1].close()
        with pytest.raises(RankLostError):
            ranks.ended()
    assert not (tmp_path / ADDRESS_FILE).exists()
