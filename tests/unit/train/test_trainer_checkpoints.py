"""Danger: a checkpoint whose tables, dense parameters and position in the data are not of one step, or that cannot be found."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import CheckpointMismatchError, ConfigError, CorruptFileError, InvalidArgumentError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.original import PartialRecoverySaver
from monolith.original.checkpoint_state import SaveHelper
from monolith.state import restore_points
from monolith.state.index import (
    MonolithCheckpointState,
    get_monolith_checkpoint_state,
    read_checkpoint_info,
    write_monolith_checkpoint_state,
)
from monolith.state.locks import in_use
from monolith.state.snapshot import write_snapshot
from monolith.train import Estimator, Head, RunConfig, StepResult, Trainer
from monolith.train.checkpoints import RunCheckpoints
from monolith.train.hooks import CheckpointSaverListener, Hook
from training import ClickModel, Crash, Stream, assert_same


def new_trainer(model_dir: Path | str | None, *hooks: Hook, seed: int = 0, **config: Any) -> Trainer:  # noqa: ANN401
    model = ClickModel(seed)
    adam = torch.optim.Adam(model.mlp.parameters(), lr=0.01)
    where = None if model_dir is None else str(model_dir)
    return Trainer(model, adam, config=RunConfig(model_dir=where, event_time="time", **config), hooks=hooks)


def straight(steps: int) -> ClickModel:
    trainer = new_trainer(None)
    trainer.fit(Stream(), steps=steps)
    return trainer.model  # type: ignore[return-value]


def saved_steps(model_dir: Path) -> set[int]:
    return SaveHelper(model_dir / "model.ckpt").get_existing_checkpoint_steps()


def crashed(model_dir: Path, step: int, **config: Any) -> None:  # noqa: ANN401
    with pytest.raises(KeyboardInterrupt):
        new_trainer(model_dir, Crash(step), **config).fit(Stream())


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_crash_costs_what_was_not_saved_and_nothing_else(tmp_path: Path, prefetch: int) -> None:
    crashed(tmp_path, 9, save_checkpoints_steps=4, embedding_prefetch_capacity=prefetch)
    trainer = new_trainer(tmp_path, embedding_prefetch_capacity=prefetch)
    assert trainer.restore()
    assert trainer.step in (4, 8)  # 8 was due; whether it was written in time is a matter of timing
    assert_same(trainer.model, straight(trainer.step))
    # From there every record is trained once.
    trainer.fit(Stream(), max_steps=12)
    assert_same(trainer.model, straight(12))


def test_late_sparse_updates_are_applied_before_the_state_is_taken(tmp_path: Path) -> None:
    options = {"enable_embedding_postpush": True, "save_checkpoints_steps": 3}
    trainer = new_trainer(tmp_path, **options)
    trainer.fit(Stream(), steps=7)
    restored = new_trainer(tmp_path, restore_ckpt="model.ckpt-3", **options)
    assert restored.restore()
    # Three steps, of which the third's rows are in: what a run that ends there has.
    three = new_trainer(None, enable_embedding_postpush=True)
    three.fit(Stream(), steps=3)
    assert_same(restored.model, three.model)


def test_the_log_is_a_restore_point_every_few_seconds(tmp_path: Path) -> None:
    # Nothing is too soon: every step is committed, unless the one before is still being written.
    crashed(tmp_path, 6, save_checkpoints_secs=0, log_flush_secs=1e-6)
    trainer = new_trainer(tmp_path)
    assert trainer.restore()
    assert trainer.step > 0
    assert_same(trainer.model, straight(trainer.step))
    trainer.fit(Stream(), max_steps=9)
    assert_same(trainer.model, straight(9))


def test_the_log_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    class CrashWhenLogged(Hook):
        """Saves at step 3, and crashes as soon as the log has a later step."""

        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 3:
                trainer.save()
            if result.step > 3 and max(point.step for point in restore_points(tmp_path)) > 3:
                raise KeyboardInterrupt

    trainer = new_trainer(tmp_path, CrashWhenLogged(), save_checkpoints_secs=0, log_flush_secs=1e-6)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Stream(), steps=100)
    restored = new_trainer(tmp_path)
    assert restored.restore()
    assert restored.step > 3
    assert_same(restored.model, straight(restored.step))


def test_a_save_that_needs_no_snapshot_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monolith.state.ModelDir.needs_snapshot", lambda *arguments: False)
    monkeypatch.setattr("monolith.train.checkpoints.write_snapshot", lambda *arguments: pytest.fail("all rows again"))
    new_trainer(tmp_path, save_checkpoints_steps=2).fit(Stream(), steps=6)
    assert {2, 6} <= saved_steps(tmp_path)


def test_snapshots_of_all_rows_are_written_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.state.ModelDir.needs_snapshot", lambda *arguments: True)
    scanned = []

    def slow(*arguments: Any) -> Any:  # noqa: ANN401
        scanned.append(trainer.step)
        found = write_snapshot(*arguments)
        while trainer.step < scanned[0] + 3 and trainer.stop_reason is None:
            time.sleep(0.001)
        return found

    monkeypatch.setattr("monolith.train.checkpoints.write_snapshot", slow)
    trainer = new_trainer(tmp_path, save_checkpoints_steps=4)
    trainer.fit(Stream(), steps=12)
    # The state that was saved first is of a later step than the one at which the save was due: nobody waited.
    assert scanned[0] == 4
    assert min(saved_steps(tmp_path)) >= 7
    for step in saved_steps(tmp_path):
        restored = new_trainer(tmp_path, restore_ckpt=f"model.ckpt-{step}")
        assert restored.restore()
        assert_same(restored.model, straight(step))
    assert list((tmp_path / "snapshots").iterdir())


def test_retention(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, save_checkpoints_steps=1, checkpoints_max_to_keep=2)
    trainer.fit(Stream(), steps=3)
    for _ in range(3):
        new_trainer(tmp_path, checkpoints_max_to_keep=2).fit(Stream(), steps=1)
    assert saved_steps(tmp_path) == {5, 6}
    assert sorted(path.name for path in tmp_path.glob("model.ckpt-*")) == ["model.ckpt-5", "model.ckpt-6"]
    assert sorted(path.name for path in tmp_path.glob("ckpt.info-*")) == ["ckpt.info-5", "ckpt.info-6"]


def test_a_checkpoint_in_use_outlives_retention(tmp_path: Path) -> None:
    new_trainer(tmp_path, checkpoints_max_to_keep=1).fit(Stream(), steps=1)
    with in_use(tmp_path / "model.ckpt-1"):
        new_trainer(tmp_path, checkpoints_max_to_keep=1).fit(Stream(), steps=1)
        trainer = new_trainer(tmp_path, restore_ckpt="model.ckpt-1")
        assert trainer.restore()
        assert_same(trainer.model, straight(1))
    new_trainer(tmp_path, checkpoints_max_to_keep=1).fit(Stream(), steps=1)
    assert [path.name for path in tmp_path.glob("model.ckpt-*")] == ["model.ckpt-3"]


def test_what_lies_beside_a_checkpoint(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    trainer.fit(Stream(), steps=2)
    rows = {name: stats.rows for name, stats in trainer.table_stats().items()}
    assert read_checkpoint_info(tmp_path, 2) == (rows, {})
    state = get_monolith_checkpoint_state(tmp_path)
    assert state is not None
    assert state.last_checkpoint_save_timestamp > 0
    manifest = json.loads((tmp_path / "model.ckpt-2" / "manifest.json").read_text())
    assert manifest["config"]["event_time"] == "time"
    assert manifest["event_time"] == 1001


def test_monolith_checkpoint_is_there_from_the_start(tmp_path: Path) -> None:
    crashed(tmp_path, 1)
    assert not (tmp_path / "checkpoint").exists()
    state = get_monolith_checkpoint_state(tmp_path)
    assert state == MonolithCheckpointState(builtin_hash_table_type="MULTI_CUCKOO_HASH_MAP")
    # What an earlier program wrote stays.
    old = MonolithCheckpointState(
        exempt_model_checkpoint_paths=("/x/model.ckpt-1",), builtin_hash_table_type="CUCKOO_HASH_MAP"
    )
    write_monolith_checkpoint_state(tmp_path, old)
    new_trainer(tmp_path).fit(Stream(), steps=1)
    state = get_monolith_checkpoint_state(tmp_path)
    assert state is not None
    assert replace(state, last_checkpoint_save_timestamp=0) == old


def test_a_listed_checkpoint_without_a_step_does_not_end_a_run_that_removes_it(tmp_path: Path) -> None:
    PartialRecoverySaver({"v": torch.zeros(1)}).save(tmp_path / "pretrained")
    config = {"checkpoints_max_to_keep": 1, "save_checkpoints_steps": 1}
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "model.ckpt-1"\nall_model_checkpoint_paths: "pretrained"\n'
    )
    write_trained(tmp_path)
    assert new_trainer(tmp_path, **config).fit(Stream(), steps=2) == 3
    assert not (tmp_path / "pretrained").exists()
    assert saved_steps(tmp_path) == {3}


def write_trained(model_dir: Path) -> None:
    """Add a checkpoint of step 1 that another folder's run has made."""
    other = model_dir.with_name("other")
    new_trainer(other).fit(Stream(), steps=1)
    for path in other.iterdir():
        if path.is_dir():
            path.rename(model_dir / path.name)


