"""`LocalRoles`: the roles of a job as processes of this machine, which find each other through files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from monolith.cluster.launch.child_process import ChildProcess
from monolith.cluster.launch.roles import JobRoles, Role

__all__ = ["LocalRoles", "OnLine"]

OnLine = Callable[[Role, str], None]
"""Hears of each line that a role writes; called by threads."""

_RETRY_WAIT = "MONOLITH_RETRY_WAIT_IN_SECS"


class LocalRoles:
    """Starts roles here. What each writes goes to `<log_dir>/<role>.log`, after what an earlier life of it wrote.

    Example:
        >>> import tempfile
        >>> job = JobRoles(num_ps=0, num_workers=1, uuid="try", worker_args=("-c", "print('hello')"))
        >>> with tempfile.TemporaryDirectory() as folder, LocalRoles(job, Path(folder)) as roles:
        ...     child = roles.start(job.roles[0])
        ...     child.wait(60), child.last_lines
        (0, ['hello'])
    """

    def __init__(self, job: JobRoles, log_dir: Path, *, on_line: OnLine = lambda role, line: None) -> None:
        """Nothing is started yet."""
        self._job, self._log_dir, self._on_line = job, log_dir.resolve(), on_line
        # Of this launch alone: addresses that an earlier one left behind lead nowhere, or to strangers.
        self._folder = self._log_dir / f"discovery-{job.uuid}"

    def start(self, role: Role) -> ChildProcess:
        """Start a role, in a process that ends with this one."""
        # Whoever can write here can send workers, and their token, elsewhere.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        discovery = {"MONOLITH_DISCOVERY_TYPE": "file", "MONOLITH_DISCOVERY_FOLDER": str(self._folder)}
        # A role on this machine is back as soon as its first restart.
        patience = {_RETRY_WAIT: os.environ.get(_RETRY_WAIT, str(self._job.liveness.backoff_secs))}
        return ChildProcess(
            [sys.executable, *self._job.python_args(role)],
            log=self._log_dir / f"{role.file_name}.log",
            environment=self._job.environment(role, discovery) | patience,
            on_line=lambda line: self._on_line(role, line),
        )

    def close(self) -> None:
        """Remove what the discovery has written; logs stay."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalRoles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
