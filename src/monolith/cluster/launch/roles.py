"""`JobRoles`: the roles of a job, and the environment of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from monolith.cluster.liveness import Liveness
from monolith.config import Config
from monolith.transport.tokens import TOKEN_VARIABLE, Token, reveal

__all__ = ["JobRoles", "Role", "RoleKind"]


class RoleKind(StrEnum):
    """The kinds of processes of a job."""

    PS = "ps"
    """Holds tables and dense parameters."""
    WORKER = "worker"
    """Runs the script, independently of other workers."""
    RANK = "rank"
    """Runs the script and makes every step together with all other ranks."""


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
        >>> [str(role) for role in JobRoles(num_ps=0, num_ranks=2, uuid="clicks-8", worker_args=("train.py",)).roles]
        ['rank 0', 'rank 1']
    """

    num_ps: Annotated[int, Field(ge=0)] = 1
    """Parameter servers."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Workers. Worker 0 is the chief."""
    num_ranks: Annotated[int, Field(ge=0)] = 0
    """Ranks of synchronous training, which take the place of workers. Rank 0 is the chief. With `num_ps` they keep the rows on
    servers and exchange dense gradients only."""
    min_ranks: Annotated[int | None, Field(ge=1)] = None
    """The job goes on with this many ranks if others fail for good. None: with all."""
    uuid: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    """Name of this launch of the job, different for every launch."""
    worker_args: tuple[str, ...]
    """Arguments of Python for a worker or rank: a script or `-m` and a module, and its arguments."""
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

    @model_validator(mode="after")
    def _has_enough_ranks(self) -> Self:
        if self.min_ranks is not None and self.min_ranks > self.num_ranks:
            raise ValueError(f"min_ranks must be at most num_ranks, {self.min_ranks} <= {self.num_ranks}")
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """All roles, servers first."""
        kind, count = (RoleKind.RANK, self.num_ranks) if self.num_ranks else (RoleKind.WORKER, self.num_workers)
        servers = tuple(Role(RoleKind.PS, index) for index in range(self.num_ps))
        return servers + tuple(Role(kind, index) for index in range(count))

    @property
    def shape(self) -> dict[str, int]:
        """The number of processes by the kind's name, for messages."""
        trainers = {"ranks": self.num_ranks} if self.num_ranks else {"workers": self.num_workers}
        return ({} if self.num_ranks and not self.num_ps else {"ps": self.num_ps}) | trainers

    def python_args(self, role: Role) -> list[str]:
        """Return the arguments of Python for `role`."""
        if role.kind is not RoleKind.PS:
            return list(self.worker_args)
        return ["-m", "monolith.cli", RoleKind.PS.value, *self.ps_args]

    def environment(self, role: Role, discovery: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that make a process `role`, with those of `discovery`, through which it finds the others."""
        shared = {} if self.model_dir is None else {"MONOLITH_MODEL_DIR": self.model_dir}
        secret = reveal(self.token)
        token = {} if secret is None else {TOKEN_VARIABLE: secret}
        recovery = {"MONOLITH_PARTIAL_RECOVERY": "true"} if self.accept_loss else {}
        return {
            "MONOLITH_SERVER_TYPE": RoleKind.PS.value if role.kind is RoleKind.PS else RoleKind.WORKER.value,
            "MONOLITH_INDEX": str(role.index),
            "MONOLITH_NUM_PS": str(self.num_ps),
            "MONOLITH_NUM_WORKERS": str(self.num_ranks or self.num_workers),
            "MONOLITH_UUID": self.uuid,
            # The launcher ends the servers when all workers have succeeded.
            "MONOLITH_SUPERVISED": "true",
            "MONOLITH_LIVENESS": self.liveness.model_dump_json(),
            **self._of_ranks(),
            **shared,
            **token,
            **recovery,
            **(discovery or {}),
        }

    def _of_ranks(self) -> dict[str, str]:
        if not self.num_ranks:
            return {}
        least = {} if self.min_ranks is None else {"MONOLITH_MIN_RANKS": str(self.min_ranks)}
        mode = "MONOLITH_ENABLE_PARTIAL_SYNC_TRAINING" if self.num_ps else "MONOLITH_ENABLE_SYNC_TRAINING"
        return {mode: "true", **least}
