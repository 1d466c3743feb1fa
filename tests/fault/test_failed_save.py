"""Danger: a save that fails half-way and takes the previous file with it. The target must stay the old file, whole,
and no temporary file may be left to fill the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comparison import int64, snapshot
from monolith import EmbeddingTable
from monolith.errors import StorageError
from monolith.testing import sgd_table_config


def table_of(rows: int) -> EmbeddingTable:
    table = EmbeddingTable(sgd_table_config(16))
    table.assign(torch.arange(rows), torch.ones(rows, 16))
    return table


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("needs root to mount a small file system")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    small, large = table_of(100), table_of(100_000)
    small.save(small_disk / "t")
    before = (small_disk / "t").read_bytes()
    with pytest.raises(StorageError, match="No space left"):
        large.save(small_disk / "t")
    assert (small_disk / "t").read_bytes() == before
    assert [path.name for path in small_disk.iterdir()] == ["t"]
    assert snapshot(EmbeddingTable.load(small_disk / "t")) == snapshot(small)
    assert len(large) == 100_000
    # The disk has room again: the same table saves.
    small.save(small_disk / "u")


# Writes fail after a given number of bytes, as on a full disk, but without root: Python ignores SIGXFSZ, so that write()
# returns EFBIG.
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from monolith import EmbeddingTable
from monolith.errors import StorageError
from monolith.testing import sgd_table_config

path = Path(sys.argv[1])
small, large = EmbeddingTable(sgd_table_config(16)), EmbeddingTable(sgd_table_config(16))
small.assign(torch.arange(10), torch.ones(10, 16))
large.assign(torch.arange(20_000), torch.ones(20_000, 16))
size = large.save(path)
small.save(path)
before = path.read_bytes()
failed = 0
for limit in [0, 1, 23, 24, 25, 100, 1000, size // 2, size - 40, size - 4, size - 1]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        large.save(path)
    except StorageError as error:
        assert str(path) in str(error), error
        failed += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert path.read_bytes() == before, limit
    assert [p.name for p in path.parent.iterdir()] == [path.name], limit
assert failed == 11, failed
large.save(path)
assert len(EmbeddingTable.load(path)) == 20_000
"""


def test_a_write_that_fails_at_any_point(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "t")], check=True, timeout=300)


@pytest.mark.parametrize("target", ["missing/t", "file/t", "folder"])
def test_a_target_that_cannot_be_written(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_bytes(b"kept")
    table = table_of(10)
    with pytest.raises(StorageError, match=str(tmp_path)):
        table.save(tmp_path / target)
    assert (tmp_path / "file").read_bytes() == b"kept"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["inside"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    table = table_of(10)
    table.save(tmp_path / "t")
    before = (tmp_path / "t").read_bytes()
    tmp_path.chmod(0o555)
    try:
        table.assign(int64([99]), torch.ones(1, 16))
        with pytest.raises(StorageError, match="Permission denied"):
            table.save(tmp_path / "t")
        assert (tmp_path / "t").read_bytes() == before
    finally:
        tmp_path.chmod(0o755)


KILLED = """
import os, signal, sys, threading
import torch
from monolith import EmbeddingTable
from monolith.testing import sgd_table_config

table = EmbeddingTable(sgd_table_config(64))
table.assign(torch.arange(200_000), torch.full((200_000, 64), float(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
while True:
    table.save(sys.argv[1])
"""


def test_a_process_killed_while_saving_leaves_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    old = table_of(10)
    old.save(path)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("go\n")
        child.stdin.flush()
        # Kill it once the temporary file has grown: in the middle of a save, whatever the machine's speed. The deadline
        # only ends a test that would wait for ever.
        deadline = time.monotonic() + 120
        while not any(size >= 16 << 20 for size in _temporary_sizes(tmp_path)):
            assert child.poll() is None
            assert time.monotonic() < deadline, "no temporary file appeared"
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert len(EmbeddingTable.load(path)) in (10, 200_000)


def _temporary_sizes(folder: Path) -> list[int]:
    sizes = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            sizes.append(path.stat().st_size if path.name != "t" else 0)
    return sizes
