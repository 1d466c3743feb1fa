"""Danger: a checkpoint under another name than asked for, or one that cannot be found after its folder was moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original import PartialRecoverySaver
from monolith.state.index import read_checkpoint_state
from monolith.table import LocalStore


def value_saver(value: float = 0.0, **options: bool) -> tuple[torch.Tensor, PartialRecoverySaver]:
    v = torch.tensor([value])
    return v, PartialRecoverySaver({"v": v}, **options)  # type: ignore[arg-type]


def restored(path: str | Path) -> float:
    v, saver = value_saver()
    saver.restore(path)
    return v.item()


@pytest.mark.parametrize(("padded", "name"), [(False, "ckpt-5"), (True, "ckpt-00000005")])
def test_the_step_is_part_of_the_name(tmp_path: Path, padded: bool, name: str) -> None:
    _, saver = value_saver(7.0, pad_step_number=padded)
    assert saver.save(tmp_path / "ckpt", global_step=5) == str(tmp_path / name)
    assert restored(tmp_path / name) == 7.0
    state = read_checkpoint_state(tmp_path)
    assert state is not None
    assert state.model_checkpoint_path == str(tmp_path / name)
    assert saver.save(tmp_path / "first", global_step=0) == str(tmp_path / ("first-00000000" if padded else "first-0"))
    with pytest.raises(InvalidArgumentError, match="global_step"):
        saver.save(tmp_path / "ckpt", global_step=-1)


def test_folders_that_do_not_exist_are_made(tmp_path: Path) -> None:
    _, saver = value_saver(3.0)
    path = saver.save(tmp_path / "a" / "b" / "ckpt")
    assert restored(str(path)) == 3.0


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    _, saver = value_saver()
    with pytest.raises(InvalidArgumentError, match=r"parent directory .* is a file"):
        saver.save(tmp_path / "a" / "ckpt")


@pytest.mark.parametrize("wrong", ["", "/", "folder/", ".."])
def test_a_path_without_a_name(wrong: str) -> None:
    _, saver = value_saver()
    with pytest.raises(InvalidArgumentError, match="save_path"):
        saver.save(wrong)


@pytest.mark.parametrize(
    "name", ["checkpoint", "monolith_checkpoint", "restore_ckpt", "checkpoint_input_worker_1", "ckpt.info"]
)
def test_a_name_that_is_taken_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=1),)))
    saver = PartialRecoverySaver({"v": torch.ones(1), "store": LocalStore([table])})
    step = 3 if name == "ckpt.info" else None
    with pytest.raises(InvalidArgumentError, match="name of another file in a folder of checkpoints"):
        saver.save(tmp_path / "run" / name, step, latest_filename="checkpoint_input_worker_1")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "ckpt-3").write_text("a file")
    _, saver = value_saver()
    with pytest.raises(InvalidArgumentError, match="is a file"):
        saver.save(tmp_path / "ckpt", global_step=3)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-3"]


@pytest.mark.parametrize("wrong", ["", "a/b", ".."])
def test_a_wrong_name_for_the_index(tmp_path: Path, wrong: str) -> None:
    _, saver = value_saver()
    with pytest.raises(InvalidArgumentError, match="latest_filename"):
        saver.save(tmp_path / "ckpt", latest_filename=wrong)


def test_urls() -> None:
    _, saver = value_saver(4.0)
    path = saver.save("memory://saver/runs/ckpt", global_step=1)
    assert path == "memory://saver/runs/ckpt-1"
    assert restored(path) == 4.0
    state = read_checkpoint_state("memory://saver/runs")
    assert state is not None
    assert state.model_checkpoint_path == path


def test_a_file_url(tmp_path: Path) -> None:
    _, saver = value_saver(4.0)
    path = saver.save(f"file://{tmp_path}/ckpt")
    assert path is not None
    assert restored(path) == restored(tmp_path / "ckpt") == 4.0


@pytest.mark.parametrize("name", ["nothing", "checkpoint"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoint").write_text("model_checkpoint_path: 'nothing'")
    v, saver = value_saver(1.0)
    with pytest.raises(InvalidArgumentError, match="is not a valid checkpoint"):
        saver.restore(tmp_path / name)
    assert v.item() == 1.0


def test_a_checkpoint_with_a_file_missing_or_altered_is_refused(tmp_path: Path) -> None:
    _, saver = value_saver(1.0)
    path = Path(str(saver.save(tmp_path / "ckpt")))
    tensors = next(path.glob("*.safetensors"))
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptFileError, match="checksum"):
        restored(path)
    tensors.unlink()
    with pytest.raises(InvalidArgumentError, match="not a valid checkpoint"):
        restored(path)


def test_a_moved_folder_with_relative_names_works(tmp_path: Path) -> None:
    _, saver = value_saver(5.0)
    saver.save(tmp_path / "a" / "ckpt", global_step=1)
    (tmp_path / "a").rename(tmp_path / "b")
    state = read_checkpoint_state(tmp_path / "b")
    assert state is not None
    assert restored(state.model_checkpoint_path) == 5.0


def test_absolute_names_when_told(tmp_path: Path) -> None:
    _, saver = value_saver(save_relative_paths=False)
    saver.save(tmp_path / "ckpt")
    assert f'"{tmp_path}/ckpt"' in (tmp_path / "checkpoint").read_text()


def test_an_index_of_another_name(tmp_path: Path) -> None:
    _, saver = value_saver()
    saver.save(tmp_path / "ckpt", latest_filename="checkpoint_input_worker_1")
    assert read_checkpoint_state(tmp_path) is None
    assert read_checkpoint_state(tmp_path, "checkpoint_input_worker_1") is not None
