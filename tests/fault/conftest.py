"""What the fault tests share. Lying here, it also puts this folder on the path, so they can `import disk_shim`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import JOBS, Campaign
from disk_shim import compile_shim


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of `disk_shim`, compiled."""
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(params=JOBS)
def campaign(request: pytest.FixtureRequest, shim_library: Path, tmp_path: Path) -> Iterator[Campaign]:
    """A campaign against each of the jobs."""
    made = Campaign(shim_library, request.param, tmp_path)
    yield made
    made.close()
