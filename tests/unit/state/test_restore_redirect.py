"""Danger: a run that starts from another checkpoint than was asked for, or goes back to it at every restart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monolith.errors import CorruptFileError
from monolith.original.checkpoint_state import get_checkpoint_state
from monolith.state.index import (
    CheckpointState,
    MonolithCheckpointState,
    adopt_restore_dir,
    get_monolith_checkpoint_state,
    read_checkpoint_state,
    write_checkpoint_state,
    write_monolith_checkpoint_state,
)
from monolith.state.paths import base_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with checkpoints 0, 30 and 61."""
    made = tmp_path / "restore"
    paths = tuple(str(made / f"model.ckpt-{step}") for step in (0, 30, 61))
    write_checkpoint_state(made, CheckpointState(model_checkpoint_path=paths[-1], all_model_checkpoint_paths=paths))
    return made


def start(folder: Path, restore_ckpt: str | None = None, *, training: bool = False) -> str:
    state = get_checkpoint_state(folder, restore_ckpt=restore_ckpt, training=training)
    assert state is not None
    return base_name(state.model_checkpoint_path)


def test_without_a_wish_the_newest(folder: Path) -> None:
    assert start(folder) == "model.ckpt-61"
    assert start(folder, training=True) == "model.ckpt-61"
    assert get_checkpoint_state(folder / "nothing") is None


def test_training_goes_back_once(folder: Path) -> None:
    assert start(folder, "model.ckpt-30", training=True) == "model.ckpt-30"
    assert (folder / "restore_ckpt").read_text() == "model.ckpt-30"
    # Everyone who reads the index sees it; nothing is forgotten.
    assert start(folder) == "model.ckpt-30"
    state = read_checkpoint_state(folder)
    assert state is not None
    assert len(state.all_model_checkpoint_paths) == 3
    # The run saves and is started again with the same settings: it continues.
    newer = str(folder / "model.ckpt-90")
    write_checkpoint_state(folder, CheckpointState(model_checkpoint_path=newer))
    assert start(folder, "model.ckpt-30", training=True) == "model.ckpt-90"


def test_other_modes_go_back_every_time_and_change_nothing(folder: Path) -> None:
    before = (folder / "checkpoint").read_bytes()
    for _ in range(2):
        assert start(folder, "/some/where/model.ckpt-30") == "model.ckpt-30"
    assert (folder / "checkpoint").read_bytes() == before
    assert not (folder / "restore_ckpt").exists()
    (folder / "restore_ckpt").write_text("there")
    assert start(folder, "model.ckpt-30") == "model.ckpt-30"


