"""Danger: a source distribution without a file that the build reads. pip uses it where no wheel fits."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_READS = [
    "CMakeLists.txt",
    "bindings",
    "core/CMakeLists.txt",
    "core/include",
    "core/src",
    "deploy/charts",
    "proto",
    "src",
]
SUFFIXES = {".cc", ".h", ".proto", ".py", ".txt", ".typed"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The size of each file in a source distribution of the tree."""
    out = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2]: member.size for member in archive.getmembers() if member.isfile()}


def test_it_contains_every_source_that_the_build_reads(files: dict[str, int]) -> None:
    paths = [
        path
        for name in BUILD_READS
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    sources = {str(path.relative_to(ROOT)) for path in paths if path.suffix in SUFFIXES}
    assert "core/src/kernels/kernels.cc" in sources
    assert sources - files.keys() == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= files.keys()


def test_it_contains_nothing_that_a_build_has_made(files: dict[str, int]) -> None:
    made = [name for name in files if name.endswith((".so", ".o", ".a", "_pb2.py", ".pyc", ".whl"))]
    assert made == []
    assert sum(files.values()) < 30_000_000