def test_no_save_at_the_start(tmp_path: Path) -> None:
    new_trainer(tmp_path, save_checkpoints_steps=100).fit(Stream(), steps=1)
    assert saved_steps(tmp_path) == {1}


def test_going_back_to_a_checkpoint_once(tmp_path: Path) -> None:
    new_trainer(tmp_path, save_checkpoints_steps=2).fit(Stream(), steps=6)
    back = {"restore_ckpt": "model.ckpt-2"}
    trainer = new_trainer(tmp_path, **back)
    assert trainer.fit(Stream(), steps=1) == 3
    assert_same(trainer.model, straight(3))
    assert (tmp_path / "restore_ckpt").read_text() == "model.ckpt-2"
    again = new_trainer(tmp_path, **back)
    assert again.fit(Stream(), steps=1) == 4
    assert_same(again.model, straight(4))


@pytest.mark.parametrize("killed_after", [0, 1])
def test_what_was_left_behind_is_not_continued_by_accident(tmp_path: Path, killed_after: int) -> None:
    new_trainer(tmp_path, save_checkpoints_steps=2).fit(Stream(), steps=6)
    back = {"restore_ckpt": "model.ckpt-2"}
    if killed_after:
        crashed(tmp_path, 2 + killed_after, **back)
    else:
        new_trainer(tmp_path, **back).fit(Stream(), steps=0)
    trainer = new_trainer(tmp_path, **back)
    assert trainer.restore(training=True)
    assert trainer.step == 2
    assert_same(trainer.model, straight(2))


