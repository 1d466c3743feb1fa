"""Danger: a request that fails, or is answered by half of each version, because a newer version has replaced an older one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from monolith.errors import CorruptFileError
from monolith.serve import load
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.routing import ReplicaRoute
from monolith.serve.watch import VersionWatch, export_versions
from served_models import ServeSums, columns, sum_replica


def test_no_request_fails_while_versions_are_swapped(serve_sums: ServeSums) -> None:
    server, client = serve_sums(sum_replica(1, scale=1.0))
    repository = server.handler.repository
    problems: list[str] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                answer = client.infer(columns(1.0, 2.0))
            except Exception as error:
                problems.append(repr(error))
                return
            if not np.array_equal(answer["sum"], answer.version * np.array([2.0, 4.0], np.float32)):
                problems.append(f"version {answer.version} answered {answer}")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 60):
        repository.replace(sum_replica(version, scale=float(version)))
        client.infer(columns(1.0))  # so that swaps fall among requests
    done.set()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_version_that_is_removed_after_it_was_chosen_is_not_used(serve_sums: ServeSums) -> None:
    class Late:
        """Chooses a version just before it is replaced."""

        repository = ModelRepository()
        swapped = False

        def key_column(self, name: str) -> str | None:
            return None

        def route(self, name: str, version: int | None, key: str) -> ReplicaRoute:
            chosen = self.repository.get(name, version)
            if not self.swapped:
                self.swapped = True
                self.repository.replace(sum_replica(2, scale=2.0))
            return ReplicaRoute(primary=chosen)

    router = Late()
    server, client = serve_sums(sum_replica(1), router=router)
    router.repository = server.handler.repository
    answer = client.infer(columns(1.0))
    assert (answer.version, answer["sum"].tolist()) == (2, [4.0])


def test_a_newer_export_of_a_folder_replaces_the_served_one(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    shutil.copytree(exported, folder / "1")
    repository = ModelRepository()
    repository.add(Replica("clicks", load(folder)))
    opened: list[Path] = []

    def open_version(path: Path) -> Replica:
        opened.append(path)
        if path.name == "8":
            raise CorruptFileError("damaged")
        return sum_replica(int(path.name), name="clicks")

    watch = VersionWatch(repository, folder, current=1, open_version=open_version, poll_secs=3600)
    try:
        assert not watch.look()
        (folder / "9").mkdir()
        assert not watch.look(), "it has no manifest yet, so it is not complete"
        shutil.copytree(exported, folder / "7")
        shutil.copytree(exported, folder / "8")
        assert export_versions(folder).keys() == {1, 7, 8}
        assert watch.look()
        assert [path.name for path in opened] == ["8", "7"]
        assert repository.versions("clicks") == (7,)
        assert not watch.look()
        assert [path.name for path in opened] == ["8", "7"], "the damaged version is not tried again and again"
    finally:
        watch.close()
        repository.close()
    assert "monolith-versions" not in [thread.name for thread in threading.enumerate()]


def test_an_asked_version_that_is_gone_is_not_found(serve_sums: ServeSums) -> None:
    server, client = serve_sums(sum_replica(1), sum_replica(2, scale=10.0))
    assert client.infer(columns(1.0), version=1)["sum"].tolist() == [2.0]
    assert client.infer(columns(1.0))["sum"].tolist() == [20.0]
    server.handler.repository.remove("sums", 1)
    with pytest.raises(LookupError, match="model 'sums': has no version 1; it has 2"):
        client.infer(columns(1.0), version=1)
