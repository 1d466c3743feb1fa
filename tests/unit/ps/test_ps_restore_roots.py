"""Danger: a client, or a forged manifest, makes a server or a trainer read or remove files elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import _core
from monolith.errors import CorruptFileError, InvalidArgumentError, MonolithError
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.state import (
    inspect_checkpoint,
    is_complete,
    read_manifest,
    remove_checkpoint,
    restore_tables,
    verify,
    write_checkpoint,
)
from monolith.state.paths import RESTORE_ROOTS, is_below, reading_below
from monolith.table import Bags, EmbeddingTable, Gradient
from monolith.testing import sgd_table_config

ITEM = sgd_table_config(1, name="item")


@contextmanager
def a_store(*folders: Path | None, roots: tuple[str, ...] = ()) -> Iterator[ServerStore]:
    servers = [ParameterServer(ServerConfig(folder=folder, restore_roots=roots)) for folder in folders]
    try:
        with ServerStore([server.address for server in servers], [ITEM]) as store:
            yield store
    finally:
        for server in servers:
            server.close()


def train(store: ServerStore) -> None:
    ids = np.arange(20)
    bags = Bags(table="item", ids=ids, offsets=np.arange(21))
    store.apply([Gradient(bags=bags, values=torch.ones(20, 1))])


def forge_parts(checkpoint: Path, name: str) -> None:
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    for part in manifest["parts"]:
        part["name"] = name
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    path.write_bytes(body + b',"checksum":%d}\n' % _core.crc32c(body))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint of one server in its model_dir, and outside of it another run, whose files must not be touched."""
    for place in ("run", "other"):
        with a_store(tmp_path / place / "ps" / "0") as store:
            train(store)
            store.save(tmp_path / place / "model.ckpt-1")
    return tmp_path / "run"


FORGERIES = {
    "another run": "{other}",
    "through the parent": "{run}/../other/ps/0/{part}",
    "a relative name": "../other/ps/0/{part}",
    "a system file": "/etc/passwd",
    "a bucket": "s3://bucket/part/manifest.json",
    "a host": "http://169.254.169.254/latest/manifest.json",
    "another store": "memory://other/part/manifest.json",
    "a file URL": "file://{other}",
    "a slip": "s3:/bucket/part/manifest.json",
}


@pytest.mark.parametrize("what", FORGERIES)
def test_parts_of_a_manifest_stay_below_the_model_dir(run: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, other = run / "model.ckpt-1", run.parent / "other"
    (part,) = (other / "ps" / "0").glob("model.ckpt-1*")
    shutil.copytree(part, run / "ps" / "0" / f"{part.name}-copy")
    before = sorted(other.rglob("*"))
    name = FORGERIES[what].format(run=run, other=f"{part}/manifest.json", part=f"{part.name}/manifest.json")
    forge_parts(checkpoint, name)
    opened: list[str] = []
    real = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        opened.append(str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert not is_complete(checkpoint)
    with pytest.raises(CorruptFileError, match="names a part"):
        restore_tables(checkpoint, [EmbeddingTable(ITEM)])
    assert "names a part" in str(inspect_checkpoint(checkpoint).problem)
    assert any("names a part" in problem.error for problem in verify(run).problems)
    with a_store(run / "ps" / "1") as store, pytest.raises(CorruptFileError, match="names a part"):
        store.restore(checkpoint)
    remove_checkpoint(checkpoint)
    assert sorted(other.rglob("*")) == before, "a forged manifest removed what it names"
    assert not [path for path in opened if path.startswith(str(other))]


def test_parts_elsewhere_need_a_list_of_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    with a_store(disk / "0", roots=(str(tmp_path),)) as store:
        train(store)
        with pytest.raises(InvalidArgumentError, match=rf"keeps its folder outside of the model_dir.*{RESTORE_ROOTS}"):
            store.save(run / "model.ckpt-1")
        with reading_below(disk):
            store.save(run / "model.ckpt-2")
        (part,) = read_manifest(run / "model.ckpt-2").parts
        assert part.name.startswith(str(disk))
        store.restore(run / "model.ckpt-2")
    with pytest.raises(CorruptFileError, match=f"{RESTORE_ROOTS}={disk}"):
        restore_tables(run / "model.ckpt-2", [EmbeddingTable(ITEM)])
    monkeypatch.setenv(RESTORE_ROOTS, f" /nowhere , {disk}")
    table = EmbeddingTable(ITEM)
    restore_tables(run / "model.ckpt-2", [table])
    assert len(table) == 20


@pytest.mark.parametrize(
    "path",
    [
        "{other}/model.ckpt-1",
        "{run}/../other/model.ckpt-1",
        "{run}/link/model.ckpt-1",
        "/",
        "memory://x/y",
    ],
)
def test_a_client_cannot_make_a_server_read_elsewhere(run: Path, path: str) -> None:
    other = run.parent / "other"
    (run / "link").symlink_to(other)
    with a_store(run / "ps" / "1") as store:
        train(store)
        with pytest.raises(MonolithError, match=r"start it with --restore-root|absolute path without"):
            store.restore(path.format(run=run, other=other))
        store.restore(run / "model.ckpt-1")
    with a_store(run / "ps" / "2", roots=(str(other),)) as store:
        store.restore(other / "model.ckpt-1")


def test_a_server_without_a_folder_restores_below_its_roots_alone(run: Path) -> None:
    with a_store(None) as store, pytest.raises(InvalidArgumentError, match="not below any folder of the server"):
        store.restore(run / "model.ckpt-1")
    with a_store(None, roots=(str(run),)) as store:
        store.restore(run / "model.ckpt-1")
        assert store.stats()["item"].rows == 20


def test_a_url_below_a_root_is_allowed() -> None:
    write_checkpoint("memory://roots/run/model.ckpt-1", state={}, step=1, tables=[EmbeddingTable(ITEM)])
    with a_store(None, roots=("memory://roots/run",)) as store:
        store.restore("memory://roots/run/model.ckpt-1")
        with pytest.raises(InvalidArgumentError, match="--restore-root"):
            store.restore("memory://roots/run-2/model.ckpt-1")


def test_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    assert is_below(tmp_path / "a", [tmp_path])
    assert is_below(tmp_path, ["/nowhere", tmp_path])
    assert not is_below(f"{tmp_path}-2", [tmp_path])
    assert not is_below(tmp_path / "link" / "passwd", [tmp_path])
    assert not is_below("s3://bucket/run/../other", ["s3://bucket/run"])
    assert not is_below("s3://bucket/run", [tmp_path])
