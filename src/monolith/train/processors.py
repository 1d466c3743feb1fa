"""How many processors a run may use, how many threads it takes, and whether others keep it from running."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from monolith.cluster.role import ranks_on_this_machine
from monolith.table import get_num_threads, set_num_threads
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["StarvationHook", "available_processors", "use_threads"]

_log = logging.getLogger(__name__)


def available_processors(root: Path = Path("/")) -> int:
    """Count the processors that this process may use: its affinity, and the CPU quota of its container or control group.

    Example:
        >>> 1 <= available_processors() <= os.cpu_count()
        True
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, *(math.ceil(quota) for quota in _quotas(root)), allowed))


def use_threads(threads: int | None) -> int:
    """Let torch and the tables use `threads` threads. None lowers what they use to this process's part of the processors.

    Its part is that of one of the training processes that a launcher has started on this machine: `mpirun`, `torchrun`, `srun`
    or `monolith launch`. Processors to which the launcher has bound the process are its own.

    Returns:
        The number of threads in use.

    Example:
        >>> before = torch.get_num_threads(), get_num_threads()
        >>> use_threads(1), torch.get_num_threads(), get_num_threads()
        (1, 1, 1)
        >>> torch.set_num_threads(before[0]); set_num_threads(before[1])
    """
    processors = available_processors()
    ranks = ranks_on_this_machine()
    part = processors if ranks == 1 or _is_bound() else max(1, processors // ranks)
    wanted = min(torch.get_num_threads(), part) if threads is None else threads
    if threads is not None and threads > processors:
        _log.warning("threads: %d asked for, but this process may use only %d processors", threads, processors)
    if wanted != torch.get_num_threads():
        _log.info(
            "using %s instead of torch's %d%s",
            _counted(wanted, "thread"),
            torch.get_num_threads(),
            _why(ranks, processors),
        )
        torch.set_num_threads(wanted)
    set_num_threads(wanted if threads is not None else min(wanted, get_num_threads()))
    return wanted


def _why(ranks: int, processors: int) -> str:
    return "" if ranks == 1 else f": {ranks} processes that train share {_counted(processors, 'processor')}"


def _is_bound(root: Path = Path("/")) -> bool:
    """Whether this process may use only some of the processors that its machine or container has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The set of a container. Without one, a launcher can only have chosen among all processors.
    there = _members(_text(root / "sys/fs/cgroup/cpuset.cpus.effective")) or os.cpu_count() or 1
    return allowed < there


def _members(text: str) -> int:
    """Count the members of a list such as `0-3,8`. 0 for one that cannot be read."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    try:
        return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
    except ValueError:
        return 0


class StarvationHook(Hook):
    """Log a warning, once in a run, if the training thread spends much of its time waiting for a processor.

    Args:
        share: the part of the time spent waiting from which on it is said.
        every_secs: seconds over which the part is measured.
        waited: returns the seconds that this thread has been able to run but had no processor.

    Example:
        >>> hook = StarvationHook(share=0.25)
    """

    def __init__(
        self,
        *,
        share: float = 0.25,
        every_secs: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self._share, self._every_secs, self._clock = share, every_secs, clock
        self._waited = waited or _seconds_waited
        self._since = self._waited_before = 0.0
        self._told = False

    def after_start(self, trainer: Trainer) -> None:
        """Begin to measure."""
        self._since, self._waited_before, self._told = self._clock(), self._waited(), False

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Measure an interval when it is over."""
        seconds = self._clock() - self._since
        if self._told or seconds < self._every_secs:
            return
        waited = self._waited()
        part = (waited - self._waited_before) / seconds
        self._since, self._waited_before = self._clock(), waited
        if part > self._share:
            self._told = True
            _log.warning(
                "this run waited for a processor %.0f%% of the last %.0f s: it has %s on %s, which others use too; "
                "give it more processors%s",
                100 * part,
                seconds,
                _counted(threads := torch.get_num_threads(), "thread"),
                _counted(available_processors(), "processor"),
                ", or fewer `threads`" if threads > 1 else "",
            )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _quotas(root: Path) -> Iterator[float]:
    """The CPU limits, in processors, of the control groups this process is in. Works for versions 1 and 2."""
    groups = {PurePosixPath("/")}
    for line in _text(root / "proc/self/cgroup").splitlines():
        path = PurePosixPath(line.rpartition(":")[2] or "/")
        groups |= {path, *path.parents}
    for group in groups:
        place = str(group).lstrip("/")
        limit = _text(root / "sys/fs/cgroup" / place / "cpu.max").split()
        if not limit:
            folder = root / "sys/fs/cgroup/cpu" / place
            limit = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(limit) == 2 and limit[0].isdecimal() and limit[1].isdecimal() and int(limit[0]) and int(limit[1]):
            yield int(limit[0]) / int(limit[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _seconds_waited() -> float:
    """The time this thread was ready and had no processor, as the Linux scheduler counts it. 0 where it does not."""
    fields = _text(Path("/proc/thread-self/schedstat")).split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0
