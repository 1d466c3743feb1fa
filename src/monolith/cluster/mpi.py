"""Processes started by `mpirun`: who they are, and an end for all when one of them fails."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType

from monolith.errors import ConfigError

__all__ = ["add_mpi_exception_hook", "get_mpi_local_rank", "get_mpi_local_size", "get_mpi_rank", "get_mpi_size"]

_PREFIX = "OMPI_COMM_WORLD_"


def _number(name: str, default: int, environ: Mapping[str, str] | None) -> int:
    text = (os.environ if environ is None else environ).get(_PREFIX + name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{_PREFIX}{name}: expected a number as mpirun sets it, got {text!r}")
    return int(text)


def get_mpi_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number among all that `mpirun` started; 0 without it.

    Example:
        >>> get_mpi_rank({"OMPI_COMM_WORLD_RANK": "3"}), get_mpi_rank({})
        (3, 0)
    """
    return _number("RANK", 0, environ)


def get_mpi_size(environ: Mapping[str, str] | None = None) -> int:
    """How many processes `mpirun` started; 1 without it."""
    return _number("SIZE", 1, environ)


def get_mpi_local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number among those on its machine; 0 without `mpirun`."""
    return _number("LOCAL_RANK", 0, environ)


def get_mpi_local_size(environ: Mapping[str, str] | None = None) -> int:
    """How many processes `mpirun` started on this machine; 1 without it."""
    return _number("LOCAL_SIZE", 1, environ)


def _abort_all() -> None:
    """End every process of the job: through MPI if this process speaks it, else by ending in a way that `mpirun` notices."""
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        # To begin speaking it now would wait for the others to do the same.
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)
    finally:
        os._exit(1)


def add_mpi_exception_hook(*, environ: Mapping[str, str] | None = None, abort: Callable[[], None] = _abort_all) -> bool:
    """Under `mpirun`, let an uncaught exception end all processes instead of leaving the others waiting; whether it is set.

    The exception is printed first. Without `mpirun` nothing is changed. Calling it again is harmless.
    """
    environ = os.environ if environ is None else environ
    if _PREFIX + "RANK" not in environ:
        return False
    rank = get_mpi_rank(environ)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = traceback.format_exception(kind, error, trace)
        sys.stderr.write(f"Uncaught exception on MPI rank {rank}, ending all processes:\n{''.join(lines)}")
        sys.stderr.flush()
        abort()

    sys.excepthook = hook
    return True
