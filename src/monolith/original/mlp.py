"""`MLPEnv` and `MLPServiceDiscovery`: the processes of a job as the MLP scheduler describes them in the environment."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property

from monolith.cluster.discovery.service_discovery import ScheduledDiscovery, check_entry, check_name
from monolith.cluster.net import check_port, concat_ip_and_port, get_local_host, split_address
from monolith.cluster.role import get_mpi_local_size, get_mpi_rank, get_mpi_size
from monolith.console import Reminder
from monolith.errors import ConfigError, DiscoveryError, InvalidArgumentError

__all__ = ["MLPEnv", "MLPServiceDiscovery"]

_log = logging.getLogger(__name__)
_ROLE = re.compile(r"MLP_([A-Z][A-Z0-9_]*)_NUM")
_DEFAULT_PORT = 2222
_WAIT_POLL_SECS = 5.0
_JOIN_POLL_SECS = 10.0
_JOIN_CONNECT_SECS = 60.0

CheckPort = Callable[[str, int, float], bool]
"""Tells whether a host accepts connections on a port within this many seconds."""


class MLPEnv:
    """The roles of a job, their addresses, and the role of this process, read once from the environment.

    Names of roles are case-insensitive. Under `mpirun` the workers are its processes: the index is the rank, the processes
    of one machine share its entry, and their ports count up from that of worker 0.

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
        """Read `environ`, by default that of this process. Raises `ConfigError` if a variable should be a number and is not."""
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
        """Whether the scheduler started this process, that is, names at least one role."""
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
        """Return the number of processes with `role`, by default that of this process. 0 if the job has no such role."""
        return self.all_roles.get(self._role(role), 0)

    def get_all_host(self, role: str | None = None, is_primary: bool = True) -> str:
        """Return the hosts of a role separated by commas, or an empty string if there are none."""
        return self._get(f"MLP_{self._role(role)}_ALL_{_primary(is_primary)}HOSTS")

    def get_all_addrs(self, role: str | None = None, is_primary: bool = True) -> list[str]:
        """Return the addresses of all processes of a role, in order."""
        line = self._get(f"MLP_{self._role(role)}_ALL_{_primary(is_primary)}ADDRS")
        return [address.strip() for address in line.split(",") if address.strip()]

    def get_host(self, role: str | None = None, index: int | None = None, is_primary: bool = True) -> str | None:
        """Return the host of one process of a role, or None if the environment does not say it."""
        role, index = self._role(role), self._index(index)
        entry = index // get_mpi_local_size(self._environ) if self._is_mpi(role) else index
        return self._get(f"MLP_{role}_{entry}_{_primary(is_primary)}HOST") or None

    def get_port(self, role: str | None = None, index: int | None = None) -> int:
        """Return the port of one process of a role, by default 2222 (plus the rank under `mpirun`)."""
        role, index = self._role(role), self._index(index)
        if self._is_mpi(role):
            return self._number(f"MLP_{role}_0_PORT", _DEFAULT_PORT) + index
        return self._number(f"MLP_{role}_{index}_PORT", _DEFAULT_PORT)

    def get_addr(self, role: str | None = None, index: int | None = None, is_primary: bool = True) -> str | None:
        """Return `host:port` of one process of a role, or None if the environment does not say its host."""
        host = self.get_host(role, index, is_primary)
        return None if host is None else concat_ip_and_port(host.strip("[]"), self.get_port(role, index))

    def dispatcher_addr(self, role: str | None = None) -> str | None:
        """Return `host:port` of the data service's dispatcher, or None if the job has none."""
        return self.get_addr(role or "dispatcher", 0)

    def dispatcher_target(self, role: str | None = None) -> str:
        """Return the URL of the dispatcher, one on this machine if the job has none."""
        return f"grpc://{self.dispatcher_addr(role) or 'localhost:5050'}"

    def wait(self, role: str | None = None, index: int = 0, timeout: float = -1, use_ssh: bool = True) -> bool:
        """Wait until a process accepts connections on its SSH port, or on its own port with `use_ssh=False`.

        Returns False if it does not within `timeout` seconds. A negative `timeout` means no limit. A log line every 30 seconds
        says what is being waited for.
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
        """Wait until a process, by default worker 0, has started and ended: the job is then over for those that serve it."""
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
        # Cores and memory may be given as fractions. Whole numbers are enough here.
        if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
            raise ConfigError(f"{name}: expected a number, got {text!r}")
        return int(float(text))


def _primary(is_primary: bool) -> str:
    return "PRIMARY_" if is_primary else ""


_PORT_CHECK_SECS = 3600.0
_SAY_SECS = 30.0
_NAMES = ("ps", "worker", "chief")


class MLPServiceDiscovery(ScheduledDiscovery):
    """The addresses of `MLPEnv`, without those that this process deregistered.

    Addresses are known before their processes run, so `query("ps")` waits until each of them accepts connections.
    Registering changes nothing for other processes. It only undoes a `deregister` in this one.

    Example:
        >>> env = MLPEnv({
        ...     "MLP_ROLE": "worker", "MLP_WORKER_NUM": "1", "MLP_WORKER_0_PRIMARY_HOST": "10.0.0.7",
        ...     "MLP_WORKER_0_PORT": "2222", "MLP_PORT": "2222",
        ... })
        >>> discovery = MLPServiceDiscovery(env)
        >>> discovery.server_type, discovery.index, discovery.query("worker")
        ('worker', 0, {0: '10.0.0.7:2222'})
    """

    def __init__(
        self, env: MLPEnv | None = None, *, check: CheckPort = check_port, port_check_secs: float = _PORT_CHECK_SECS
    ) -> None:
        """Use `env`, by default that of this process. Raises `ConfigError` if the scheduler did not start it."""
        self._env = MLPEnv() if env is None else env
        if not self._env.available:
            raise ConfigError("MLP_<ROLE>_NUM: expected the roles of a job in the environment, none is set")
        self._check, self._port_check_secs = check, port_check_secs
        self._filters: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @property
    def server_type(self) -> str:
        """The service this process belongs to."""
        return self._env.role.lower()

    @property
    def index(self) -> int:
        """The index of this process in its service."""
        return self._env.index

    @property
    def addr(self) -> str:
        """The address this process should serve at."""
        return self._address(self.server_type, self.index)

    def register(self, name: str, index: int, addr: str) -> None:
        """Show an entry again. Raises `InvalidArgumentError` if it is not the one that the scheduler knows."""
        self._check_expected(name, index, addr)
        with self._lock:
            self._filters.discard((name, index))

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Hide an entry from this process. Raises `InvalidArgumentError` if it is not the one that the scheduler knows."""
        self._check_expected(name, index, addr)
        with self._lock:
            self._filters.add((name, index))

    def query(self, name: str, skip_port_check: bool = False) -> dict[int, str]:
        """Return the addresses of a service by index, those of the `ps` when all of them accept connections.

        A log line every 30 seconds says which server is being waited for. Raises `DiscoveryError` if one does not accept
        connections within an hour.
        """
        check_name(name)
        name = name.lower()
        with self._lock:
            shown = [index for index in range(self._env.num_replicas(name)) if (name, index) not in self._filters]
        found = {index: self._address(name, index) for index in shown}
        if name == "ps" and not skip_port_check:
            for index, address in found.items():
                self._wait_for_port(index, address)
        return found

    def _wait_for_port(self, index: int, address: str) -> None:
        waited = 0.0
        while not self._check(*split_address(address), min(_SAY_SECS, self._port_check_secs - waited)):
            waited += _SAY_SECS
            if waited >= self._port_check_secs:
                wanted = f"ps {index} at {address} to accept connections within {self._port_check_secs:g} seconds"
                raise DiscoveryError(f"expected {wanted}; see whether it is running")
            _log.info("waiting for ps %d to accept connections at %s, for %.0f s so far", index, address, waited)

    def query_now(self, name: str) -> dict[int, str]:
        """Return the addresses of a service by index, whether or not their processes run."""
        return self.query(name, skip_port_check=True)

    def query_all(self, skip_port_check: bool = False) -> dict[str, dict[int, str]]:
        """Return the addresses of `ps`, `worker` and `chief`, by name and index."""
        return {name: self.query(name, skip_port_check) for name in _NAMES}

    def deregister_all(self) -> None:
        """Hide every entry from this process."""
        with self._lock:
            self._filters.update(
                (role.lower(), index) for role, count in self._env.all_roles.items() for index in range(count)
            )

    def _address(self, name: str, index: int) -> str:
        address = self._env.get_addr(name, index)
        if address is None:
            raise ConfigError(
                f"MLP_{name.upper()}_{index}_PRIMARY_HOST: expected the host of {name} {index}, it is not set"
            )
        return address

    def _check_expected(self, name: str, index: int, addr: str) -> None:
        _, port = check_entry(name, index, addr)
        count = self._env.num_replicas(name)
        if name != name.lower() or index >= count:
            roles = ", ".join(f"{role.lower()} below {number}" for role, number in self._env.all_roles.items())
            raise InvalidArgumentError(f"{name} {index}: expected one of the job's, {roles}")
        # A host may have several addresses, so only ports are compared.
        expected = self._env.get_port(name, index)
        if port != expected:
            raise InvalidArgumentError(f"addr: expected port {expected} of {name} {index}, got {addr!r}")
