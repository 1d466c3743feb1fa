"""`LocalRoles`: the roles of a job as processes of this machine, which find each other through files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from monolith.cluster.launch.child_process import ChildProcess
from monolith.cluster.launch.roles import JobRoles, Role, RoleKind

__all__ = ["LocalRoles", "server_command"]

OnLine = Callable[[Role, str], None]


class LocalRoles:
    """Starts roles here. What each writes goes to `<log_dir>/<role>.log`, after what an earlier life of it wrote.

    Example:
        >>> import sys, tempfile
        >>> job = JobRoles(num_ps=0, num_workers=1, uuid="try")
        >>> with tempfile.TemporaryDirectory() as folder, LocalRoles(job, [sys.executable, "-c", ""], Path(folder)) as roles:
        ...     roles.start(job.roles[0]).wait(60)
        0
    """

    def __init__(
        self,
        job: JobRoles,
        worker_command: Sequence[str],
        log_dir: Path,
        *,
        ps_args: Sequence[str] = (),
        on_line: OnLine = lambda role, line: None,
    ) -> None:
        """`worker_command` is what each worker runs, `ps_args` are further options of `monolith ps`."""
        self._job, self._worker_command, self._ps_args = job, tuple(worker_command), tuple(ps_args)
        self._log_dir, self._on_line = log_dir.resolve(), on_line
        # Of this launch alone: addresses that an earlier one left behind lead nowhere, or to strangers.
        self._folder = self._log_dir / f"discovery-{job.uuid}"

    def log_of(self, role: Role) -> Path:
        """Where what a role writes goes."""
        return self._log_dir / f"{role.file_name}.log"

    def start(self, role: Role) -> ChildProcess:
        """Start a role, in a process that ends with this one."""
        discovery = {"MONOLITH_DISCOVERY_TYPE": "file", "MONOLITH_DISCOVERY_FOLDER": str(self._folder)}
        # Here a role is back within a second or two: no worker should wait for it as long as for another machine.
        patience = {"MONOLITH_RETRY_WAIT_IN_SECS": os.environ.get("MONOLITH_RETRY_WAIT_IN_SECS", "1")}
        return ChildProcess(
            self._command(role),
            log=self.log_of(role),
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

    def _command(self, role: Role) -> list[str]:
        if role.kind is RoleKind.WORKER:
            return list(self._worker_command)
        return server_command(self._ps_args)


def server_command(options: Sequence[str]) -> list[str]:
    """What runs a parameter server with this interpreter."""
    return [sys.executable, "-m", "monolith.cli", RoleKind.PS.value, *options]
