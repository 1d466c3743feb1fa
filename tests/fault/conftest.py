"""What the fault tests share. Lying here, it also puts this folder on the path, so they can `import disk_shim`."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_shim import compile_shim


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of `disk_shim`, compiled."""
    return compile_shim(tmp_path_factory.mktemp("shim"))
