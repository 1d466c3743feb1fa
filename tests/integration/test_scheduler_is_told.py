"""Danger: the scheduler is not informed that a job is over, so it never ends it, or learns that it succeeded when it failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_threads import BATCH, Cluster
from monolith.features import Batch
from primus_master import serving

SECONDS = 120


def bad_data() -> Iterator[Batch]:
    yield BATCH
    raise ValueError("bad data")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """What the application master of this process's environment is asked for."""
    with serving() as (master, environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield master.asked


def test_a_run_that_ends_well_has_succeeded(tmp_path: Path, asked: list[tuple[str, Any]]) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    for worker in [cluster.start("worker", index, [BATCH] * 2) for index in range(2)]:
        worker.result(SECONDS)
    # Once, by the chief: a worker that ends first must not end the job.
    assert [name for name, _ in asked] == ["succeed"]


def test_a_run_that_breaks_has_failed_and_the_reason_is_told(tmp_path: Path, asked: list[tuple[str, Any]]) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=1)
    cluster.servers()
    with pytest.raises(ValueError, match="bad data"):
        cluster.start("worker", 0, bad_data()).result(SECONDS)
    assert [(name, request.exit_code, request.diagnose) for name, request in asked] == [
        ("kill", 1, "ValueError: bad data")
    ]
