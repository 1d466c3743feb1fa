"""`JobRoles`: the roles of a job, and the environment of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from monolith.cluster.liveness import Liveness
from monolith.config import Config
from monolith.transport.tokens import TOKEN_VARIABLE, Token, reveal

__all__ = ["JobRoles", "Role", "RoleKind"]


class RoleKind(StrEnum):
    """The two kinds of processes of a job, as the environment names them."""

    PS = "ps"
    """Holds tables and dense parameters."""
    WORKER = "worker"
    """Runs the script."""


@dataclass(frozen=True)
class Role:
    """One process of a job.

    Example:
        >>> print(Role(RoleKind.PS, 1))
        ps 1
    """

    kind: RoleKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def file_name(self) -> str:
        """The role as part of a file's name."""
        return f"{self.kind}-{self.index}"


class JobRoles(Config):
    """How many processes a job has, what each runs, and what they share.

    Example:
        >>> job = JobRoles(num_ps=1, num_workers=2, uuid="clicks-7", worker_args=("train.py", "--rate", "0.1"))
        >>> [str(role) for role in job.roles]
        ['ps 0', 'worker 0', 'worker 1']
        >>> job.python_args(job.roles[0])
        ['-m', 'monolith.cli', 'ps']
        >>> job.environment(job.roles[0])["MONOLITH_SERVER_TYPE"]
        'ps'
    """

    num_ps: Annotated[int, Field(ge=0)] = 1
    """Parameter servers."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Workers. Worker 0 is the chief."""
    uuid: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    """Name of this launch of the job, different for every launch."""
    worker_args: tuple[str, ...]
    """Arguments of Python for a worker: a script or `-m` and a module, and its arguments."""
    ps_args: tuple[str, ...] = ()
    """Further options of `monolith ps`."""
    token: Token = None
    """Token that workers send to servers. Roles get it in their environment, never on a command line."""
    model_dir: str | None = None
    """Shared folder of the model and of the state of servers. With None servers keep their state in memory only."""
    liveness: Liveness = Liveness()
    """When a role counts as hung, how often it is restarted, and how long the others wait for it."""
    accept_loss: bool = False
    """Continue when a server cannot restore its state: it restores the newest checkpoint, or starts empty."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """All roles, servers first."""
        servers = tuple(Role(RoleKind.PS, index) for index in range(self.num_ps))
        return servers + tuple(Role(RoleKind.WORKER, index) for index in range(self.num_workers))

    def python_args(self, role: Role) -> list[str]:
        """Return the arguments of Python for `role`."""
        if role.kind is RoleKind.WORKER:
            return list(self.worker_args)
        return ["-m", "monolith.cli", RoleKind.PS.value, *self.ps_args]

    def environment(self, role: Role, discovery: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that make a process `role`, with those of `discovery`, through which it finds the others."""
        shared = {} if self.model_dir is None else {"MONOLITH_MODEL_DIR": self.model_dir}
        secret = reveal(self.token)
        token = {} if secret is None else {TOKEN_VARIABLE: secret}
        recovery = {"MONOLITH_PARTIAL_RECOVERY": "true"} if self.accept_loss else {}
        return {
            "MONOLITH_SERVER_TYPE": role.kind.value,
            "MONOLITH_INDEX": str(role.index),
            "MONOLITH_NUM_PS": str(self.num_ps),
            "MONOLITH_NUM_WORKERS": str(self.num_workers),
            "MONOLITH_UUID": self.uuid,
            # The launcher ends the servers when all workers have succeeded.
            "MONOLITH_SUPERVISED": "true",
            "MONOLITH_LIVENESS": self.liveness.model_dump_json(),
            **shared,
            **token,
            **recovery,
            **(discovery or {}),
        }
