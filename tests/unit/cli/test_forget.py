"""Danger: a row that was to be forgotten comes back after a restart, or a receipt hides a copy that is still on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from controlled_run import SECONDS, Endless
from followed_tables import until
from monolith.cli import main
from monolith.errors import InvalidArgumentError, StorageError
from monolith.features.ids import to_fids
from monolith.follow.run_service import ADDRESS_FILE
from monolith.nn import EmbeddingBagCollection
from monolith.ps import ParameterServer, ServerStore, tables_of
from monolith.serve import export_model, load
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.state import find_restore_point, read_row
from monolith.state.forget import forget_saved
from monolith.train import Estimator, RunConfig, RunnerConfig, Trainer
from monolith.train.control_server import ControlClient
from monolith.train.forgetting import forget_rows
from training import FEATURES, ClickModel, batch_of

USER = 7
"""An id that several batches have."""


class Held:
    """A run that has made at least seven steps and is stopped, with a client."""

    def __init__(self, folder: Path, **config: object) -> None:
        settings = RunConfig(model_dir=str(folder), embedding_prefetch_capacity=0, threads=1, **config)  # type: ignore[arg-type]
        self.estimator = Estimator(ClickModel(), settings, runner=RunnerConfig(is_local=True))
        self.data = Endless()
        self.thread = threading.Thread(target=lambda: self.estimator.train(self.data), daemon=True)
        self.thread.start()
        assert self.data.asked.wait(SECONDS)
        self.client = ControlClient.of_run(str(folder), timeout=SECONDS)
        self.make_steps(7)

    @property
    def step(self) -> int:
        return self.client.status().step

    def make_steps(self, count: int) -> None:
        """Train some steps more, then hold the run again."""
        goal = self.step + count
        self.client.resume()
        until(lambda: self.step >= goal)
        self.client.stop()

    def has(self, feature: str, id_: int) -> bool:
        return bool(self.client.features([feature], [id_])[feature].entries.found[0])


@contextmanager
def held(folder: Path, **config: object) -> Iterator[Held]:
    run = Held(folder, **config)
    try:
        yield run
    finally:
        run.data.closed = True
        run.estimator.trainer.request_stop("the test is over")
        run.client.close()
        run.thread.join(SECONDS)


def forget(folder: Path, *arguments: object, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    code = main(["forget", str(folder), *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    found: dict[str, object] = json.loads(printed.out)
    return found


def test_a_row_leaves_training_and_the_newest_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        assert run.has("user", USER)
        assert run.has("item", USER)
        receipt = forget(tmp_path, USER, capsys=capsys)
        assert not run.has("user", USER)
        assert not run.has("item", USER)
        assert not run.has("tags", USER)
        assert run.has("user", USER + 1)
        tables = run.estimator.trainer.tables()
        assert set(receipt["tables"]) == set(tables)  # type: ignore[call-overload]
        removed = {name: one["removed"] for name, one in receipt["tables"].items()}  # type: ignore[attr-defined]
        assert receipt["removed"] == sum(removed.values())
        assert removed["user"] == 1
        # What a crash at this moment would restore.
        point = find_restore_point(str(tmp_path))
        assert receipt["absent_since"] == {
            "checkpoint": f"{tmp_path}/model.ckpt-{run.step}",
            "sequence": point.sequence,
        }
        assert read_row(point, "user", USER) is None
        assert read_row(point, "user", USER + 1) is not None
        # The item's id has the slot of its feature in the table.
        (item,) = (name for name, one in receipt["tables"].items() if "item" in one["features"])  # type: ignore[attr-defined]
        assert read_row(point, item, int(to_fids([USER], 1)[0])) is None


def test_an_id_without_a_row_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path):
        receipt = forget(tmp_path, 10**12, capsys=capsys)
        assert receipt["removed"] == 0
        assert receipt["checkpoints"] == receipt["files"] == receipt["unread"] == []


def test_only_the_named_table_or_feature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        assert list(forget(tmp_path, USER, "--table", "user", capsys=capsys)["tables"]) == ["user"]  # type: ignore[call-overload]
        assert not run.has("user", USER)
        assert run.has("item", USER)
        had = run.has("tags", USER)
        forget(tmp_path, USER, "--feature", "item", capsys=capsys)
        assert not run.has("item", USER)
        assert run.has("tags", USER) == had


def test_older_checkpoints_with_the_row_are_named_until_they_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(tmp_path, checkpoints_max_to_keep=2) as run:
        older = Path(run.client.save()).name
        run.make_steps(3)
        receipt = forget(tmp_path, USER, "--table", "user", capsys=capsys)
        (copy,) = receipt["checkpoints"]  # type: ignore[misc]
        assert (copy["name"], copy["ids"]) == (older, {"user": [USER]})
        assert copy["until"].startswith("one more checkpoint is written")
        assert read_row(str(tmp_path / older), "user", USER) is not None
        held_by = [one for one in receipt["files"] if older in one["needed_by"]]  # type: ignore[attr-defined]
        assert held_by
        # The id is in the data: hold the run, so that it does not come back before the next checkpoint.
        run.estimator.trainer.note_change()
        run.make_steps(1)
        run.client.forget([USER])
        assert not (tmp_path / older).exists()
        again = forget(tmp_path, USER, "--table", "user", capsys=capsys)
        assert older not in [one["name"] for one in again["checkpoints"]]  # type: ignore[attr-defined]


def test_purge_leaves_no_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        older = Path(run.client.save()).name
        run.make_steps(3)
        kept = Path(run.client.save()).name
        run.make_steps(3)
        receipt = forget(tmp_path, USER, "--purge", capsys=capsys)
        assert receipt["purged"] == sorted([older, kept])
        assert receipt["checkpoints"] == receipt["files"] == receipt["unread"] == []
        assert not (tmp_path / older).exists()
        assert read_row(find_restore_point(str(tmp_path)), "user", USER + 1) is not None
        run.make_steps(3)
        run.client.save()
    assert main(["verify", str(tmp_path)]) == 0


def test_a_checkpoint_that_somebody_keeps_is_not_purged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        older = Path(run.client.save()).name
        assert main(["checkpoint", "keep", str(tmp_path), older]) == 0
        run.make_steps(3)
        receipt = forget(tmp_path, USER, "--table", "user", "--purge", capsys=capsys)
        (copy,) = receipt["checkpoints"]  # type: ignore[misc]
        assert (copy["name"], receipt["purged"]) == (older, [])
        assert "exempt" in copy["until"]


def test_an_export_with_the_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        model = run.estimator.model
        export = export_model(model, batch_of(0), tmp_path / "exported_models", heads=ClickModel.heads)
        receipt = forget(tmp_path, USER, "--table", "user", capsys=capsys)
        found = [one for one in receipt["files"] if one["kind"] == "export"]  # type: ignore[attr-defined]
        assert [(one["path"], one["ids"]) for one in found] == [(str(export), {"user": [USER]})]


def test_a_replica_loses_the_row_and_confirms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = tmp_path / "run"
    with held(model_dir, feed_secs=0.02) as run:
        assert forget(model_dir, 10**12, capsys=capsys)["replicas"] == {
            f"run {model_dir}": {"followers": 0, "confirmed": 0}
        }
        predictor = load(export_model(run.estimator.model, batch_of(0), tmp_path / "export", heads=ClickModel.heads))
        followed = {f"run {model_dir}": {"followers": 1, "confirmed": 1}}
        follower = TrainingFollower.of_run(predictor, RunWriters(str(model_dir)))
        try:
            assert follower.wait_until_read(SECONDS)
            (store,) = predictor.stores.values()
            assert USER in store.tables["user"]
            # A replica counts once it has asked for changes.
            until(lambda: forget(model_dir, 10**12, capsys=capsys)["replicas"] == followed)
            receipt = forget(model_dir, USER, capsys=capsys)
            assert receipt["replicas"] == followed
            # Confirmed means that it is gone now, not soon.
            assert USER not in store.tables["user"]
            assert USER + 1 in store.tables["user"]
        finally:
            follower.close()


def test_mistakes_are_said_and_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ([str(tmp_path / "nothing"), "7"], "no run is going on here"),
        ([str(tmp_path / "nothing"), str(2**63)], "expected int64"),
    ]:
        assert main(["forget", *arguments]) == 2
        assert message in capsys.readouterr().err
    with held(tmp_path) as run:
        for option, message in [("--table", "the model has no 'cities'"), ("--feature", "the model has no 'cities'")]:
            assert main(["forget", str(tmp_path), str(USER), option, "cities"]) == 2
            assert message in capsys.readouterr().err
        assert main(["forget", str(tmp_path), "seven"]) == 2
        assert run.has("user", USER)


def test_a_receipt_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        older = Path(run.client.save()).name
        run.make_steps(2)
        assert main(["forget", str(tmp_path), str(USER), "--", "-5"]) == 0
        text = capsys.readouterr().out
    assert "1 row, of user" in text
    assert f"  {older}: until 9 more checkpoints" in text
    assert "dense weights" in text


def test_rows_on_other_processes_refuse_a_purge_before_anything_is_removed() -> None:
    with ParameterServer() as server, ServerStore([server.address], tables_of(FEATURES)) as store:
        store.assign("user", [USER], torch.ones(1, 4))
        trainer = Trainer(EmbeddingBagCollection(FEATURES, store))
        with pytest.raises(InvalidArgumentError, match="purge"):
            forget_rows(trainer, [USER], renew=True)
        assert store.stats()["user"].rows == 1
        assert forget_rows(trainer, [USER]).tables["user"].removed == 1


def test_a_state_that_was_saved_at_this_step_is_saved_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        saved = run.client.save()
        receipt = forget(tmp_path, USER, "--table", "user", capsys=capsys)
        assert receipt["absent_since"]["checkpoint"] == saved  # type: ignore[index]
        assert read_row(saved, "user", USER) is None
        assert receipt["checkpoints"] == []


def test_a_run_that_has_ended_forgets_in_its_saved_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path) as run:
        older = Path(run.client.save()).name
        run.make_steps(3)
        assert main(["forget", str(tmp_path), str(USER), "--offline"]) == 2
        assert "a run is going on here" in capsys.readouterr().err
    # As a run that was killed leaves it.
    (tmp_path / ADDRESS_FILE).write_text("127.0.0.1:9")
    before = find_restore_point(str(tmp_path))
    assert read_row(before, "user", USER) is not None
    assert main(["forget", str(tmp_path), str(USER)]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["forget", str(tmp_path / "other"), str(USER)]) == 2
    assert "--offline" in capsys.readouterr().err
    assert main(["forget", str(tmp_path), str(USER), "--offline", "--table", "cities"]) == 2
    assert "has no 'cities'" in capsys.readouterr().err
    receipt = forget(tmp_path, USER, "--offline", capsys=capsys)
    assert receipt["tables"]["user"] == {"features": [], "ids": [USER], "removed": 1}  # type: ignore[index]
    point = find_restore_point(str(tmp_path))
    assert (point.step, read_row(point, "user", USER)) == (before.step, None)
    assert point.state().keys() == before.state().keys()
    assert [one["name"] for one in receipt["checkpoints"]] == [older]  # type: ignore[attr-defined]
    purged = forget(tmp_path, USER, "--offline", "--purge", capsys=capsys)
    assert (purged["purged"], purged["checkpoints"], purged["files"]) == ([older], [], [])
    assert main(["verify", str(tmp_path)]) == 0
    with held(tmp_path) as run:
        # It continues from there with everything else.
        assert run.step > before.step


def test_a_log_that_is_open_is_not_forgotten_in(tmp_path: Path) -> None:
    with held(tmp_path) as run:
        run.client.save()
        with pytest.raises(StorageError, match="open"):
            forget_saved(tmp_path, [USER])
        assert run.has("user", USER)


def test_gradients_that_wait_for_the_next_step_do_not_bring_rows_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = range(20)
    with held(tmp_path, enable_embedding_postpush=True) as run:
        # Some of them are in the batch of the last step, whose gradients are not applied yet.
        forget(tmp_path, *users, capsys=capsys)
        assert not any(run.has("user", one) for one in users)
        point = find_restore_point(str(tmp_path))
        assert [one for one in users if read_row(point, "user", one) is not None] == []


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_says_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object) -> None:
        raise StorageError("no space left on device")

    with held(tmp_path) as run:
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "save", full)
            assert main(["forget", str(tmp_path), str(USER), "--table", "user"]) == 4
        message = capsys.readouterr().err
        assert "1 rows are removed from training" in message
        assert "no space left" in message
        assert not run.has("user", USER)
        # Again, when there is space: no row is left, and the state without it is saved.
        assert forget(tmp_path, USER, "--table", "user", capsys=capsys)["removed"] == 0
        assert read_row(find_restore_point(str(tmp_path)), "user", USER) is None
