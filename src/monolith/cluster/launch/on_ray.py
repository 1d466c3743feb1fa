"""`RayRoles`: the roles of a job as actors of a Ray cluster, which find each other through Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from monolith.cluster.launch.local import OnLine
from monolith.cluster.launch.ray_process import RayProcess
from monolith.cluster.launch.role_actor import RoleActor
from monolith.cluster.launch.roles import JobRoles, Role, RoleKind
from monolith.cluster.ray_discovery import RayServiceDiscovery
from monolith.cluster.ray_session import RaySession, import_ray
from monolith.config import Config
from monolith.errors import ConfigError

__all__ = ["RayPlacement", "RayRoles", "must_say_host"]

# Rows and batches do not go through Ray: its store of objects may be as small as Ray allows.
_OBJECT_STORE_BYTES = 80 * 2**20


class RayPlacement(Config):
    """What each role takes of a machine; Ray waits until one has it.

    Example:
        >>> RayPlacement(worker_cpus=4.0).cpus(JobRoles(num_ps=2, num_workers=3, uuid="job", worker_args=()))
        14.0
    """

    ps_cpus: Annotated[float, Field(ge=0)] = 1.0
    """Processors of a server."""
    ps_memory: Annotated[int | None, Field(gt=0)] = None
    """Bytes of memory of a server."""
    worker_cpus: Annotated[float, Field(ge=0)] = 1.0
    """Processors of a worker."""
    worker_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of a worker."""

    def cpus(self, job: JobRoles) -> float:
        """Processors of a whole job."""
        return job.num_ps * self.ps_cpus + job.num_workers * self.worker_cpus

    def options(self, role: Role) -> dict[str, Any]:
        """What Ray is told of a role's place: servers go as far apart as the cluster is wide."""
        if role.kind is RoleKind.PS:
            return {"num_cpus": self.ps_cpus, "memory": self.ps_memory, "scheduling_strategy": "SPREAD"}
        return {"num_cpus": self.worker_cpus, "num_gpus": self.worker_gpus}


class RayRoles:
    """Starts roles in a Ray cluster: the one at `address`, or one of this machine alone that ends with this object.

    Ray restarts a role that is lost with its actor or machine. The supervisor restarts a role that fails by itself, and ends the
    job if both together exceed the restart budget of `job.liveness`.
    """

    def __init__(
        self,
        job: JobRoles,
        log_dir: Path,
        *,
        address: str | None = None,
        placement: RayPlacement | None = None,
        on_line: OnLine = lambda role, line: None,
    ) -> None:
        """Join or start the cluster; no role is started yet."""
        self._job, self._log_dir, self._on_line = job, log_dir.resolve(), on_line
        self._placement = placement or RayPlacement()
        self._session = _session(address, self._placement.cpus(job))
        self._ray = import_ray()
        try:
            self._says_host = must_say_host(job.ps_args, _hosts(self._ray))
            self._discovery = RayServiceDiscovery(job.uuid, self._session.address, is_owner=True)
        except BaseException:
            self._session.close()
            raise

    def start(self, role: Role) -> RayProcess:
        """Make the actor of a role; it starts when a machine has room for it."""
        discovery = {"MONOLITH_DISCOVERY_TYPE": "ray", "MONOLITH_RAY_ADDRESS": self._session.address}
        actor = (
            self._ray.remote(RoleActor)
            .options(
                name=f"{self._job.uuid}-{role.file_name}-{os.urandom(4).hex()}",
                # Without a limit: the supervisor counts them, and ends the role when there were too many.
                max_restarts=-1 if self._job.liveness.restarts else 0,
                max_task_retries=-1,
                **self._placement.options(role),
            )
            .remote(
                self._job.python_args(role),
                _passed_on(os.environ) | self._job.environment(role, discovery),
                str(self._log_dir / f"{role.file_name}.log"),
                str(Path.cwd()),
                says_host=self._says_host and role.kind is RoleKind.PS,
            )
        )
        return RayProcess(actor, lambda line: self._on_line(role, line))

    def close(self) -> None:
        """Leave the cluster; actors that are left end with that."""
        self._discovery.close()
        self._session.close()

    def __enter__(self) -> RayRoles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _session(address: str | None, cpus: float) -> RaySession:
    if address is not None:
        return RaySession(address)
    # Ray counts processors, it does not hand them out: on one machine, a job larger than it runs all the same.
    enough = max(math.ceil(cpus), os.cpu_count() or 1)
    return RaySession(None, num_cpus=enough, object_store_memory=_OBJECT_STORE_BYTES)


def _hosts(ray: Any) -> set[str]:  # noqa: ANN401 - an untyped package
    return {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


def must_say_host(ps_args: tuple[str, ...], hosts: set[str]) -> bool:
    """Whether servers must listen where other machines reach them, and have not been told where."""
    if len(hosts) <= 1 or "--host" in ps_args:
        return False
    if "--tls-cert" not in ps_args:
        raise ConfigError(
            f"--ps-args: the Ray cluster has {len(hosts)} machines, and servers that others can reach need a "
            "certificate; give --ps-args '--tls-cert FILE --tls-key FILE'"
        )
    return True


def _passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What of our environment a role on another machine gets: what was meant for it, and where Python looks for modules."""
    return {name: text for name, text in environ.items() if name.startswith("MONOLITH_") or name == "PYTHONPATH"}
