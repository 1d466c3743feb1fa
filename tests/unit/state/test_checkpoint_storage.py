"""Danger: a file of a checkpoint that is half there, or a name from a file that leads somewhere else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from monolith import CorruptFileError, StorageError
from monolith.state.storage import Folder, LocalFolder, open_folder, safe_name
from monolith.urls import is_remote


class NoRename(MemoryFileSystem):
    """An object store: whole objects, no rename."""

    protocol = "norename"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    def mv(self, *_: object, **__: object) -> None:
        raise AssertionError("this store cannot rename")

    mv_file = rename = move = mv


fsspec.register_implementation("norename", NoRename, clobber=True)


@pytest.fixture(params=["disk", "memory", "norename"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    place = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}", "norename": f"norename://{tmp_path.name}"}
    return open_folder(f"{place[request.param]}/model.ckpt-1")


def test_what_is_written_is_read(folder: Folder) -> None:
    assert folder.names() == []
    folder.write("a.json", b"one")
    folder.write("tables/item/x.table", memoryview(b"rows"))
    assert folder.names() == ["a.json", "tables"]
    assert folder.read("a.json") == b"one"
    assert folder.size("tables/item/x.table") == 4
    assert folder.inside("tables/item").read("x.table") == b"rows"
    with folder.local("a.json") as path:
        assert path.read_bytes() == b"one"


def test_a_write_replaces_what_was_there(folder: Folder) -> None:
    folder.write("a", b"long old content")
    folder.write("a", b"new")
    assert folder.read("a") == b"new"
    assert folder.names() == ["a"]


def test_a_finished_file_is_moved_in(folder: Folder) -> None:
    with folder.scratch() as scratch:
        (scratch / "f").write_bytes(b"content")
        folder.put("tables/f.table", scratch / "f")
    assert folder.read("tables/f.table") == b"content"
    assert folder.names() == ["tables"]


def test_what_is_missing(folder: Folder) -> None:
    assert folder.size("a") is None
    folder.remove("a")
    with pytest.raises(StorageError, match=r"model.ckpt-1/a: cannot read"):
        folder.read("a")


def test_files_and_folders_are_removed(folder: Folder) -> None:
    folder.write("a/b/c", b"1")
    folder.write("d", b"2")
    folder.remove("a")
    assert folder.names() == ["d"]
    folder.remove("d")
    assert folder.names() == []


@pytest.mark.parametrize("name", ["../a", "a/../b", "/etc/passwd", "", "a//b", "./a", "a/", "..", "a\0b", "a\\b"])
def test_a_name_that_leads_out_is_refused(folder: Folder, name: str) -> None:
    actions: list[Callable[[], object]] = [
        lambda: folder.read(name),
        lambda: folder.write(name, b""),
        lambda: folder.size(name),
        lambda: folder.inside(name),
        lambda: folder.remove(name),
    ]
    for action in actions:
        with pytest.raises(CorruptFileError, match="stays inside"):
            action()
    with pytest.raises(CorruptFileError, match=r"manifest\.json: names"):
        safe_name(name, "manifest.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(tmp_path)
    folder.write("a", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        folder.write("a", b"new")
    assert folder.read("a") == b"old"
    assert folder.names() == ["a"]


def test_a_folder_whose_name_is_not_durable_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fail = [True]
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if fail.pop():
            raise OSError(errno.EIO, "no")
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError):
        LocalFolder(tmp_path / "new").make()
    fail[:] = [False] * 10
    LocalFolder(tmp_path / "new").make()
    assert synced == [str(tmp_path)]


def test_every_write_is_synced_before_it_gets_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append("file" if Path(f"/proc/self/fd/{descriptor}").is_file() else "folder")
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    LocalFolder(tmp_path).write("a", b"1")
    assert events == ["file", "rename", "folder"]


def test_urls_and_paths() -> None:
    assert [is_remote(path) for path in ("a:b", Path("x"), "./C:/x", "s3://b/x", "hdfs:/x")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert str(open_folder("file:///data/x")) == "/data/x"
