"""Compiles the shim and runs programs with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run of a job ended."""

    returncode: int
    """Negative: the signal that ended it."""
    stdout: list[str]
    stderr: str
    faults: int
    """Changes of the disk that failed; unknown, and 0, if it was killed."""


class Nursery:
    """Runs `main(arguments)` of a module in `tests/fault`, one process each; see nursery.py."""

    def __init__(self, library: Path, module: str, scratch: Path) -> None:
        tests = SOURCE.parents[2]
        path = os.pathsep.join([str(tests), str(tests / "fault")])
        self.library, self.module = library, module
        self._scratch = scratch
        self._process = subprocess.Popen(
            [sys.executable, SOURCE.with_name("nursery.py"), module],
            env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, shim: DiskShim, *arguments: str, kill_after: float | None = None) -> Ended:
        """Run the job to its end, or kill it after some seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said, complained = self._scratch / "stdout", self._scratch / "stderr"
        request = {
            "arguments": arguments,
            "kill_after": kill_after,
            "stdout": str(said),
            "stderr": str(complained),
            "shim": {
                "root": str(shim.root.resolve()),
                "journal": str(shim.journal or ""),
                "seed": shim.seed,
                "one_in": shim.one_in,
                "kill_at": shim.kill_at,
            },
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the nursery itself has died"
        # A line without its end was not said: the process died before.
        lines = said.read_text().split("\n")[:-1]
        faults = int(lines.pop().removeprefix("faults ")) if lines and lines[-1].startswith("faults ") else 0
        return Ended(returncode=int(answer), stdout=lines, stderr=complained.read_text(), faults=faults)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
