"""Compiles the shim and runs programs with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("disk_shim.c")


def compile_shim(folder: Path) -> Path:
    """The shared library, built in `folder`; skips the test where it cannot be."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("simulated disks need Linux and a C compiler (cc, gcc or clang)")
    library = folder / "disk_shim.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True)
    return library


@dataclass(frozen=True, kw_only=True)
class DiskShim:
    """How a program meets the folder `root`: journalled, with faults, until its death."""

    library: Path
    root: Path
    journal: Path | None = None
    one_in: int = 0
    """One change in so many fails; 0 = none."""
    seed: int = 0
    kill_at: int = 0
    """The change at which the process is killed; 0 = never."""

    def environment(self) -> dict[str, str]:
        """The environment of a process that runs with the shim."""
        chosen = {
            "LD_PRELOAD": str(self.library),
            "DISK_SHIM_ROOT": str(self.root.resolve()),
            "DISK_SHIM_JOURNAL": str(self.journal or ""),
            "DISK_SHIM_ONE_IN": str(self.one_in),
            "DISK_SHIM_SEED": str(self.seed),
            "DISK_SHIM_KILL_AT": str(self.kill_at),
        }
        return os.environ | {name: value for name, value in chosen.items() if value}

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run Python with `command` as its arguments; the timeout only ends a run that hangs."""
        return subprocess.run(
            [sys.executable, *command], env=self.environment(), capture_output=True, text=True, timeout=timeout
        )
