"""Danger: an operator who cannot stop, save or look into a running job, or whose question breaks it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from controlled_run import SECONDS, running
from monolith.errors import DeadlineExceededError, InvalidArgumentError, StorageError, UnavailableError
from monolith.features import to_fids
from monolith.state.restore_points import restore_points
from monolith.train import Trainer
from monolith.train.control import Controller
from monolith.train.distributed.barrier import LocalBarrier
from moving_buckets import wait_for


def test_a_stopped_run_makes_no_step_until_it_is_resumed() -> None:
    with running() as run:
        assert run.controller.block_status().unblocked == (0,)
        blocked = run.controller.stop(timeout=SECONDS)
        assert (blocked.stopped, blocked.blocked, blocked.unblocked) == (True, (0,), ())
        assert run.controller.status().state == "stopped"
        given, step = run.data.given, run.trainer.step
        # Each of these would let a run that is not held make a step.
        for _ in range(20):
            found = run.controller.variables(["global_step"], timeout=SECONDS)
            assert int(found["global_step"]) == step
        assert run.data.given == given
        run.data.asked.clear()
        run.controller.resume(timeout=SECONDS)
        assert run.data.asked.wait(SECONDS)
        assert run.controller.status().state == "training"


def test_a_run_is_stopped_once() -> None:
    with running() as run:
        run.controller.resume(timeout=SECONDS)
        run.controller.stop(timeout=SECONDS)
        with pytest.raises(InvalidArgumentError, match="stopped already"):
            run.controller.stop(timeout=SECONDS)


def test_a_stopped_run_can_be_saved_and_its_checkpoint_is_of_that_step(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.controller.stop(timeout=SECONDS)
        step = run.trainer.step
        path = run.controller.save(timeout=SECONDS)
        assert path == f"{tmp_path}/model.ckpt-{step}"
        assert [point.step for point in restore_points(str(tmp_path))] == [step]
        assert run.controller.status().last_checkpoint == path


def test_a_save_that_fails_is_the_error_of_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise StorageError("no space left on device")

    with running(tmp_path) as run:
        with monkeypatch.context() as broken:
            broken.setattr(run.trainer, "save", refuse)
            with pytest.raises(StorageError, match="no space"):
                run.controller.save(timeout=SECONDS)
        assert run.controller.save(timeout=SECONDS).startswith(str(tmp_path))


def test_a_run_without_a_folder_cannot_be_saved() -> None:
    with running() as run, pytest.raises(InvalidArgumentError, match="no model_dir"):
        run.controller.save(timeout=SECONDS)


def test_a_run_that_is_ended_saves_and_says_why(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.controller.stop(timeout=SECONDS)
        run.controller.end_run(timeout=SECONDS)
        assert run.ended() == "an operator has ended the run"
        assert [point.step for point in restore_points(str(tmp_path))][-1] == run.trainer.step
        with pytest.raises(InvalidArgumentError, match="ending"):
            run.controller.stop(timeout=SECONDS)


def test_a_signal_ends_a_run_that_is_stopped() -> None:
    with running() as run:
        run.controller.stop(timeout=SECONDS)
        run.trainer.interrupt("SIGTERM")
        assert run.ended() == "SIGTERM"


def test_a_request_that_cannot_be_done_in_time_is_withdrawn() -> None:
    with running() as run:
        run.data.gate.clear()
        run.data.asked.clear()
        assert run.data.asked.wait(SECONDS)
        with pytest.raises(DeadlineExceededError, match=r"not between two steps for 0\.01 s .*nothing was done"):
            run.controller.stop(timeout=0.01)
        # It is seen without waiting where the run hangs.
        assert run.controller.status().state == "training"
        assert run.controller.status().seconds_since_step is not None
        run.data.gate.set()
        run.controller.variables([], timeout=SECONDS)
        assert not run.controller.block_status().stopped


def test_the_error_that_broke_a_run_is_not_hidden_by_a_barrier_that_cannot_be_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(LocalBarrier):
        def remove(self) -> None:
            raise UnavailableError("the servers are gone")

    with running() as run:
        run.controller.attach(Gone(1))
        run.controller.stop(timeout=SECONDS)
        run.controller.end(run.trainer, ValueError("what broke the run"))
        assert "held until the chief is gone: the servers are gone" in caplog.text
        assert run.controller.status().state == "starting"
        run.controller.attach(LocalBarrier(1))


def test_whoever_waits_when_the_run_breaks_is_told() -> None:
    with running() as run:
        run.controller.close()
        with pytest.raises(InvalidArgumentError, match="ending"):
            run.controller.save(timeout=SECONDS)


def test_rows_of_features_come_with_their_optimizer_state() -> None:
    with running() as run:
        run.controller.stop(timeout=SECONDS)
        found = run.controller.features(["user", "item", "nothing"], [3, 4, 10**9], timeout=SECONDS)
        assert sorted(found) == ["item", "user"]
        table = run.trainer.model.embeddings.store.tables["user"]
        user = found["user"]
        assert (user.table, user.ids) == ("user", (3, 4, 10**9))
        assert user.entries.found.tolist() == [True, True, False]
        torch.testing.assert_close(user.entries.values[:2], table.lookup([3, 4]), rtol=0, atol=0)
        assert user.entries.slots["0/norm"].shape == (3, 4)
        assert (user.entries.slots["0/norm"][:2] > 0).all()
        # Ids are those of the data, also where a table has fids.
        assert found["item"].entries.ids.tolist() == to_fids([3, 4, 10**9], 1).tolist()
        assert found["item"].entries.found.tolist() == [True, True, False]


def test_what_is_asked_during_the_last_step_is_done(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.data.gate.clear()
        run.data.asked.clear()
        assert run.data.asked.wait(SECONDS)
        asked = threading.Thread(target=lambda: paths.append(run.controller.save(timeout=SECONDS)))
        paths: list[str] = []
        asked.start()
        wait_for(lambda: len(run.controller._commands) == 1)
        # The data ends, so no other step begins.
        run.data.closed = True
        run.data.gate.set()
        assert run.ended() == "the data ended"
        asked.join(SECONDS)
        assert paths == [f"{tmp_path}/model.ckpt-{run.trainer.step}"]


def test_rows_have_the_updates_that_wait_for_the_next_step() -> None:
    """With postpush the gradients of the last step are applied with the next one, which a stopped run does not make."""
    with running(enable_embedding_postpush=True) as run:
        run.controller.stop(timeout=SECONDS)
        entries = run.controller.features(["user"], range(20), timeout=SECONDS)["user"].entries
        run.trainer.settle()
        table = run.trainer.model.embeddings.store.tables["user"]
        assert torch.equal(entries.values, table.lookup_entry(range(20)).values)


def test_too_many_rows_are_refused() -> None:
    with running() as run, pytest.raises(InvalidArgumentError, match=r"at most 10,000 rows at once, got 10,001 ids"):
        run.controller.features(["user"], range(10_001), timeout=SECONDS)


def test_dense_values_are_copies_and_unknown_names_are_left_out() -> None:
    with running() as run:
        run.controller.stop(timeout=SECONDS)
        found = run.controller.variables(["mlp.0.weight", "global_step", "nothing"], timeout=SECONDS)
        weight = run.trainer.model.mlp[0].weight
        assert sorted(found) == ["global_step", "mlp.0.weight"]
        assert torch.equal(found["mlp.0.weight"], weight)
        assert found["mlp.0.weight"].data_ptr() != weight.data_ptr()
        about = run.controller.describe()
        assert about.features["tags"] == about.features["item"] != "item"
        assert about.variables["mlp.0.weight"] == (8, 13)
        assert about.variables["global_step"] == ()


def test_a_hook_of_the_run_may_ask_too() -> None:
    model = torch.nn.Identity()
    trainer = Trainer(model)
    controller = Controller(trainer)
    controller.begin(trainer)
    assert controller.variables(["global_step"], timeout=0.0)["global_step"] == 0


def test_time_in_which_training_is_stopped_does_not_count() -> None:
    with running() as run:
        run.controller.stop(timeout=SECONDS)
        run.controller.variables([], timeout=SECONDS)
        run.controller.resume(timeout=SECONDS)
        run.controller.variables([], timeout=SECONDS)
        assert run.controller.running_clock() < run.controller._clock()
