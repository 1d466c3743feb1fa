"""`RayRoles`: the roles of a job as actors of a Ray cluster, which find each other through Ray."""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from monolith.cluster.discovery.ray import RayServiceDiscovery, RaySession, import_ray
from monolith.cluster.launch.local import ChildProcess, OnLine
from monolith.cluster.launch.roles import Job, JobRoles, Role, RoleKind, ServeRoles
from monolith.cluster.net import get_local_ip
from monolith.config import Config
from monolith.errors import ConfigError

__all__ = ["Look", "RayPlacement", "RayProcess", "RayRoles", "RoleActor", "must_say_host"]

_LISTENS = "MONOLITH_SERVER"
_KEPT_LINES = 1000  # lines kept for a launcher that does not read them
_LAST_LINES = 20
_LOOK_SECS = 0.5  # an actor answers at once when there is news, else after this time
_PATIENCE_SECS = 60.0
_LOST, _NEVER_STARTED = -9, -15
# Rows and batches do not pass through Ray, so its object store may be as small as Ray allows.
_OBJECT_STORE_BYTES = 80 * 2**20


@dataclass(frozen=True)
class Look:
    """The state of a role, as its actor reports it."""

    life: str
    """Identifies an incarnation of the actor."""
    pid: int | None
    code: int | None
    lines: tuple[str, ...]
    """The new lines."""
    next: int
    """The line to start from the next time."""
    silence: float = 0.0
    """Seconds since the role last showed that it is alive. 0 if it never has."""


