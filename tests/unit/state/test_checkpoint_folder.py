"""Danger: a checkpoint that is unfinished, half copied or altered is loaded, or a finished one is lost while it is replaced."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from checkpoint_tables import files_below, new_table, train
from monolith import CorruptFileError, InvalidArgumentError, StorageError
from monolith.log import ChangeLog
from monolith.state import (
    begin_checkpoint,
    is_complete,
    read_manifest,
    read_state,
    remove_checkpoint,
    remove_unfinished,
    restore_tables,
    write_checkpoint,
)
from monolith.state.locks import in_use
from monolith.state.storage import LocalFolder, RemoteFolder
from monolith.testing import bit_flips, truncations

STATE = {
    "model": {"w": torch.arange(3.0)},
    "source": {"file": 2, "rows": [1, None]},
    "generator": torch.get_rng_state(),
}


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/model.ckpt-5" if request.param == "disk" else f"memory://{tmp_path.name}/model.ckpt-5"


def test_a_checkpoint_comes_back(path: str) -> None:
    assert not is_complete(path)
    manifest = write_checkpoint(path, state=STATE, step=5, event_time=9, config={"clip_norm": 0.5}, time=100.0)
    assert is_complete(path)
    assert read_manifest(path) == manifest
    assert (manifest.step, manifest.time, manifest.event_time, manifest.config) == (5, 100.0, 9, {"clip_norm": 0.5})
    found = read_state(path)
    assert found["source"] == STATE["source"]
    assert torch.equal(found["model"]["w"], torch.arange(3.0))  # type: ignore[index, call-overload]
    assert torch.equal(found["generator"], STATE["generator"])  # type: ignore[arg-type]


def test_parts_are_read_by_name(path: str) -> None:
    write_checkpoint(path, state={}, step=5, parts={"state-00000-of-00002": {"a": 1}, "other": {"b": 2}})
    assert read_state(path, "state-00000-of-00002") == {"a": 1}
    assert read_state(path, "other") == {"b": 2}
    with pytest.raises(CorruptFileError, match="has no state 'third'; it has 'state', 'state-00000-of-00002', 'other'"):
        read_state(path, "third")
    with pytest.raises(InvalidArgumentError, match=r"got '\.\./x'"):
        write_checkpoint(path, state={}, step=5, parts={"../x": {}})


def test_what_is_saved_is_the_state_of_the_beginning(path: str) -> None:
    weights = torch.ones(2)
    pending = begin_checkpoint(path, state={"w": weights}, step=5)
    weights.zero_()
    assert not is_complete(path)
    pending.finish()
    assert read_state(path)["w"].tolist() == [1.0, 1.0]  # type: ignore[attr-defined]


def test_saving_again_replaces_it_and_leaves_nothing_behind(path: str, tmp_path: Path) -> None:
    for number in range(3):
        write_checkpoint(path, state={"n": number}, step=5, parts={} if number else {"gone": {}})
        assert read_state(path) == {"n": number}
    folder = LocalFolder(path) if path.startswith("/") else RemoteFolder(path)
    assert len(folder.names()) == 3


def test_files_that_somebody_reads_stay_until_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-5"
    write_checkpoint(path, state={"n": 1}, step=5)
    with in_use(path):
        write_checkpoint(path, state={"n": 2}, step=5)
        assert (path / "state.json").is_file()
        assert len(files_below(path)) == 5
    assert read_state(path) == {"n": 2}
    write_checkpoint(path, state={"n": 3}, step=5)
    assert len(files_below(path)) == 3


def test_a_failed_replacement_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.ckpt-5"
    write_checkpoint(path, state={"n": 1}, step=5)
    real = LocalFolder.write
    for failing in ("state", "manifest"):

        def write(self: LocalFolder, name: str, data: bytes, failing: str = failing) -> None:
            if name.startswith(failing):
                raise StorageError("no space")
            real(self, name, data)

        with monkeypatch.context() as patch:
            patch.setattr(LocalFolder, "write", write)
            with pytest.raises(StorageError, match="no space"):
                write_checkpoint(path, state={"n": 2}, step=5)
        assert is_complete(path)
        assert read_state(path) == {"n": 1}
        assert len(files_below(path)) == 3


def test_an_unfinished_one_is_not_loaded_and_the_next_save_cleans_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, path = tmp_path / "model.ckpt-5", tmp_path / "model.ckpt-6"
    # As a killed process leaves it: files, the mark, no manifest, and nobody who holds the lock.
    write_checkpoint(dead, state=STATE, step=5)
    (dead / "manifest.json").unlink()
    (dead / ".writing").touch()
    assert not is_complete(dead)
    with pytest.raises(CorruptFileError, match="did not finish"):
        read_state(dead)
    write_checkpoint(path, state={}, step=6)
    assert not dead.exists()
    assert is_complete(path)


def test_one_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    table = new_table()
    train(table, range(5))
    # Without a log the rows are written at the beginning.
    pending = begin_checkpoint(tmp_path / "model.ckpt-5", state={"n": 1}, step=5, tables=[table])
    write_checkpoint(tmp_path / "model.ckpt-6", state={}, step=6)
    assert remove_unfinished(tmp_path) == []
    with pytest.raises(StorageError, match="another process or thread is writing it"):
        write_checkpoint(tmp_path / "model.ckpt-5", state={}, step=5)
    pending.finish()
    assert read_state(tmp_path / "model.ckpt-5") == {"n": 1}
    restore_tables(tmp_path / "model.ckpt-5", [new_table()])


def test_of_two_under_one_name_the_one_that_finished_last_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-5"
    first, second = (begin_checkpoint(path, state={"n": number}, step=5) for number in (1, 2))
    second.finish()
    first.finish()
    assert read_state(path) == {"n": 1}
    assert len(files_below(path)) == 3


def test_beginning_touches_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens between two steps of training, and a sync may take as long as many steps."""
    table = new_table()
    with ChangeLog(tmp_path / "log", [table]) as log:
        train(table, range(5))
        thread, synced = threading.get_ident(), []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            synced.append(threading.get_ident())
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        pending = begin_checkpoint(tmp_path / "model.ckpt-5", state={}, step=5, tables=[table], log=log)
        assert thread not in synced
        pending.finish()
        assert thread in synced


