"""Danger: a build fails, or bundles something else, where npm or its registry is missing."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake", path=f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(charts LANGUAGES NONE)\n"
        f"add_subdirectory({ROOT / 'deploy' / 'charts'} charts)\n"
    )
    command = [cmake, "-S", str(folder), "-B", str(folder / "build"), "-DSKBUILD_STATE=editable", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def bundled(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("src/monolith/serve/page/static/uplot/*"))


def test_without_npm_the_build_goes_on_and_says_what_is_missing(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DMONOLITH_NPM=/nothing/npm")
    assert done.returncode == 0, done.stderr
    assert "the page will have simple charts" in done.stdout
    assert bundled(tmp_path) == []


def test_a_registry_that_refuses_does_not_fail_the_build(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 404 >&2\nexit 1\n")
    npm.chmod(0o755)
    done = configure(tmp_path, f"-DMONOLITH_NPM={npm}")
    assert done.returncode == 0, done.stderr
    assert "npm cannot fetch it (1)" in done.stdout
    assert bundled(tmp_path) == []


def test_a_package_of_other_content_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "uplot.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for name in ("dist/uPlot.iife.min.js", "LICENSE"):
            text = b"alert(1)"
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    done = configure(tmp_path, f"-DMONOLITH_UPLOT={package}")
    assert done.returncode != 0
    assert "is not that of release 1.6.32" in done.stderr
    assert bundled(tmp_path) == []


def test_the_library_of_the_registry_is_bundled_with_its_licence(tmp_path: Path) -> None:
    done = configure(tmp_path)
    assert done.returncode == 0, done.stderr
    if "simple charts" in done.stdout:
        pytest.skip("npm cannot fetch uplot here")
    assert bundled(tmp_path) == ["LICENSE", "uPlot.iife.min.js", "uPlot.min.css"]
