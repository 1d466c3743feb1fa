"""Danger: a copy of a checkpoint with a file missing, half written, or mixed with what was there before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from monolith.errors import InvalidArgumentError, StorageError
from monolith.original.copy_files import copy_file, copy_recursively


def make_tree(root: Path) -> dict[str, bytes]:
    files = {f"d{i}/e{j}/f{k}": f"{i}{j}{k}".encode() * 9 for i in range(3) for j in range(2) for k in range(2)}
    files["top"] = b""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "empty").mkdir()
    return files


def found(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


@pytest.mark.parametrize("max_workers", [1, 2])
def test_a_tree_in_place_of_what_was_there(tmp_path: Path, max_workers: int) -> None:
    files = make_tree(tmp_path / "a")
    (tmp_path / "b" / "old").mkdir(parents=True)
    (tmp_path / "b" / "old" / "file").write_text("goes")
    assert copy_recursively(tmp_path / "a", tmp_path / "b", max_workers=max_workers) == len(files)
    assert found(tmp_path / "b") == files
    assert (tmp_path / "b" / "empty").is_dir()


@pytest.mark.usefixtures("memory")
def test_between_stores(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "a")
    copy_recursively(tmp_path / "a", "memory://there/model", max_workers=4)
    copy_recursively("memory://there/model", tmp_path / "back", max_workers=4)
    assert found(tmp_path / "back") == files


def test_files_are_copied_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path / "a")
    together = threading.Barrier(3)
    plain_open = LocalFileSystem.open

    def meet(self: LocalFileSystem, path: str, mode: str = "rb", **rest: Any) -> Any:  # noqa: ANN401
        if mode == "rb" and "d0" in path and "e0" in path:
            together.wait(60)
        return plain_open(self, path, mode, **rest)

    monkeypatch.setattr(LocalFileSystem, "open", meet)
    (tmp_path / "a" / "d0" / "e0" / "f2").write_text("third")
    assert copy_recursively(tmp_path / "a" / "d0" / "e0", tmp_path / "b" / "d0" / "e0", max_workers=3) == 3


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert copy_recursively(tmp_path / "a", tmp_path / "b") == 0
    assert (tmp_path / "b").is_dir()
    with pytest.raises(InvalidArgumentError, match="not a folder"):
        copy_recursively(tmp_path / "a", tmp_path / "b", skip_nonexist=False)
    assert copy_file(tmp_path / "a", tmp_path / "c") is False
    with pytest.raises(InvalidArgumentError, match="no file"):
        copy_file(tmp_path / "a", tmp_path / "c", skip_nonexist=False)


@pytest.mark.parametrize("target", ["a", "a/d0", ".", "..", "./b/../a", "a/", "link", "link/d0", "up"])
def test_a_folder_is_not_copied_into_itself_nor_onto_what_holds_it(tmp_path: Path, target: str) -> None:
    top = tmp_path / "top"
    files = make_tree(top / "a")
    (top / "b").mkdir()
    (top / "link").symlink_to(top / "a")
    (top / "up").symlink_to(tmp_path)
    for source in (top / "a", top / "link"):
        with pytest.raises(InvalidArgumentError, match=r"dst: .* (is inside of,|contains) src"):
            copy_recursively(source, f"{top}/{target}")
        with pytest.raises(InvalidArgumentError, match="dst"):
            copy_recursively(f"file://{source}", f"{top}/{target}")
    assert found(top / "a") == files


@pytest.mark.parametrize("target", ["memory://x/a", "memory://x/a/d0", "memory://x", "memory://"])
def test_nor_on_another_store(memory: fsspec.AbstractFileSystem, tmp_path: Path, target: str) -> None:
    make_tree(tmp_path / "a")
    copy_recursively(tmp_path / "a", "memory://x/a")
    before = dict(memory.store)
    with pytest.raises(InvalidArgumentError, match="dst"):
        copy_recursively("memory://x/a", target)
    assert memory.store == before


def test_names_that_only_begin_alike_are_apart(tmp_path: Path) -> None:
    files = make_tree(tmp_path / "model")
    assert copy_recursively(tmp_path / "model", tmp_path / "model-2") == len(files)
    assert copy_recursively(tmp_path / "model-2", tmp_path / "model") == len(files)


def test_a_file_is_not_copied_onto_itself(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("data")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    for name in ("a", "link", "hard"):
        with pytest.raises(InvalidArgumentError, match="would empty it"):
            copy_file(tmp_path / "a", tmp_path / name)
    assert (tmp_path / "a").read_text() == "data"


def test_a_file_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    with pytest.raises(InvalidArgumentError, match="exists"):
        copy_file(tmp_path / "a", tmp_path / "b", overwrite=False)
    assert copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "new"


def test_a_failed_copy_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("data")
    failures = [2]
    plain_open = LocalFileSystem.open

    def flaky(self: LocalFileSystem, path: str, mode: str = "rb", **rest: Any) -> Any:  # noqa: ANN401
        if mode == "wb" and failures[0]:
            failures[0] -= 1
            raise OSError("the network is down")
        return plain_open(self, path, mode, **rest)

    monkeypatch.setattr(LocalFileSystem, "open", flaky)
    sleeps: list[float] = []
    assert copy_file(tmp_path / "a", tmp_path / "b", sleep=sleeps.append)
    assert (tmp_path / "b").read_text() == "data"
    assert sleeps == [0.1, 0.2]
    failures[0] = 9
    with pytest.raises(StorageError, match=r"tried 3 times.*network"):
        copy_file(tmp_path / "a", tmp_path / "b", max_retries=2, sleep=sleeps.append)