def test_folders_of_other_people_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "model.ckpt-copied").mkdir()  # half copied, perhaps still under way
    write_checkpoint(tmp_path / "model.ckpt-6", state={}, step=6)
    assert (tmp_path / "notes" / "a.txt").is_file()
    assert (tmp_path / "model.ckpt-copied").is_dir()


def test_an_abandoned_one_leaves_nothing(tmp_path: Path) -> None:
    begin_checkpoint(tmp_path / "model.ckpt-5", state={}, step=5).abandon()
    assert list(tmp_path.iterdir()) == []


def test_every_half_copy_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "a" / "model.ckpt-5"
    write_checkpoint(whole, state=STATE, step=5, parts={"more": {"b": 2}})
    for missing in files_below(whole):
        copy = tmp_path / "b" / "model.ckpt-5"
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(whole, copy)
        (copy / missing.relative_to(whole)).unlink()
        assert not is_complete(copy), missing
    shutil.copytree(whole, tmp_path / "c" / "elsewhere")
    assert is_complete(tmp_path / "c" / "elsewhere"), "a whole copy is a checkpoint, wherever it is"


def test_every_altered_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-5"
    write_checkpoint(path, state={"w": torch.ones(2), "n": 3}, step=5)
    for file in files_below(path):
        data = file.read_bytes()
        for what, damaged in (*bit_flips(data, count=80), *truncations(data, count=20)):
            file.write_bytes(damaged)
            with pytest.raises(CorruptFileError):
                pytest.fail(f"{file.name}, {what}: read {read_state(path)}")
        file.write_bytes(data)
    assert read_state(path)["n"] == 3


def test_files_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "model.ckpt-1", tmp_path / "model.ckpt-2"
    for path, value in ((one, 1.0), (two, 2.0)):
        write_checkpoint(path, state={"w": torch.tensor([value])}, step=1)
    shutil.copy(one / "state.safetensors", two / "state.safetensors")
    with pytest.raises(CorruptFileError, match=r"model.ckpt-2/state\.safetensors: its checksum is wrong"):
        read_state(two)


def test_every_name_on_the_way_is_durable_when_saving_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of folders that are there already: who made them may have died before they were synced."""
    path = tmp_path / "run" / "model.ckpt-5"
    path.parent.mkdir()
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append(f"rename {target}")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_checkpoint(path, state={}, step=5)
    after = events[events.index(f"rename {path / 'manifest.json'}") :]
    assert {str(path), str(path.parent), str(tmp_path)} <= set(after)


def test_removing(path: str) -> None:
    write_checkpoint(path, state={}, step=5)
    remove_checkpoint(path)
    assert not is_complete(path)
    remove_checkpoint(path)


def test_the_manifest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.ckpt-5"
    write_checkpoint(path, state={}, step=5)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(path)
    assert (path / "state.json").is_file()
    assert not is_complete(path)
