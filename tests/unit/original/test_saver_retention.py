"""Danger: a checkpoint that is removed although it must stay, or a disk that fills up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.original import PartialRecoverySaver
from monolith.original.checkpoint_state import SaveHelper
from monolith.state.index import MonolithCheckpointState, read_checkpoint_state, write_monolith_checkpoint_state
from monolith.state.locks import LEASE_SECONDS, claimed, in_use


def saver(**options: Any) -> PartialRecoverySaver:  # noqa: ANN401
    return PartialRecoverySaver({"v": torch.zeros(1)}, **options)


def on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def listed(folder: Path) -> list[str]:
    state = read_checkpoint_state(folder)
    assert state is not None
    assert state.model_checkpoint_path == state.all_model_checkpoint_paths[-1]
    return [Path(path).name for path in state.all_model_checkpoint_paths]


def names(kept: PartialRecoverySaver) -> list[str]:
    return [Path(path).name for path in kept.last_checkpoints]


def test_exempt_checkpoints_stay_and_do_not_count(tmp_path: Path) -> None:
    exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=("model.ckpt-10", "model.ckpt-20"))
    write_monolith_checkpoint_state(tmp_path, exempt)
    kept, helper = saver(max_to_keep=3, model_dir=tmp_path), SaveHelper(tmp_path / "model.ckpt")
    for step in (10, 20, 30, 40, 50):
        kept.save(tmp_path / "model.ckpt", global_step=step)
    assert helper.get_existing_checkpoint_steps() == {10, 20, 30, 40, 50}
    kept.save(tmp_path / "model.ckpt", global_step=60)
    assert helper.get_existing_checkpoint_steps() == {10, 20, 40, 50, 60}
    assert on_disk(tmp_path) == [f"model.ckpt-{step}" for step in (10, 20, 40, 50, 60)]


def test_what_is_exempt_is_said_in_the_model_dir_of_the_saver(tmp_path: Path) -> None:
    model_dir, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder, exempt in ((model_dir, "ckpt-1"), (elsewhere, "ckpt-2")):
        folder.mkdir()
        state = MonolithCheckpointState(exempt_model_checkpoint_paths=(exempt,))
        write_monolith_checkpoint_state(folder, state)
    kept = saver(max_to_keep=1, model_dir=model_dir)
    for step in (1, 2, 3):
        kept.save(elsewhere / "ckpt", global_step=step)
    assert on_disk(elsewhere) == ["ckpt-1", "ckpt-3"]


def test_a_saver_may_be_given_exempt_checkpoints(tmp_path: Path) -> None:
    kept = saver(max_to_keep=1, exempt_checkpoint_paths=[tmp_path / "ckpt-1"])
    exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=(f"{tmp_path}/ckpt-2",))
    write_monolith_checkpoint_state(tmp_path, exempt)
    for step in (1, 2, 3, 4):
        kept.save(tmp_path / "ckpt", global_step=step)
    assert on_disk(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-4"]
    with pytest.raises(InvalidArgumentError, match="several paths"):
        saver(exempt_checkpoint_paths="ckpt-1")


def test_checkpoints_without_a_step_are_kept_by_their_names(tmp_path: Path) -> None:
    kept = saver(max_to_keep=2)
    for name in ("a", "b", "a", "c"):
        kept.save(tmp_path / name)
    assert names(kept) == ["a", "c"]
    assert on_disk(tmp_path) == ["a", "c"]
    assert SaveHelper(tmp_path / "model.ckpt").get_existing_checkpoint_steps() == set()


def test_what_is_exempt_is_asked_at_every_save(tmp_path: Path) -> None:
    kept = saver(max_to_keep=2)
    for step in (1, 2):
        kept.save(tmp_path / "ckpt", global_step=step)
    exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=(f"{tmp_path}/ckpt-2",))
    write_monolith_checkpoint_state(tmp_path, exempt)
    for step in (3, 4):
        kept.save(tmp_path / "ckpt", global_step=step)
    assert on_disk(tmp_path) == ["ckpt-2", "ckpt-3", "ckpt-4"]


@pytest.mark.parametrize("shards", [None, {"a": 0, "b": 1}])
def test_the_newest_stay(tmp_path: Path, shards: dict[str, int] | None) -> None:
    def make() -> PartialRecoverySaver:
        variables = {"a": torch.zeros(1), "b": torch.ones(1)}
        return PartialRecoverySaver(variables, max_to_keep=2, sharded=shards is not None, shard_of=shards)

    kept = make()
    for name, expected in (("s1", ["s1"]), ("s2", ["s1", "s2"]), ("s3", ["s2", "s3"])):
        kept.save(tmp_path / name)
        assert names(kept) == listed(tmp_path) == on_disk(tmp_path) == expected
    second = make()
    second.set_last_checkpoints_with_time([(path, 0.0) for path in kept.last_checkpoints])
    third = make()
    kept.save(tmp_path / "s2")  # saved again: it is the newest now
    assert names(kept) == listed(tmp_path) == ["s3", "s2"]
    kept.save(tmp_path / "s1")
    assert names(kept) == listed(tmp_path) == ["s2", "s1"]
    assert on_disk(tmp_path) == ["s1", "s2"]
    # A saver that was given the history goes on with it, one that was not removes nothing it does not know.
    second.save(tmp_path / "s4")
    assert names(second) == ["s3", "s4"]
    third.save(tmp_path / "s5")
    assert names(third) == ["s5"]
    assert on_disk(tmp_path) == ["s1", "s4", "s5"]


@pytest.mark.parametrize("unlimited", [None, 0])
def test_without_a_limit_all_stay_and_none_is_listed(tmp_path: Path, unlimited: int | None) -> None:
    kept = saver(max_to_keep=unlimited)
    for name in ("s1", "s2", "s3"):
        kept.save(tmp_path / name)
        assert kept.last_checkpoints == []
        assert listed(tmp_path) == [name]
    assert on_disk(tmp_path) == ["s1", "s2", "s3"]


def test_a_restarted_saver_recovers_what_is_still_there(tmp_path: Path) -> None:
    first = saver(max_to_keep=3)
    paths = [first.save(tmp_path / name) for name in ("s1", "s2", "s3")]
    (tmp_path / "s1" / "manifest.json").unlink()
    second = saver(max_to_keep=3)
    second.recover_last_checkpoints([path for path in paths if path])
    assert names(second) == ["s2", "s3"]
    second.save(tmp_path / "s4")
    assert names(second) == ["s2", "s3", "s4"]
    second.save(tmp_path / "s5")
    assert names(second) == ["s3", "s4", "s5"]
    assert not (tmp_path / "s2").exists()


def test_one_every_n_hours_stays_for_good(tmp_path: Path) -> None:
    now = [1000.0]
    kept = saver(max_to_keep=2, keep_checkpoint_every_n_hours=0.7 / 3600, clock=lambda: now[0])
    now[0] += 0.75
    for name in ("s1", "s2", "s3", "s4"):
        kept.save(tmp_path / name)
        now[0] += 0.01
    assert names(kept) == ["s3", "s4"]
    assert on_disk(tmp_path) == ["s1", "s3", "s4"]


def test_no_index_when_told(tmp_path: Path) -> None:
    kept = saver(max_to_keep=1)
    for name in ("s1", "s2"):
        kept.save(tmp_path / name, write_state=False)
    assert on_disk(tmp_path) == ["s1", "s2"]
    assert read_checkpoint_state(tmp_path) is None


def test_one_that_is_read_stays_until_it_is_not(tmp_path: Path) -> None:
    kept = saver(max_to_keep=1)
    first = kept.save(tmp_path / "s1")
    assert first is not None
    with in_use(first), in_use(first):
        kept.save(tmp_path / "s2")
        kept.save(tmp_path / "s3")
        assert on_disk(tmp_path) == listed(tmp_path) == ["s1", "s3"]
    kept.save(tmp_path / "s4")
    assert on_disk(tmp_path) == listed(tmp_path) == ["s4"]


def test_a_lease_on_a_store_without_locks_ends_by_itself() -> None:
    now = [0.0]
    path = "memory://leases/model.ckpt-1"
    with in_use(path, clock=lambda: now[0]):
        with claimed(path, clock=lambda: now[0]) as free:
            assert not free
        now[0] = LEASE_SECONDS + 1
        with claimed(path, clock=lambda: now[0]) as free:
            assert free
        now[0] = 0.0
    with claimed(path, clock=lambda: now[0]) as free:
        assert free


@pytest.mark.parametrize("wrong", [{"max_to_keep": -1}, {"keep_checkpoint_every_n_hours": 0}], ids=str)
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        saver(**wrong)
