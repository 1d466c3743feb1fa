"""What the fault tests share. Lying here, it also puts this folder on the path, so they can `import disk_shim`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import JOBS, Campaign
from disk_shim import Nursery, compile_shim


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of `disk_shim`, compiled."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session", params=JOBS)
def nursery(
    request: pytest.FixtureRequest, shim_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nursery]:
    """Runs each of the jobs."""
    with Nursery(shim_library, f"jobs.{request.param}", tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def campaign(nursery: Nursery, tmp_path: Path) -> Campaign:
    """A campaign against each of the jobs."""
    return Campaign(nursery, tmp_path)
