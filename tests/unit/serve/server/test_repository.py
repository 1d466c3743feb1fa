"""Danger: a version that is closed while a request uses it, one that is never closed, or a model that vanishes in a swap."""

from __future__ import annotations

import threading

import pytest

from monolith.errors import InvalidArgumentError, ModelNotFoundError
from monolith.serve.repository import ModelRepository
from served_models import sum_replica


def test_a_removed_version_is_closed_after_its_last_use() -> None:
    closed: list[int] = []
    repository = ModelRepository()
    repository.add(sum_replica(1, on_close=lambda: closed.append(1)))
    with repository.hold("sums") as replica, repository.hold("sums", 1) as same:
        assert replica is same
        repository.remove("sums", 1)
        assert not closed
        assert not repository.acquire(replica), "a removed version must not be taken again"
        assert repository.names() == ()
    assert closed == [1]


def test_an_unused_version_is_closed_at_once() -> None:
    closed: list[int] = []
    repository = ModelRepository()
    repository.add(sum_replica(1, on_close=lambda: closed.append(1)))
    repository.replace(sum_replica(2, on_close=lambda: closed.append(2)))
    assert closed == [1]
    assert repository.versions("sums") == (2,)
    repository.close()
    assert closed == [1, 2]


def test_the_default_version_is_the_greatest_unless_one_is_chosen() -> None:
    repository = ModelRepository()
    for version in (2, 3, 1):
        repository.add(sum_replica(version))
    assert repository.default("sums") == 3
    repository.set_default("sums", 1)
    repository.add(sum_replica(4))
    assert repository.default("sums") == 1
    repository.remove("sums", 1)
    assert repository.default("sums") == 4
    repository.set_default("sums", 2)
    repository.set_default("sums", None)
    assert repository.default("sums") == 4


def test_a_second_replica_of_a_version_is_refused() -> None:
    repository = ModelRepository()
    repository.add(sum_replica(1))
    with pytest.raises(InvalidArgumentError, match="model 'sums': has version 1 already"):
        repository.add(sum_replica(1))


def test_errors_name_what_there_is() -> None:
    repository = ModelRepository()
    repository.add(sum_replica(1))
    with pytest.raises(ModelNotFoundError, match="model 'sum': there is no such model; did you mean 'sums'"):
        repository.get("sum")
    with pytest.raises(ModelNotFoundError, match="model 'sums': has no version 9; it has 1"):
        repository.get("sums", 9)
    assert repository.ready("sums")
    assert not repository.ready("sums", 9)


def test_swaps_among_requests_never_leave_one_without_an_open_replica() -> None:
    open_versions = {1}
    repository = ModelRepository()
    repository.add(sum_replica(1, on_close=lambda: open_versions.discard(1)))
    failures: list[str] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            with repository.hold("sums") as replica:
                if replica.version not in open_versions:
                    failures.append(f"version {replica.version} was closed in use")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 200):
        open_versions.add(version)
        repository.replace(sum_replica(version, on_close=lambda version=version: open_versions.discard(version)))
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert open_versions == {199}
