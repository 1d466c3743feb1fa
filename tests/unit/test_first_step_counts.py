"""Danger: the comparison of systems counts lines, bytes or platforms wrongly, or accepts a program that has not trained."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def first_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("first_step")


def test_only_lines_with_code_on_them_count(first_step: ModuleType) -> None:
    source = '''"""A docstring
of two lines."""

import sys  # counts

# does not count


def main() -> None:
    """Another."""
    text = """two lines
    that are data"""
    print(
        text,

        sys.argv,
    )
'''
    # import, def, two of text, four of print without its blank line
    assert first_step.lines_of_code(source) == 8


def test_every_file_on_disk_counts_once(first_step: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(bytes(1000))
    (tmp_path / "inner" / "b").write_bytes(bytes(50))
    alone = first_step.folder_bytes(tmp_path)
    os.link(tmp_path / "a", tmp_path / "inner" / "hard")
    assert alone == first_step.folder_bytes(tmp_path) == 1050


def test_downloads_have_the_sizes_of_the_files_that_pip_chose(first_step: ModuleType, tmp_path: Path) -> None:
    local = tmp_path / "torch-1.0+cpu-py3-none-any.whl"
    local.write_bytes(bytes(70))
    report = {
        "install": [
            {"download_info": {"url": local.as_uri()}, "metadata": {"name": "torch", "version": "1.0+cpu"}},
            {"download_info": {"url": "https://server/x.whl"}, "metadata": {"name": "x", "version": "2"}},
        ]
    }
    torch, x = first_step.fetched(report, {"https://server/x.whl": 5}.__getitem__)
    assert (torch.name, torch.bytes, torch.from_disk) == ("torch", 70, True)
    assert (x.name, x.version, x.bytes, x.from_disk) == ("x", "2", 5, False)


@pytest.mark.parametrize(
    ("wheel", "support"),
    [
        ("t-1-py311-none-any.whl", {("any", "3.11")}),
        ("t-1-py3-none-any.whl", {("any", "any")}),
        ("t-1-cp312-abi3-manylinux_2_28_aarch64.whl", {("Linux aarch64", "3.12+")}),
        ("t-1-cp39-cp39-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", {("Linux x86-64", "3.9")}),
        ("t-1-cp310-cp310-macosx_12_0_arm64.whl", {("macOS arm64", "3.10")}),
        ("t-1-cp310-cp310-win_amd64.whl", {("Windows x86-64", "3.10")}),
        ("t-1-cp314-cp314t-win_amd64.whl", set()),
    ],
)
def test_tags_of_a_wheel_say_where_it_installs(
    first_step: ModuleType, wheel: str, support: set[tuple[str, str]]
) -> None:
    assert first_step.wheel_support(wheel) == support


def test_a_platform_counts_where_every_distribution_has_a_wheel(first_step: ModuleType) -> None:
    pure = {("any", "3.10"), ("any", "3.11"), ("any", "3.12")}
    compiled = {("Linux x86-64", "3.11"), ("Linux x86-64", "3.12"), ("macOS arm64", "3.12"), ("macOS arm64", "3.13")}
    stable = {("Linux x86-64", "3.11+"), ("macOS arm64", "3.12+")}
    common = first_step.common_support([pure, compiled, stable])
    assert common == {("Linux x86-64", "3.11"), ("Linux x86-64", "3.12"), ("macOS arm64", "3.12")}
    assert first_step.in_words(common) == "Linux x86-64: 3.11 to 3.12; macOS arm64: 3.12"
    assert first_step.in_words({("Linux x86-64", "3.9"), ("Linux x86-64", "3.10")}) == "Linux x86-64: 3.9 to 3.10"
    assert first_step.in_words(set()) == "none"


@pytest.mark.parametrize(
    ("losses", "complaint"),
    [
        ([0.7, 0.6, 0.5], "steps 1 to 4"),
        ([0.7, float("nan"), 0.6, 0.5], "finite"),
        ([0.7, 0.6, 0.6, 0.7], "did not learn"),
    ],
)
def test_a_program_that_has_not_trained_is_refused(first_step: ModuleType, losses: list[float], complaint: str) -> None:
    with pytest.raises(first_step.NotMeasuredError, match=complaint):
        first_step.require_training(dict(enumerate(losses, 1)), 4, "a program")
    first_step.require_training({1: 0.7, 2: 0.6, 3: 0.6, 4: 0.5}, 4, "a program")


def test_versions_are_those_that_the_other_benchmarks_install(first_step: ModuleType) -> None:
    pins = {
        argument
        for system in first_step.SYSTEMS.values()
        for arguments in system.installs
        for argument in arguments
        if "==" in argument
    }
    script = (BENCHMARKS / "setup_peers.sh").read_text().split()
    assert pins
    assert pins <= set(script)
