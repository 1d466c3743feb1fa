"""Danger: an index that names another checkpoint than the newest, cannot be moved, or is not the text the original reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original.checkpoint_state import SaveHelper, get_latest_checkpoint_state
from monolith.state.index import (
    CheckpointState,
    MonolithCheckpointState,
    get_monolith_checkpoint_state,
    read_checkpoint_info,
    read_checkpoint_state,
    write_checkpoint_info,
    write_checkpoint_state,
    write_monolith_checkpoint_state,
)
from monolith.state.paths import is_absolute

ORIGINAL_INDEX = """model_checkpoint_path: "model.ckpt-61"
all_model_checkpoint_paths: "model.ckpt-0"
all_model_checkpoint_paths: "hdfs:/haruna/model.ckpt-30"
all_model_checkpoint_paths: "model.ckpt-61"
all_model_checkpoint_timestamps: 1.0
last_preserved_timestamp: 2.5
"""


def write_index(folder: Path, *steps: int) -> None:
    paths = [str(folder / f"model.ckpt-{step}") for step in steps]
    state = CheckpointState(model_checkpoint_path=paths[-1], all_model_checkpoint_paths=tuple(paths))
    write_checkpoint_state(folder, state)


def test_the_originals_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text(ORIGINAL_INDEX)
    state = read_checkpoint_state(tmp_path)
    assert state is not None
    assert state.model_checkpoint_path == str(tmp_path / "model.ckpt-61")
    assert state.all_model_checkpoint_paths == (
        str(tmp_path / "model.ckpt-0"),
        "hdfs:/haruna/model.ckpt-30",
        str(tmp_path / "model.ckpt-61"),
    )
    assert state.last_preserved_timestamp == 2.5


def test_the_text_that_is_written(tmp_path: Path) -> None:
    inside, outside = str(tmp_path / "model.ckpt-2"), "/elsewhere/model.ckpt-1"
    state = CheckpointState(
        model_checkpoint_path=inside,
        all_model_checkpoint_paths=(outside, inside),
        all_model_checkpoint_timestamps=(1.0, 2.0),
    )
    write_checkpoint_state(tmp_path, state)
    assert (tmp_path / "checkpoint").read_text() == (
        'model_checkpoint_path: "model.ckpt-2"\n'
        'all_model_checkpoint_paths: "/elsewhere/model.ckpt-1"\n'
        'all_model_checkpoint_paths: "model.ckpt-2"\n'
        "all_model_checkpoint_timestamps: 1.0\n"
        "all_model_checkpoint_timestamps: 2.0\n"
    )
    assert read_checkpoint_state(tmp_path) == state
    write_checkpoint_state(tmp_path, state, relative=False)
    assert f'model_checkpoint_path: "{inside}"' in (tmp_path / "checkpoint").read_text()


def test_a_moved_folder_keeps_its_names(tmp_path: Path) -> None:
    write_index(tmp_path / "a", 1, 2)
    (tmp_path / "a").rename(tmp_path / "b")
    state = read_checkpoint_state(tmp_path / "b")
    assert state is not None
    assert state.model_checkpoint_path == str(tmp_path / "b" / "model.ckpt-2")


def test_no_index_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    assert read_checkpoint_state(tmp_path) is None
    for text in (b"model_checkpoint_path 3", b"\xff\xfe", b"", b'model_checkpoint_path: "../../etc"'):
        (tmp_path / "checkpoint").write_bytes(text)
        with pytest.raises(CorruptFileError, match="checkpoint"):
            read_checkpoint_state(tmp_path)


def test_existing_steps(tmp_path: Path) -> None:
    helper = SaveHelper(tmp_path / "model.ckpt")
    assert helper.get_existing_checkpoint_steps() == set()
    write_index(tmp_path, 10, 20, 300)
    assert helper.get_existing_checkpoint_steps() == {10, 20, 300}


def test_names_of_checkpoints_are_those_of_the_original() -> None:
    helper = SaveHelper("/runs/ctr/model.ckpt")
    assert helper.get_ckpt_prefix(30) == "/runs/ctr/model.ckpt-30"
    assert helper.get_ckpt_asset_dir("/runs/ctr/model.ckpt-30") == "/runs/ctr/model.ckpt-30.assets/"
    assert SaveHelper.get_global_step_value(helper.get_ckpt_prefix(30)) == 30


def test_names_without_a_step_have_none(tmp_path: Path) -> None:
    paths = tuple(f"{tmp_path}/{name}" for name in ("model.ckpt", "run-7/model.ckpt", "model.ckpt-20"))
    write_checkpoint_state(tmp_path, CheckpointState(model_checkpoint_path=paths[0], all_model_checkpoint_paths=paths))
    assert SaveHelper(tmp_path / "model.ckpt").get_existing_checkpoint_steps() == {20}
    with pytest.raises(InvalidArgumentError, match="expected a name that ends"):
        SaveHelper.get_global_step_value("/runs/ctr-7/model.ckpt")


def test_a_name_without_a_step_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'model\.ckpt'"):
        SaveHelper.get_global_step_value("model.ckpt")


def test_the_latest_state_is_read_again_only_for_a_larger_step(tmp_path: Path) -> None:
    def latest(step: int) -> str | None:
        state = get_latest_checkpoint_state(tmp_path, step)
        return None if state is None else state.model_checkpoint_path[-2:]

    assert latest(0) is None
    write_index(tmp_path, 1)
    assert latest(0) == "-1"  # there was none: it is asked for again
    write_index(tmp_path, 1, 2)
    assert latest(0) == "-1"
    assert latest(1) == "-2"
    write_index(tmp_path, 1, 2, 3)
    assert latest(1) == "-2"


def test_exempt_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "monolith_checkpoint").write_text(
        'exempt_model_checkpoint_paths: "model.ckpt-10"\n'
        f'exempt_model_checkpoint_paths: "{tmp_path}/model.ckpt-20"\n'
        "last_checkpoint_save_timestamp: 1700000000\n"
        "builtin_hash_table_type: CUCKOO_HASH_MAP\n"
    )
    (tmp_path / "model.ckpt-20").mkdir()
    ten, twenty = str(tmp_path / "model.ckpt-10"), str(tmp_path / "model.ckpt-20")
    state = get_monolith_checkpoint_state(tmp_path)
    assert state == MonolithCheckpointState(
        exempt_model_checkpoint_paths=(ten, twenty),
        last_checkpoint_save_timestamp=1700000000,
        builtin_hash_table_type="CUCKOO_HASH_MAP",
    )
    with caplog.at_level(logging.WARNING):
        valid = get_monolith_checkpoint_state(tmp_path, remove_invalid_path=True)
    assert valid is not None
    assert valid.exempt_model_checkpoint_paths == (twenty,)
    assert "model.ckpt-10" in caplog.text
    write_monolith_checkpoint_state(tmp_path, valid)
    assert get_monolith_checkpoint_state(tmp_path) == valid
    assert '"model.ckpt-20"' in (tmp_path / "monolith_checkpoint").read_text()


@pytest.mark.parametrize("text", [None, b"nonsense", b'exempt_model_checkpoint_paths: "../x"'])
def test_an_unreadable_monolith_checkpoint_is_none(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "monolith_checkpoint").write_bytes(text)
    assert get_monolith_checkpoint_state(tmp_path) is None


def test_counts_of_rows(tmp_path: Path) -> None:
    assert read_checkpoint_info(tmp_path, 3) is None
    write_checkpoint_info(tmp_path, 3, feature_counts={"user": 5, "0/item": 7}, slot_counts={12: 5})
    assert read_checkpoint_info(tmp_path, 3) == ({"user": 5, "0/item": 7}, {12: 5})
    assert "slot_counts" in (tmp_path / "ckpt.info-3").read_text()


@pytest.mark.parametrize(
    ("path", "absolute"),
    [("hdfs:/a", True), ("s3://b/c", True), ("/a", True), ("model.ckpt-1", False), ("a/b", False), ("a:b", False)],
)
def test_absolute_paths(path: str, absolute: bool) -> None:
    assert is_absolute(path) == absolute
