"""`JobRoles` and `ServeRoles`: the roles of a job that trains or serves, and the environment of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol, Self

from pydantic import Field, model_validator

from monolith.cluster.liveness import Liveness
from monolith.config import Config
from monolith.transport.tokens import TOKEN_VARIABLE, Token, reveal

__all__ = ["Job", "JobRoles", "Role", "RoleKind", "SHARDS_VARIABLE", "SHARD_TOKEN_VARIABLE", "ServeRoles"]

SHARDS_VARIABLE = "MONOLITH_SERVING_SHARDS"
"""The variable that names the service discovery of embedding shards, such as file=FOLDER."""
SHARD_TOKEN_VARIABLE = "MONOLITH_SHARD_TOKEN"
"""The variable with the token that front ends send to shards, if it is not the one that their own clients send."""


class RoleKind(StrEnum):
    """The kinds of processes of a job."""

    PS = "ps"
    """Holds tables and dense parameters."""
    WORKER = "worker"
    """Runs the script, independently of other workers."""
    RANK = "rank"
    """Runs the script and makes every step together with all other ranks."""
    SHARD = "shard"
    """Holds some of the rows of an export, for front ends."""
    FRONT_END = "front-end"
    """Answers requests, with rows from shards."""
    PART = "part"
    """Runs a command of an online loop until it is asked to end."""
    DRIVER = "driver"
    """Runs a command of an online loop that ends with it."""


@dataclass(frozen=True)
class Role:
    """One process of a job.

    Example:
        >>> print(Role(RoleKind.PS, 1))
        ps 1
        >>> print(Role(RoleKind.PART, 0, name="joiner", single=True))
        joiner
    """

    kind: RoleKind
    index: int
    name: str = ""
    """What it is called, by default its kind."""
    single: bool = False
    """Whether it is the only one of its name, so that its number says nothing."""

    def __str__(self) -> str:
        return self._joined(" ")

    @property
    def file_name(self) -> str:
        """The role as part of a file's name."""
        return self._joined("-")

    def _joined(self, separator: str) -> str:
        name = self.name or str(self.kind)
        return name if self.single else f"{name}{separator}{self.index}"


class Job(Protocol):
    """What a launcher has to know about a job."""

    @property
    def uuid(self) -> str:
        """Name of this launch of the job."""

    @property
    def liveness(self) -> Liveness:
        """When a role counts as hung, and how often it is restarted."""

    @property
    def model_dir(self) -> str | None:
        """The folder of the model, for messages."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """All roles, in the order in which they are started."""

    @property
    def shape(self) -> dict[str, int]:
        """The number of processes by the kind's name, for messages."""

    def python_args(self, role: Role) -> list[str]:
        """Return the arguments of Python for `role`."""

    def environment(self, role: Role, discovery: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that make a process `role`, with those of `discovery`, through which it finds the others."""


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


class ServeRoles(Config):
    """The processes that serve an export together: replicas of embedding shards, and front ends.

    Example:
        >>> job = ServeRoles(export="exported_models", shards=2, replicas=2, front_ends=1, uuid="clicks-7")
        >>> [str(role) for role in job.roles]
        ['shard 0', 'shard 1', 'shard 2', 'shard 3', 'front-end 0']
        >>> job.python_args(job.roles[3])[2:]
        ['serve-shard', 'exported_models', '--shard', '1', '--shards', '2', '--replica', '1']
    """

    export: str
    """Folder of an export, or of numbered exports."""
    shards: Annotated[int, Field(ge=1)] = 1
    """Shards that hold the rows together."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Processes that hold the same rows, for each shard."""
    front_ends: Annotated[int, Field(ge=0)] = 1
    """Processes that answer requests."""
    http_port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port of HTTP of front end 0. The others use the next ones. 0: free ones."""
    grpc_port: Annotated[int, Field(ge=0, lt=65536)] = 9000
    """Port of gRPC of front end 0. The others use the next ones. 0: free ones."""
    uuid: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    """Name of this launch of the job, different for every launch."""
    shard_args: tuple[str, ...] = ()
    """Further options of `monolith serve-shard`."""
    serve_args: tuple[str, ...] = ()
    """Further options of `monolith serve`."""
    token: Token = None
    """Token that front ends send to shards. Roles get it in their environment."""
    liveness: Liveness = Liveness()
    """When a role counts as hung, and how often it is restarted."""

    @property
    def model_dir(self) -> str | None:
        """The export."""
        return self.export

    @property
    def roles(self) -> tuple[Role, ...]:
        """All roles, shards first: the replicas of shard 0, those of shard 1, ..."""
        shards = tuple(Role(RoleKind.SHARD, index) for index in range(self.shards * self.replicas))
        return shards + tuple(Role(RoleKind.FRONT_END, index) for index in range(self.front_ends))

    @property
    def shape(self) -> dict[str, int]:
        """The number of processes by the kind's name, for messages."""
        return {"shards": self.shards, "replicas": self.replicas, "front_ends": self.front_ends}

    def python_args(self, role: Role) -> list[str]:
        """Return the arguments of Python for `role`."""
        if role.kind is RoleKind.SHARD:
            shard, replica = divmod(role.index, self.replicas)
            own = ["--shard", str(shard), "--shards", str(self.shards), "--replica", str(replica)]
            return ["-m", "monolith.cli", "serve-shard", self.export, *own, *self.shard_args]
        http, grpc = (port + role.index if port else 0 for port in (self.http_port, self.grpc_port))
        ports = ["--http-port", str(http), "--grpc-port", str(grpc)]
        return ["-m", "monolith.cli", "serve", self.export, *ports, *self.serve_args]

    def environment(self, role: Role, discovery: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables of `role`. Shards announce themselves in `discovery`, and front ends find them there."""
        secret, found = reveal(self.token), discovery or {}
        # Clients of front ends need no token that only the launcher knows.
        variable = TOKEN_VARIABLE if role.kind is RoleKind.SHARD else SHARD_TOKEN_VARIABLE
        token = {} if secret is None else {variable: secret}
        where = {
            "file": f"file={found.get('MONOLITH_DISCOVERY_FOLDER')}",
            "ray": f"ray={self.uuid}@{found.get('MONOLITH_RAY_ADDRESS')}",
        }.get(found.get("MONOLITH_DISCOVERY_TYPE", ""))
        return token | ({} if where is None else {SHARDS_VARIABLE: where})
