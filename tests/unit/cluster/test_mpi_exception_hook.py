"""Danger: one process of an `mpirun` job fails, and the others wait for it forever; or its error is never printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monolith import ConfigError
from monolith.cluster import (
    add_mpi_exception_hook,
    get_mpi_local_rank,
    get_mpi_local_size,
    get_mpi_rank,
    get_mpi_size,
)

RANK = {"OMPI_COMM_WORLD_RANK": "3"}


@pytest.fixture(autouse=True)
def _hook_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def test_ranks_and_sizes_come_from_mpirun_or_are_those_of_one_process() -> None:
    environ = RANK | {f"OMPI_COMM_WORLD_{name}": value for name, value in
                      [("SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")]}  # fmt: skip
    readers = (get_mpi_rank, get_mpi_size, get_mpi_local_rank, get_mpi_local_size)
    assert [read(environ) for read in readers] == [3, 8, 1, 2]
    assert [read({}) for read in readers] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"OMPI_COMM_WORLD_SIZE: .* 'two'"):
        get_mpi_size({"OMPI_COMM_WORLD_SIZE": "two"})


def test_without_mpirun_nothing_is_changed() -> None:
    before = sys.excepthook
    assert not add_mpi_exception_hook(environ={})
    assert sys.excepthook is before


def test_the_error_is_printed_before_all_are_ended(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    assert add_mpi_exception_hook(environ=RANK, abort=lambda: seen.append(capsys.readouterr().err))
    try:
        raise KeyError("lost")
    except KeyError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    [printed] = seen
    assert "MPI rank 3" in printed
    assert printed.rstrip().endswith("KeyError: 'lost'")


@pytest.mark.parametrize("begun", [True, False], ids=["MPI begun", "MPI not begun"])
def test_a_failing_process_ends_the_job(tmp_path: Path, begun: bool) -> None:
    """mpi4py is a stand-in that notes what it is asked. A process that does not speak MPI yet must not begin at its end: that
    waits for all others to do the same. It must end badly itself, for `mpirun` to see."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    stand_in = (
        "def Is_initialized(): return True\n"
        "def Is_finalized(): return False\n"
        "class COMM_WORLD:\n    @staticmethod\n    def Abort(code): print('aborted with', code, flush=True)\n"
    )
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(stand_in)
    script = (
        "import threading, time\n"
        f"{'from mpi4py import MPI' if begun else ''}\n"
        "from monolith.cluster import add_mpi_exception_hook\n"
        "add_mpi_exception_hook()\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"  # would keep an ordinary exit waiting
        "raise RuntimeError('rank went wrong')\n"
    )
    environ = RANK | {"PYTHONPATH": str(tmp_path), "PATH": ""}
    child = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert child.returncode == 1
    assert "RuntimeError: rank went wrong" in child.stderr
    assert child.stdout == ("aborted with 1\n" if begun else "")