@pytest.mark.parametrize("training", [True, False])
def test_a_checkpoint_that_is_not_listed_changes_nothing(
    folder: Path, training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = (folder / "checkpoint").read_bytes()
    with caplog.at_level(logging.WARNING):
        assert start(folder, "model.ckpt-31", training=training) == "model.ckpt-61"
    assert "model.ckpt-31" in caplog.text
    assert (folder / "checkpoint").read_bytes() == before
    assert not (folder / "restore_ckpt").exists()


def test_other_indexes_are_not_redirected(folder: Path) -> None:
    (folder / "checkpoint_input_worker_1").write_bytes((folder / "checkpoint").read_bytes())
    state = get_checkpoint_state(folder, restore_ckpt="model.ckpt-30", filename="checkpoint_input_worker_1")
    assert state is not None
    assert base_name(state.model_checkpoint_path) == "model.ckpt-61"


def test_an_index_that_is_being_replaced_is_read_again(folder: Path) -> None:
    whole = (folder / "checkpoint").read_bytes()
    (folder / "checkpoint").write_bytes(b"")
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 4:
            (folder / "checkpoint").write_bytes(whole)

    state = get_checkpoint_state(folder, sleep=sleep)
    assert state is not None
    assert sleeps == [1.0] * 4
    (folder / "checkpoint").write_bytes(b"")
    sleeps.append(0.0)
    with pytest.raises(CorruptFileError, match="checkpoint"):
        get_checkpoint_state(folder, sleep=sleep)
    assert len(sleeps) == 9


def test_another_runs_checkpoint_is_adopted(folder: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    chosen = str(folder / "model.ckpt-30")
    assert adopt_restore_dir(folder, model_dir, restore_ckpt="model.ckpt-30") == chosen
    assert (model_dir / "restore_ckpt").exists()
    state = get_checkpoint_state(model_dir, restore_ckpt="model.ckpt-30", training=True)
    assert state == CheckpointState(model_checkpoint_path=chosen, all_model_checkpoint_paths=(chosen,))
    exempt = get_monolith_checkpoint_state(model_dir)
    assert exempt == MonolithCheckpointState(exempt_model_checkpoint_paths=(chosen,))


def test_a_model_dir_with_an_index_adopts_nothing(folder: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    own = CheckpointState(model_checkpoint_path=str(model_dir / "model.ckpt-5"))
    write_checkpoint_state(model_dir, own)
    write_monolith_checkpoint_state(model_dir, MonolithCheckpointState(last_checkpoint_save_timestamp=7))
    assert adopt_restore_dir(folder, model_dir) is None
    assert start(model_dir) == "model.ckpt-5"
    assert get_monolith_checkpoint_state(model_dir) == MonolithCheckpointState(last_checkpoint_save_timestamp=7)


def test_a_restore_dir_that_was_removed_does_not_matter_to_a_model_dir_with_an_index(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_checkpoint_state(model_dir, CheckpointState(model_checkpoint_path=str(model_dir / "model.ckpt-5")))
    assert adopt_restore_dir(tmp_path / "removed", model_dir) is None
    assert start(model_dir) == "model.ckpt-5"
    # The file that other workers wait for, which a chief killed at the wrong moment has not written.
    assert get_monolith_checkpoint_state(model_dir) == MonolithCheckpointState()


def test_an_adoption_that_was_interrupted_is_completed_without_the_restore_dir(folder: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    (folder / "model.ckpt-61").mkdir()
    adopt_restore_dir(folder, model_dir)
    (model_dir / "monolith_checkpoint").unlink()
    assert adopt_restore_dir(tmp_path / "other", model_dir) is None
    state = get_monolith_checkpoint_state(model_dir)
    assert state == MonolithCheckpointState(exempt_model_checkpoint_paths=(str(folder / "model.ckpt-61"),))


def test_an_adopted_checkpoint_that_was_removed_makes_way_for_another(folder: Path, tmp_path: Path) -> None:
    model_dir, gone = tmp_path / "model", str(tmp_path / "gone" / "model.ckpt-7")
    write_checkpoint_state(model_dir, CheckpointState(model_checkpoint_path=gone))
    assert adopt_restore_dir(folder, model_dir) == str(folder / "model.ckpt-61")
    assert start(model_dir) == "model.ckpt-61"


def test_a_second_and_different_wish_is_ignored_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(folder, "model.ckpt-30", training=True)
    with caplog.at_level(logging.WARNING):
        assert start(folder, "/some/where/model.ckpt-30", training=True) == "model.ckpt-30"
        assert caplog.text == ""
        assert start(folder, "model.ckpt-0", training=True) == "model.ckpt-30"
    assert "restore_ckpt 'model.ckpt-0' is ignored" in caplog.text
    assert f"remove the file {folder}/restore_ckpt" in caplog.text


def test_what_was_exempt_stays_so(folder: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    old = MonolithCheckpointState(exempt_model_checkpoint_paths=("/x/model.ckpt-1",))
    write_monolith_checkpoint_state(model_dir, old)
    adopt_restore_dir(folder, model_dir)
    state = get_monolith_checkpoint_state(model_dir)
    assert state is not None
    assert [base_name(path) for path in state.exempt_model_checkpoint_paths] == ["model.ckpt-1", "model.ckpt-61"]


def test_a_wrong_restore_dir(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert adopt_restore_dir(tmp_path / "nothing", tmp_path / "model") is None
    assert f"restore_dir {tmp_path}/nothing has no checkpoint" in caplog.text
    assert read_checkpoint_state(tmp_path / "model") is None
    assert get_monolith_checkpoint_state(tmp_path / "model") is not None
    with caplog.at_level(logging.WARNING):
        chosen = adopt_restore_dir(folder, tmp_path / "model", restore_ckpt="model.ckpt-31")
    assert chosen == str(folder / "model.ckpt-61")
    assert "model.ckpt-31" in caplog.text
