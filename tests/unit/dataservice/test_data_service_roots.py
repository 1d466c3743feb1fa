"""Danger: a data service reads files outside of its roots: by `..`, a link, another scheme, or because no root was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.dataservice import DataDispatcher, DatasetConfig, DataWorker, DataWorkerConfig, DispatcherConfig
from monolith.dataservice.dataset import EVERYTHING, require_below
from monolith.errors import ConfigError, InvalidArgumentError

TOKEN = "correct-horse-battery"


def test_paths_that_lead_outside_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "open"
    (root / "days").mkdir(parents=True)
    (tmp_path / "openly").mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "file").symlink_to("/etc/passwd")
    for path in (
        f"{root}/0.csv",
        f"{root}/days/*.csv",
        f"{root}/days/{{1..3}}.csv",
        f"{root}/days/../0.csv",
        f"{root}",
    ):
        require_below(path, [str(root)])
    for path in (
        f"{root}/../0.csv",
        f"{root}/link/0.csv",
        f"{root}/link/*.csv",
        f"{root}/file",
        f"{root}/*/../../0.csv",
        f"{tmp_path}/openly/0.csv",
        f"{tmp_path}/*/0.csv",
        "/*",
        "*",
        "0.csv",
        f"file://{root}/0.csv",
        "s3://bucket/0.csv",
        "s3:/bucket/0.csv",
        f"{root}/0\0.csv",
    ):
        with pytest.raises(InvalidArgumentError, match="where this server may read"):
            require_below(path, [str(root)])


def test_urls_are_below_their_own_beginning_only() -> None:
    roots = ["s3://bucket/days/"]
    require_below("s3://bucket/days/0.csv", roots)
    for path in (
        "s3://bucket/days2/0.csv",
        "s3://bucket/days/../x",
        "s3://other/days/0.csv",
        "zip://a::s3://bucket/days/0",
    ):
        with pytest.raises(InvalidArgumentError, match="where this server may read"):
            require_below(path, roots)
    require_below("/anything", [EVERYTHING])


def test_a_dispatcher_does_not_even_list_what_is_outside(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "0.csv").write_text("user\n1\n")
    with DataDispatcher(DispatcherConfig(roots=(str(tmp_path / "open"),))) as dispatcher:
        dispatcher.register("inside", DatasetConfig(kind="csv", paths=(f"{tmp_path}/open/*.csv",)))
        for path in ("/etc/*", f"{tmp_path}/open/../*.csv"):
            with pytest.raises(InvalidArgumentError, match="is not below"):
                dispatcher.register("outside", DatasetConfig(kind="csv", paths=(path,)))


def test_other_machines_can_ask_only_where_roots_are_said(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("-----BEGIN something-----")
        (tmp_path / name).chmod(0o600)
    public = {"host": "0.0.0.0", "token": TOKEN, "tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(ConfigError, match=r"DispatcherConfig\.roots: '0\.0\.0\.0' can be reached.*--root"):
        DataDispatcher(DispatcherConfig(**public))
    with pytest.raises(ConfigError, match=r"DataWorkerConfig\.roots: '0\.0\.0\.0' can be reached.*--root"):
        DataWorker(DataWorkerConfig(**public, dispatcher="a:1", advertise="a:2"))
