"""`MLPEnv`: what the MLP scheduler tells a process through its environment, and waiting for the others it names."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import cached_property

from monolith.cluster.mpi import get_mpi_local_size, get_mpi_rank, get_mpi_size
from monolith.cluster.net import check_port, concat_ip_and_port
from monolith.console import Reminder
from monolith.errors import ConfigError
from monolith.original.yarn import get_local_host

__all__ = ["MLPEnv"]

_log = logging.getLogger(__name__)
_ROLE = re.compile(r"MLP_([A-Z][A-Z0-9_]*)_NUM")
_DEFAULT_PORT = 2222
_WAIT_POLL_SECS = 5.0
_JOIN_POLL_SECS = 10.0
_JOIN_CONNECT_SECS = 60.0

CheckPort = Callable[[str, int, float], bool]
"""Whether a host accepts connections on a port within seconds."""


class MLPEnv:
    """The roles of a job, their addresses, and which of them this process is; read once from the environment.

    Roles are named in any case. Under `mpirun` the workers are its processes: the index is the rank, and the processes of
    one machine share its entry and count their ports up from that of worker 0.

    Example:
        >>> env = MLPEnv({
        ...     "MLP_ROLE": "worker", "MLP_ROLE_INDEX": "1", "MLP_PORT": "2222", "MLP_WORKER_NUM": "2", "MLP_PS_NUM": "1",
        ...     "MLP_PS_0_PRIMARY_HOST": "10.0.0.7", "MLP_PS_0_PORT": "3333",
        ... })
        >>> env.role, env.index, env.all_roles, env.get_addr("ps", 0)
        ('WORKER', 1, {'WORKER': 2, 'PS': 1}, '10.0.0.7:3333')
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        check: CheckPort = check_port,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Read `environ`, the process's own by default; a number that is none is a `ConfigError`."""
        self._environ = dict(os.environ if environ is None else environ)
        self._mlp_env = {name: value for name, value in self._environ.items() if name.startswith(("MLP_", "MPI_"))}
        self._check, self._clock, self._sleep = check, clock, sleep
        self.framework = self._get("MLP_FRAMEWORK")
        self.ssh_port = self._number("MLP_SSH_PORT")
        self.log_path = self._get("MLP_LOG_PATH")
        self.debug_port = self._number("MLP_DEBUG_PORT")
        self.entrypoint_dir = self._get("MLP_ENTRYPOINT_DIR")
        self.task_cmd = self._get("MLP_TASK_CMD")
        self.role = self._get("MLP_ROLE").upper()
        self.all_roles = {match[1]: self._number(name) for name in self._mlp_env if (match := _ROLE.fullmatch(name))}
        self.index, self.port = self._number("MLP_ROLE_INDEX"), self._number("MLP_PORT")
        if self.enable_mpi:
            self.index = get_mpi_rank(self._environ)
            self.port += self.index
            self.all_roles["WORKER"] = get_mpi_size(self._environ)
        self.cpu, self.gpu, self.mem = (self._number(f"MLP_{name}") for name in ("CPU", "GPU", "MEM"))
        self.gpu_type = self._get("MLP_GPU_TYPE")

    @property
    def available(self) -> bool:
        """Whether the scheduler started this process: it has told of at least one role."""
        return bool(self.all_roles)

    @property
    def enable_mpi(self) -> bool:
        """Whether this is a worker that `mpirun` started."""
        return self.role == "WORKER" and "OMPI_COMM_WORLD_RANK" in self._environ

    @cached_property
    def host(self) -> str:
        """The host under which others reach this process."""
        return get_local_host(self._environ)

    def num_replicas(self, role: str | None = None) -> int:
        """How many processes have `role`, this process's own by default; 0 if the job has no such role."""
        return self.all_roles.get(self._role(role), 0)

    def get_all_host(self, role: str | None = None, is_primary: bool = True) -> str:
        """The hosts of a role as one line with commas, empty if there are none."""
        return self._get(f"MLP_{self._role(role)}_ALL_{_primary(is_primary)}HOSTS")

    def get_all_addrs(self, role: str | None = None, is_primary: bool = True) -> list[str]:
        """The addresses of all processes of a role, in order."""
        line = self._get(f"MLP_{self._role(role)}_ALL_{_primary(is_primary)}ADDRS")
        return [address.strip() for address in line.split(",") if address.strip()]

    def get_host(self, role: str | None = None, index: int | None = None, is_primary: bool = True) -> str | None:
        """The host of one process of a role; None if the environment does not tell."""
        role, index = self._role(role), self._index(index)
        entry = index // get_mpi_local_size(self._environ) if self._is_mpi(role) else index
        return self._get(f"MLP_{role}_{entry}_{_primary(is_primary)}HOST") or None

    def get_port(self, role: str | None = None, index: int | None = None) -> int:
        """The port of one process of a role, 2222 (plus the rank, under `mpirun`) if the environment does not tell."""
        role, index = self._role(role), self._index(index)
        if self._is_mpi(role):
            return self._number(f"MLP_{role}_0_PORT", _DEFAULT_PORT) + index
        return self._number(f"MLP_{role}_{index}_PORT", _DEFAULT_PORT)

    def get_addr(self, role: str | None = None, index: int | None = None, is_primary: bool = True) -> str | None:
        """`host:port` of one process of a role; None if the environment does not tell its host."""
        host = self.get_host(role, index, is_primary)
        return None if host is None else concat_ip_and_port(host.strip("[]"), self.get_port(role, index))

    def dispatcher_addr(self, role: str | None = None) -> str | None:
        """`host:port` of the data service's dispatcher; None if the job has none."""
        return self.get_addr(role or "dispatcher", 0)

    def dispatcher_target(self, role: str | None = None) -> str:
        """The dispatcher as a URL, on this machine if the job has none."""
        return f"grpc://{self.dispatcher_addr(role) or 'localhost:5050'}"

    def wait(self, role: str | None = None, index: int = 0, timeout: float = -1, use_ssh: bool = True) -> bool:
        """Wait until a process accepts connections on its SSH port, or on its own port with `use_ssh=False`.

        Returns False if it does not within `timeout` seconds. A negative `timeout` is no limit; then what is being waited for
        is logged every 30 seconds.
        """
        host, port = self._target(role, index, use_ssh)
        deadline = math.inf if timeout < 0 else self._clock() + timeout
        reminder = Reminder(_log, clock=self._clock)
        while not self._check(host, port, 1.0):
            if self._clock() + _WAIT_POLL_SECS > deadline:
                return False
            reminder.waiting("%s %d to accept connections at %s:%d", self._role(role).lower(), index, host, port)
            self._sleep(_WAIT_POLL_SECS)
        return True

    def join(self, role: str = "worker", index: int = 0, use_ssh: bool = True) -> None:
        """Return when a process, worker 0 by default, has come and gone: then the job is over for those who serve it."""
        self.wait(role, index, use_ssh=use_ssh)
        host, port = self._target(role, index, use_ssh)
        while self._check(host, port, _JOIN_CONNECT_SECS):
            self._sleep(_JOIN_POLL_SECS)

    def _target(self, role: str | None, index: int, use_ssh: bool) -> tuple[str, int]:
        host = self.get_host(role, index)
        if host is None:
            raise ConfigError(
                f"MLP_{self._role(role)}_{index}_PRIMARY_HOST: expected the host to wait for, it is not set"
            )
        if use_ssh and not self.ssh_port:
            raise ConfigError("MLP_SSH_PORT: expected the port to wait for, it is not set; or wait with use_ssh=False")
        return host, self.ssh_port if use_ssh else self.get_port(role, index)

    def _is_mpi(self, role: str) -> bool:
        return self.enable_mpi and role == "WORKER"

    def _role(self, role: str | None) -> str:
        return self.role if role is None else role.upper()

    def _index(self, index: int | None) -> int:
        return self.index if index is None else index

    def _get(self, name: str, default: str = "") -> str:
        return self._mlp_env.get(name, default).strip().strip("\"'")

    def _number(self, name: str, default: int = 0) -> int:
        text = self._get(name)
        if not text:
            return default
        # Cores and memory may be given as fractions of a machine; nothing here counts in less than one.
        if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
            raise ConfigError(f"{name}: expected a number, got {text!r}")
        return int(float(text))


def _primary(is_primary: bool) -> str:
    return "PRIMARY_" if is_primary else ""
