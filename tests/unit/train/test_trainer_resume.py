"""Danger: a run that continues from elsewhere than it stopped: other weights, other rows, batches trained twice or skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import CheckpointMismatchError, CorruptFileError, StorageError
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.train import Head, RunConfig, Trainer
from monolith.train.checkpoints import RunCheckpoints
from monolith.train.hooks import Hook
from training import ClickModel, Stream, assert_same


def new_trainer(model_dir: Path | None, *, hooks: tuple[Hook, ...] = (), **config: Any) -> Trainer:  # noqa: ANN401
    model = ClickModel()
    adam = torch.optim.Adam(model.mlp.parameters(), lr=0.01)
    where = None if model_dir is None else str(model_dir)
    return Trainer(model, adam, config=RunConfig(model_dir=where, event_time="time", **config), hooks=hooks)


def straight(steps: int) -> ClickModel:
    trainer = new_trainer(None)
    trainer.fit(Stream(), steps=steps)
    return trainer.model  # type: ignore[return-value]


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("postpush", [False, True])
def test_three_runs_equal_one(tmp_path: Path, prefetch: int, postpush: bool) -> None:
    options = {"embedding_prefetch_capacity": prefetch, "enable_embedding_postpush": postpush}
    for last in (4, 5, 12):
        trainer = new_trainer(tmp_path, **options)
        assert trainer.fit(Stream(), max_steps=last) == last
    if not postpush:
        assert_same(trainer.model, straight(12))
    else:
        # A run ends by applying what it kept, so only the runs themselves can be repeated exactly.
        again = new_trainer(None, **options)
        source = Stream()
        for last in (4, 5, 12):
            again.fit(source, max_steps=last)
        assert_same(trainer.model, again.model)


def test_steps_counts_from_the_saved_step_and_max_steps_from_zero(tmp_path: Path) -> None:
    assert new_trainer(tmp_path).fit(Stream(), steps=3) == 3
    assert new_trainer(tmp_path).fit(Stream(), steps=3) == 6
    assert new_trainer(tmp_path).fit(Stream(), max_steps=8) == 8
    assert new_trainer(tmp_path).fit(Stream(), max_steps=8) == 8
    assert new_trainer(tmp_path).fit(Stream(), max_steps=5) == 8


def test_a_stop_by_a_hook_while_reading_ahead_loses_no_batch(tmp_path: Path) -> None:
    class StopAtThree(Hook):
        def before_step(self, trainer: Trainer) -> None:
            if trainer.step == 3:
                trainer.request_stop("three")

    new_trainer(tmp_path, hooks=(StopAtThree(),), embedding_prefetch_capacity=4).fit(Stream())
    trainer = new_trainer(tmp_path)
    trainer.fit(Stream(), max_steps=7)
    assert_same(trainer.model, straight(7))


def test_a_source_that_was_used_up_starts_again_for_more_steps(tmp_path: Path) -> None:
    assert new_trainer(tmp_path).fit(Stream(5)) == 5
    assert new_trainer(tmp_path).fit(Stream(5), steps=3) == 8


def test_a_source_that_cannot_tell_its_place_starts_from_its_beginning(tmp_path: Path) -> None:
    batches = list(Stream(5))
    assert new_trainer(tmp_path).fit(batches, steps=3) == 3
    assert new_trainer(tmp_path).fit(batches) == 8


def test_the_place_in_the_data_can_be_left_behind(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=3)
    other = Stream(4)
    assert new_trainer(tmp_path, resume_data=False).fit(other) == 7


def test_a_later_source_of_the_same_process_is_not_moved() -> None:
    trainer = new_trainer(None)
    trainer.fit(Stream(), steps=3)
    assert trainer.fit(Stream(4)) == 7


def test_dropout_continues_its_random_numbers_with_a_seed(tmp_path: Path) -> None:
    def dropping(model_dir: Path | None) -> Trainer:
        trainer = new_trainer(model_dir, seed=3)
        trainer.model.mlp.insert(1, torch.nn.Dropout(0.5))  # type: ignore[union-attr, operator]
        return trainer

    whole = dropping(None)
    whole.fit(Stream(), steps=6)
    dropping(tmp_path).fit(Stream(), steps=2)
    torch.manual_seed(99)
    second = dropping(tmp_path)
    second.fit(Stream(), steps=4)
    assert_same(second.model, whole.model)


def test_a_failed_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=3)

    def full(self: RunCheckpoints, trainer: Trainer) -> None:
        raise StorageError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "begin", full)
        with pytest.raises(StorageError, match="disk full"):
            new_trainer(tmp_path).fit(Stream(), steps=3)
    trainer = new_trainer(tmp_path)
    assert trainer.restore()
    assert_same(trainer.model, straight(3))
    # What the failed save left behind is no obstacle.
    assert trainer.fit(Stream(), steps=1) == 4


@pytest.mark.parametrize("pattern", ["model.ckpt-3/state.json", "model.ckpt-3/state.safetensors", "log/*.segment"])
def test_a_truncated_checkpoint_is_refused_and_nothing_is_restored(tmp_path: Path, pattern: str) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=3)
    (path,) = tmp_path.glob(pattern)
    path.write_bytes(path.read_bytes()[:10])
    trainer = new_trainer(tmp_path)
    with pytest.raises(CorruptFileError):
        trainer.fit(Stream(), steps=1)
    assert trainer.step == 0
    assert_same(trainer.model, ClickModel())


def test_a_damaged_newest_checkpoint_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=3)
    new_trainer(tmp_path).fit(Stream(), steps=3)
    (tmp_path / "model.ckpt-6" / "state.json").unlink()
    with pytest.raises(CorruptFileError, match=r"model\.ckpt-6.*on purpose with restore_ckpt"):
        new_trainer(tmp_path).restore()
    trainer = new_trainer(tmp_path, restore_ckpt="model.ckpt-3")
    assert trainer.fit(Stream(), steps=1) == 4
    assert_same(trainer.model, straight(4))


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=1)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "../../etc"')
    with pytest.raises(CorruptFileError, match="checkpoint"):
        new_trainer(tmp_path).restore()


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    new_trainer(tmp_path).fit(Stream(), steps=2)
    trainer = new_trainer(tmp_path)
    trainer.model.mlp[2] = torch.nn.Linear(8, 3)  # type: ignore[index, operator]
    for _ in range(2):  # a second try must not take the folder for empty
        with pytest.raises(CheckpointMismatchError, match=r"'mlp\.2\.bias' has shape \[3\], saved with \[2\]"):
            trainer.fit(Stream(), steps=1)
    assert trainer.table_stats()["user"].rows == 0
    again = new_trainer(tmp_path)
    again.restore()
    assert_same(again.model, straight(2))


def test_tables_of_equal_names_in_two_collections_are_kept_apart(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = EmbeddingBagCollection([Feature(name="user", dim=1)], seed=1)
            self.b = EmbeddingBagCollection([Feature(name="user", dim=1)], seed=2)

        def forward(self, batch: Any) -> torch.Tensor:  # noqa: ANN401
            return self.a(batch)["user"] + 2 * self.b(batch)["user"]

    def run() -> Trainer:
        config = RunConfig(model_dir=str(tmp_path))
        return Trainer(Twice(), heads=[Head(label="clicked")], config=config)

    first, second = run(), run()
    first.fit(Stream(), steps=3)
    assert second.restore()
    assert_same(second.model, first.model)
    assert set(first.table_stats()) == {"0/user", "1/user"}