class RoleActor:
    """Starts the process of a role in its constructor, so an actor that Ray restarts starts its role again.

    The process ends with the actor, however that ends. The class does not use Ray itself.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     actor = RoleActor(["-c", "print('hello')"], {}, f"{folder}/log", folder)
        ...     look = actor.look(wait=0.1)
        ...     while look.code is None:
        ...         look = actor.look(look.life, 0, wait=0.1)
        >>> look.lines, look.code
        (('hello',), 0)
    """

    def __init__(
        self,
        python_args: Sequence[str],
        environment: Mapping[str, str],
        log: str,
        folder: str,
        *,
        says_host: Literal["option", "variable"] | None = None,
    ) -> None:
        """Run Python with `python_args` in `folder`, which this machine must have.

        With `says_host` the process is told to listen on the address of this machine, by the option `--host` at the end of its
        arguments or by `host` in the variable MONOLITH_SERVER.
        """
        self._life = secrets.token_hex(8)
        self._lines: list[str] = []
        self._dropped = 0
        self._changed = threading.Condition()
        command = [sys.executable, *python_args, *(["--host", get_local_ip()] if says_host == "option" else [])]
        if says_host == "variable":
            listens = {**_listens(environment), "host": get_local_ip()}
            environment = {**environment, _LISTENS: json.dumps(listens)}
        self._child = ChildProcess(
            command, log=Path(log), environment=environment, folder=Path(folder), on_line=self._hear
        )

    def look(self, life: str = "", after: int = 0, *, wait: float = 0.0) -> Look:
        """Return what is new since line `after` of incarnation `life`. Waits up to `wait` seconds for new lines."""
        after = after if life == self._life else 0
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) + self._dropped > after, timeout=wait)
        code = self._child.poll()  # before the lines, so that the last of them come with the code
        with self._changed:
            new = tuple(self._lines[max(after - self._dropped, 0) :])
            count = self._dropped + len(self._lines)
            return Look(self._life, self._child.pid, code, new, count, self._child.silence)

    def ask_to_end(self) -> None:
        """Ask the role to end."""
        self._child.ask_to_end()

    def _hear(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            excess = len(self._lines) - _KEPT_LINES
            if excess > 0:
                del self._lines[:excess]
                self._dropped += excess
            self._changed.notify_all()


class RayProcess:
    """Polls an actor for the state of its role, one request at a time, without waiting for the answer.

    Ray restarts an actor that was lost, and its role with it, and the answer then has another `life`. An actor that Ray has
    given up counts as killed.
    """

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 - Ray's handles are untyped
        on_line: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`actor` runs a `RoleActor`."""
        self._ray = import_ray()
        self._actor, self._on_line, self._clock = actor, on_line, clock
        self._complain_at = clock() + _PATIENCE_SECS
        self._question: Any = None
        self._life, self._after = "", 0
        self._code: int | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.pid: int | None = None
        self.restarted = 0
        self.silence = 0.0

    @property
    def last_lines(self) -> list[str]:
        """The end of what it has written."""
        return list(self._lines)

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs, waits for a machine, or is restarted."""
        if self._code is not None:
            return self._code
        if self._question is None:
            self._question = self._actor.look.remote(self._life, self._after, wait=_LOOK_SECS)
        answered, _ = self._ray.wait([self._question], timeout=0)
        if answered:
            self._question = None
            self._hear(answered[0])
        elif not self._life and self._clock() >= self._complain_at:
            self._complain_at = math.inf
            self._say("has not started yet: does a machine of the cluster have enough resources for it?")
        return self._code

    def ask_to_end(self) -> None:
        """Ask the role to end. An actor that has not started yet is ended."""
        if self._life:
            self._actor.ask_to_end.remote()
        else:
            self._end(_NEVER_STARTED)

    def kill(self) -> None:
        """End the actor, and with it the role."""
        self._end(_LOST)

    def _hear(self, answer: Any) -> None:  # noqa: ANN401 - Ray's references are untyped
        try:
            self._take(self._ray.get(answer))
        except self._ray.exceptions.ActorUnavailableError:
            return  # the next poll asks again
        except self._ray.exceptions.RayError as error:
            self._say(f"the actor of this role is lost: {str(error).strip().splitlines()[0]}")
            self._end(_LOST)

    def _take(self, look: Look) -> None:
        if self._life and look.life != self._life:
            self.restarted += 1
        self._life, self._after, self.pid, self.silence = look.life, look.next, look.pid, look.silence
        for line in look.lines:
            self._say(line)
        if look.code is not None:
            self._end(look.code)

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._on_line(line)

    def _end(self, code: int) -> None:
        """End the actor, which frees its resources in the cluster."""
        if self._code is None:
            self._code = code
            self._ray.kill(self._actor, no_restart=True)


class RayPlacement(Config):
    """The resources of each role. Ray waits until a machine has them.

    Example:
        >>> RayPlacement(worker_cpus=4.0).cpus(JobRoles(num_ps=2, num_workers=3, uuid="job", worker_args=()))
        14.0
    """

    ps_cpus: Annotated[float, Field(ge=0)] = 1.0
    """Processors of a server or shard."""
    ps_memory: Annotated[int | None, Field(gt=0)] = None
    """Bytes of memory of a server or shard."""
    worker_cpus: Annotated[float, Field(ge=0)] = 1.0
    """Processors of a worker, rank or front end."""
    worker_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of a worker or rank."""

    def cpus(self, job: Job) -> float:
        """Return the processors of a whole job."""
        return float(sum(self.options(role)["num_cpus"] for role in job.roles))

    def options(self, role: Role) -> dict[str, Any]:
        """Return the options for Ray. Servers are spread over the machines of the cluster."""
        if role.kind in (RoleKind.PS, RoleKind.SHARD):
            return {"num_cpus": self.ps_cpus, "memory": self.ps_memory, "scheduling_strategy": "SPREAD"}
        return {"num_cpus": self.worker_cpus, "num_gpus": self.worker_gpus}


class RayRoles:
    """Starts roles in the Ray cluster at `address`, or in one on this machine that ends with this object.

    Ray restarts a role that is lost with its actor or machine. The supervisor restarts a role that fails by itself, and ends the
    job if both together exceed the restart budget of `job.liveness`.
    """

    def __init__(
        self,
        job: Job,
        log_dir: Path,
        *,
        address: str | None = None,
        placement: RayPlacement | None = None,
        on_line: OnLine = lambda role, line: None,
    ) -> None:
        """Join or start the cluster. No role is started yet."""
        self._job, self._log_dir, self._on_line = job, log_dir.resolve(), on_line
        self._placement = placement or RayPlacement()
        self._session = _session(address, self._placement.cpus(job))
        self._ray = import_ray()
        try:
            self._says_host = must_say_host(job, _hosts(self._ray), os.environ)
            self._discovery = RayServiceDiscovery(job.uuid, self._session.address, is_owner=True)
        except BaseException:
            self._session.close()
            raise

    def start(self, role: Role) -> RayProcess:
        """Create the actor of a role, which starts when a machine has the resources."""
        discovery = {"MONOLITH_DISCOVERY_TYPE": "ray", "MONOLITH_RAY_ADDRESS": self._session.address}
        actor = (
            self._ray.remote(RoleActor)
            .options(
                name=f"{self._job.uuid}-{role.file_name}-{os.urandom(4).hex()}",
                # Without a limit: the supervisor counts restarts and ends the role after too many.
                max_restarts=-1 if self._job.liveness.restarts else 0,
                max_task_retries=-1,
                **self._placement.options(role),
            )
            .remote(
                self._job.python_args(role),
                _passed_on(os.environ) | self._job.environment(role, discovery),
                str(self._log_dir / f"{role.file_name}.log"),
                str(Path.cwd()),
                says_host=self._says_host.get(role.kind),
            )
        )
        return RayProcess(actor, lambda line: self._on_line(role, line))

    def close(self) -> None:
        """Leave the cluster, which ends the remaining actors."""
        self._discovery.close()
        self._session.close()

    def __enter__(self) -> RayRoles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _session(address: str | None, cpus: float) -> RaySession:
    if address is not None:
        return RaySession(address)
    # Ray counts processors but does not reserve them, so a job may be larger than this machine.
    enough = max(math.ceil(cpus), os.cpu_count() or 1)
    return RaySession(None, num_cpus=enough, object_store_memory=_OBJECT_STORE_BYTES)


def _hosts(ray: Any) -> set[str]:  # noqa: ANN401 - an untyped package
    return {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


SaysHost = dict[RoleKind, Literal["option", "variable"]]
"""How roles of each kind are told to listen on the address of their machine. Kinds that are not in it are not told."""


def must_say_host(job: Job, hosts: set[str], environ: Mapping[str, str]) -> SaysHost:
    """Return the roles that must listen on an address for other machines, where nobody has named one.

    Raises:
        ConfigError: they have no certificate.
    """
    says: SaysHost = {}
    if len(hosts) <= 1:
        return says
    if isinstance(job, ServeRoles) and "--host" not in job.shard_args:
        if "--tls-cert" not in job.shard_args:
            raise ConfigError(
                f"--shard-args: the Ray cluster has {len(hosts)} machines, and shards that others can reach need a "
                "certificate; give --shard-args '--tls-cert FILE --tls-key FILE'"
            )
        says[RoleKind.SHARD] = "option"
    if not isinstance(job, JobRoles):
        return says
    if job.num_ps and "--host" not in job.ps_args:
        if "--tls-cert" not in job.ps_args:
            raise ConfigError(
                f"--ps-args: the Ray cluster has {len(hosts)} machines, and servers that others can reach need a "
                "certificate; give --ps-args '--tls-cert FILE --tls-key FILE'"
            )
        says[RoleKind.PS] = "option"
    listens = _listens(environ)
    if job.num_ranks > 1 and "host" not in listens:
        if "tls_cert" not in listens:
            raise ConfigError(
                f"{_LISTENS}: the Ray cluster has {len(hosts)} machines, and ranks that others can reach need a certificate; set "
                f'{_LISTENS}=\'{{"tls_cert": "FILE", "tls_key": "FILE"}}\' and MONOLITH_CLIENT=\'{{"tls_root_certs": "FILE"}}\''
            )
        says[RoleKind.RANK] = "variable"
    return says


def _listens(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of servers and ranks in the environment. `RunnerConfig` refuses what is wrong in them."""
    try:
        found = json.loads(environ.get(_LISTENS, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a role on another machine gets: those of Monolith, and PYTHONPATH."""
    return {name: text for name, text in environ.items() if name.startswith("MONOLITH_") or name == "PYTHONPATH"}
