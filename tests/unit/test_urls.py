"""Danger: a typo in a URL turns it into a folder on the local disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from monolith import EmbeddingTable
from monolith.cli import main
from monolith.data import Column, CsvSource
from monolith.errors import ConfigError, InvalidArgumentError, MonolithError
from monolith.log import ChangeLog, LogReader
from monolith.original import copy_recursively
from monolith.ps import ServerConfig
from monolith.state import find_restore_point, write_checkpoint
from monolith.state.storage import open_folder
from monolith.testing import sgd_table_config
from monolith.train import RunConfig
from monolith.urls import checked_location, filesystem_of, is_remote, is_url, local_path

MEANT = {
    "run": "run",
    "/data/run": "/data/run",
    "./s3:/x": "./s3:/x",
    "a:b": "a:b",
    "C:": "C:",
    "12:30/run": "12:30/run",
    "file:///data/run": "/data/run",
    "file://localhost/data/run": "/data/run",
    "local:///data/run": "/data/run",
    "s3://bucket/run": "s3://bucket/run",
    "s3a://bucket": "s3a://bucket",
    "gs://bucket/a/b": "gs://bucket/a/b",
    "hdfs://namenode:9000/run": "hdfs://namenode:9000/run",
    "hdfs:///run": "hdfs:///run",
    "hdfs:/run": "hdfs:///run",
    "memory://run": "memory://run",
    "https://host/a.csv": "https://host/a.csv",
    "zip://*.csv::s3://bucket/a.zip": "zip://*.csv::s3://bucket/a.zip",
    "simplecache::s3://bucket/a": "simplecache::s3://bucket/a",
}
SLIPS = {
    "s3:/bucket/run": "s3://bucket/run",
    "gs:/bucket/run": "gs://bucket/run",
    "memory:/run": "memory://run",
    "https:/host/a.csv": "https://host/a.csv",
    "s3:bucket/run": "s3://bucket/run",
    "s3:///bucket/run": "s3://bucket/run",
    "s3://": "s3://bucket/path",
    "S3://bucket/run": "s3://bucket/run",
    "s4://bucket/run": "s3://bucket/run",
    "hdsf://run": "hdfs:///run",
    "hdfs:run": "hdfs:///run",
    "hdfs:////run": "hdfs:///run",
    "file:/data/run": "file:///data/run",
    "file:data/run": "file:///data/run",
    "file://data/run": "file:///data/run",
    "C:/data/run": "/data/run",
    "C:\\data\\run": "/data/run",
    "quux://data": "./quux://data",
    "simplecache::s3:/bucket/a": "s3://bucket/a",
}


@pytest.mark.parametrize("path", MEANT)
def test_what_is_meant(path: str) -> None:
    assert checked_location(path) == MEANT[path]
    assert is_url(path) == ("://" in MEANT[path])
    assert checked_location(MEANT[path]) == MEANT[path]


@pytest.mark.parametrize("path", SLIPS)
def test_what_cannot_be_meant(path: str) -> None:
    if path.startswith("simplecache"):
        with pytest.raises(InvalidArgumentError, match=re.escape(SLIPS[path])):
            checked_location(f"{path}://")
        return
    with pytest.raises(InvalidArgumentError, match=re.escape(f"did you mean {SLIPS[path]!r}?")):
        checked_location(path)
    with pytest.raises(InvalidArgumentError):
        open_folder(path)
    with pytest.raises(InvalidArgumentError):
        is_remote(path)
    with pytest.raises(InvalidArgumentError):
        filesystem_of(path)
    with pytest.raises(InvalidArgumentError, match=r"^there: "):
        local_path(path, "there")


@pytest.mark.parametrize("scheme", sorted({*fsspec.available_protocols(), "viewfs"}))
def test_every_scheme_is_treated_alike(scheme: str) -> None:
    """One slash, or none, is never a folder called `scheme:` on the local disk."""
    with pytest.raises(InvalidArgumentError):
        checked_location(f"{scheme}:place/x")
    if scheme in ("hdfs", "viewfs"):
        assert is_url(f"{scheme}:/place/x")
        return
    with pytest.raises(InvalidArgumentError):
        checked_location(f"{scheme}:/place/x")


PLACES: dict[str, Callable[[str], object]] = {
    "a model_dir": lambda url: RunConfig(model_dir=url),
    "a restore_dir": lambda url: RunConfig(restore_dir=url),
    "a checkpoint": lambda url: write_checkpoint(f"{url}/model.ckpt-1", state={}, step=1),
    "a restore": find_restore_point,
    "a copy from": lambda url: copy_recursively(url, "memory://there"),
    "a copy to": lambda url: copy_recursively("memory://urls", url),
    "a source": lambda url: CsvSource(f"{url}/a.csv", columns=[Column(name="x")], batch_size=1),
    "a log": lambda url: ChangeLog(url, []),
    "a reader of a log": LogReader,
    "a table": lambda url: EmbeddingTable(sgd_table_config(1)).save(f"{url}/a.table"),
    "a table that is loaded": lambda url: EmbeddingTable.load(f"{url}/a.table"),
    "a server's folder": lambda url: ServerConfig(folder=Path(url)),
}


@pytest.mark.parametrize("what", PLACES)
def test_every_place_that_takes_a_path(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fsspec.open("memory://urls/a.txt", "w") as file:
        file.write("x")
    with pytest.raises((InvalidArgumentError, ConfigError), match=r"s3://bucket/run|on a local disk"):
        PLACES[what]("s3:/bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "what", ["a log", "a reader of a log", "a table", "a table that is loaded", "a server's folder"]
)
def test_a_place_on_a_disk_is_no_url(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MonolithError, match="local disk"):
        PLACES[what]("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["inspect", "verify", "checkpoint list"])
def test_the_command_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "s3:/bucket/run"]) == 2
    assert "did you mean 's3://bucket/run'" in capsys.readouterr().err


def test_a_model_dir_given_as_a_file_url_is_a_path() -> None:
    assert RunConfig(model_dir="file:///data/run").model_dir == "/data/run"