def test_evaluation_goes_back_every_time(tmp_path: Path) -> None:
    new_trainer(tmp_path, save_checkpoints_steps=2).fit(Stream(), steps=6)
    before = (tmp_path / "checkpoint").read_bytes()
    config = RunConfig(model_dir=str(tmp_path), restore_ckpt="model.ckpt-2")
    for _ in range(2):
        assert Estimator(ClickModel(), config).evaluate(Stream(1))["global_step"] == 2
    assert (tmp_path / "checkpoint").read_bytes() == before
    assert not (tmp_path / "restore_ckpt").exists()
    # One that evaluated first trains by the rule of training.
    (tmp_path / "restore_ckpt").write_text("model.ckpt-2")
    estimator = Estimator(ClickModel(), config)
    assert estimator.evaluate(Stream(1))["global_step"] == 2
    assert estimator.train(Stream(), steps=1) == 7


@pytest.mark.parametrize("moment", ["step=4", "step=5", "sequence=2"])
def test_going_back_to_a_moment(tmp_path: Path, moment: str) -> None:
    trainer = new_trainer(tmp_path, save_checkpoints_steps=2)
    for _ in range(3):
        trainer.fit(Stream(), steps=2)
    back = new_trainer(tmp_path, restore_to=moment)
    assert back.fit(Stream(), steps=1) == 5
    again = new_trainer(tmp_path, restore_to=moment)
    assert again.fit(Stream(), steps=1) == 6


def test_a_moment_before_everything(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=2)
    with pytest.raises(InvalidArgumentError, match="restore_to"):
        new_trainer(tmp_path, restore_to="step=1").fit(Stream(), steps=1)


def test_an_index_changed_by_hand_is_followed(tmp_path: Path) -> None:
    new_trainer(tmp_path, save_checkpoints_steps=2).fit(Stream(), steps=6)
    index = tmp_path / "checkpoint"
    lines = index.read_text().splitlines()
    index.write_text("\n".join(['model_checkpoint_path: "model.ckpt-2"', *lines[1:]]))
    trainer = new_trainer(tmp_path)
    assert trainer.fit(Stream(), steps=1) == 3
    assert_same(trainer.model, straight(3))
    assert new_trainer(tmp_path).fit(Stream(), steps=1) == 4


def test_another_runs_checkpoint_is_continued(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    new_trainer(there, save_checkpoints_steps=2).fit(Stream(), steps=5)
    trainer = new_trainer(here, restore_dir=str(there), restore_ckpt="model.ckpt-2")
    assert trainer.fit(Stream(), steps=1) == 3
    assert_same(trainer.model, straight(3))
    again = new_trainer(here, restore_dir=str(there), restore_ckpt="model.ckpt-2")
    assert again.fit(Stream(), steps=1) == 4
    assert_same(again.model, straight(4))
    # Its own checkpoints need nothing of the other run's.
    there.rename(tmp_path / "gone")
    alone = new_trainer(here)
    assert alone.fit(Stream(), steps=1) == 5
    assert_same(alone.model, straight(5))


def test_clear_nn_keeps_rows_and_starts_dense_parameters_anew_once(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=4)
    trained = straight(4)
    fresh = ClickModel(seed=5)
    trainer = new_trainer(tmp_path, seed=0, clear_nn=True)
    trainer.model.mlp.load_state_dict(fresh.mlp.state_dict())  # type: ignore[union-attr, operator]
    assert trainer.fit(Stream(), steps=0) == 0
    expected = trained
    expected.mlp.load_state_dict(fresh.mlp.state_dict())
    expected.embeddings.steps.zero_()
    assert_same(trainer.model, expected)
    assert (tmp_path / "clear_nn").read_text() == "clean nn done!"
    again = new_trainer(tmp_path, clear_nn=True)
    assert again.restore(training=True)
    assert_same(again.model, expected)


def test_clear_nn_can_keep_the_step(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=4)
    assert new_trainer(tmp_path, clear_nn=True, continue_training=True).fit(Stream(), steps=1) == 5


def test_renamed_parameters_and_tables(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=3)

    class Renamed(ClickModel):
        def __init__(self) -> None:
            super().__init__()
            self.tower = self.mlp
            del self.mlp

        def forward(self, batch: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
            self.__dict__["mlp"] = self.tower
            return super().forward(batch)

    model = Renamed()
    names = {f"tower.{rest}": f"mlp.{rest}" for rest in ("0.weight", "0.bias", "2.weight", "2.bias")}
    config = RunConfig(model_dir=str(tmp_path), event_time="time", reload_alias_map=names)
    trainer = Trainer(model, torch.optim.Adam(model.tower.parameters(), lr=0.01), config=config)
    assert trainer.fit(Stream(), steps=1) == 4
    assert torch.equal(model.tower[0].weight, straight(4).mlp[0].weight)


class Popularity(torch.nn.Module):
    """A model of tables alone: the sum of one number per feature."""

    def __init__(self, *features: Feature) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(features)

    def forward(self, batch: Any) -> torch.Tensor:  # noqa: ANN401
        rows: torch.Tensor = sum(self.embeddings(batch).values())  # type: ignore[assignment]
        return rows.sum(1)


def popularity(model_dir: Path, *features: Feature, **config: Any) -> Trainer:  # noqa: ANN401
    run = RunConfig(model_dir=str(model_dir), **config)
    return Trainer(Popularity(*features), heads=[Head(label="clicked")], config=run)


def test_new_tables_and_new_segments_only_when_allowed(tmp_path: Path) -> None:
    user, item = Feature(name="user", dim=1), Feature(name="item", dim=1)
    first = popularity(tmp_path, user)
    first.fit(Stream(), steps=3)
    rows = first.table_stats()["user"].rows
    with pytest.raises(CheckpointMismatchError, match="'item'"):
        popularity(tmp_path, user, item).restore()
    more = popularity(tmp_path, user, item, allow_new_tables=True)
    assert more.fit(Stream(), steps=1) == 4
    assert more.table_stats()["item"].rows > 0
    assert more.table_stats()["user"].rows >= rows
    biased = Feature(name="user", dim=1, bias=True)
    with pytest.raises(CheckpointMismatchError, match="segments"):
        popularity(tmp_path, biased, item).restore()
    wider = popularity(tmp_path, biased, item, allow_new_segments=True)
    assert wider.fit(Stream(), steps=1) == 5
    again = popularity(tmp_path, biased, item)
    assert again.restore()
    assert_same(again.model, wider.model)


def test_dense_only_checkpoints_beside_full_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunCheckpoints, "in_background", False)
    trainer = new_trainer(tmp_path, save_checkpoints_steps=4, dense_only_save_checkpoints_steps=2)
    trainer.fit(Stream(), steps=7)
    assert saved_steps(tmp_path) == {4, 7}
    assert saved_steps(tmp_path / "dense_only") == {2, 6}
    # They are no restore points: a run continues from a full one.
    assert new_trainer(tmp_path).fit(Stream(), max_steps=7) == 7


def test_a_remote_model_dir() -> None:
    url = "memory://trainer-checkpoints/run"
    first = new_trainer(url, save_checkpoints_steps=2)
    first.fit(Stream(), steps=3)
    second = new_trainer(url)
    assert second.fit(Stream(), steps=2) == 5
    assert_same(second.model, straight(5))


def test_a_moved_model_dir(tmp_path: Path) -> None:
    new_trainer(tmp_path / "a").fit(Stream(), steps=3)
    (tmp_path / "a").rename(tmp_path / "b")
    trainer = new_trainer(tmp_path / "b")
    assert trainer.fit(Stream(), steps=1) == 4
    assert_same(trainer.model, straight(4))


def test_saving_by_hand_beside_a_loop_of_ones_own(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    stream = iter(Stream())
    for _ in range(3):
        trainer.train_step(next(stream))
    assert trainer.save() == str(tmp_path / "model.ckpt-3")
    for _ in range(2):
        trainer.train_step(next(stream))
    assert trainer.save() == str(tmp_path / "model.ckpt-5")
    other = new_trainer(tmp_path)
    assert other.restore()
    assert_same(other.model, straight(5))
    assert new_trainer(None).save() is None


def test_saving_by_hand_during_a_run(tmp_path: Path) -> None:
    paths: list[str | None] = []

    class AtTwo(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            if trainer.step == 2:
                paths.append(trainer.save())

    new_trainer(tmp_path, AtTwo()).fit(Stream(), steps=4)
    assert paths == [str(tmp_path / "model.ckpt-2")]
    assert saved_steps(tmp_path) == {2, 4}


def test_listeners_and_metrics_of_a_run(tmp_path: Path) -> None:
    told: list[str] = []

    class Listener(CheckpointSaverListener):
        def __init__(self, name: str) -> None:
            self.name = name

        def after_save(self, trainer: Trainer, step: int) -> None:
            told.append(f"{self.name} {step}")

    trainer = new_trainer(tmp_path)
    trainer.save_listeners, trainer.save_guards = (Listener("listener"),), (Listener("guard"),)
    trainer.on_save_metric = lambda name, value, tags: told.append(f"{name} {tags['mode']}")
    trainer.fit(Stream(), steps=1)
    assert told == ["listener 1", "guard 1", "save_checkpoint full", "save_checkpoint_time full"]


def test_a_damaged_log_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    crashed(tmp_path, 6, save_checkpoints_secs=0, log_flush_secs=1e-6)
    newest = sorted((tmp_path / "log").glob("*.segment"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(CorruptFileError, match=r"\.segment"):
        new_trainer(tmp_path).restore()


def test_steps_made_between_two_runs_are_not_lost(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    source = Stream()
    trainer.fit(source, steps=2)
    trainer.train_step(next(iter(source)))
    trainer.fit(source, steps=1)
    other = new_trainer(tmp_path)
    assert other.restore()
    assert_same(other.model, trainer.model)
    assert_same(other.model, straight(4))


class Endless:
    """A source that cannot tell its place."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(Stream())


def test_a_source_that_cannot_tell_its_place_is_saved_too(tmp_path: Path) -> None:
    new_trainer(tmp_path, save_checkpoints_steps=1).fit(Endless(), steps=3)
    trainer = new_trainer(tmp_path)
    assert trainer.fit(Endless(), steps=1) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1.0},
        {"dense_only_save_checkpoints_steps": 1, "dense_only_save_checkpoints_secs": 1.0},
        {"clear_nn": True, "reload_alias_map": {"a": "b"}},
        {"restore_to": "step=1", "restore_ckpt": "model.ckpt-1"},
        {"restore_to": "yesterday"},
        {"tide_start_hour": 24},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_steps", "")):
        RunConfig(**wrong)
