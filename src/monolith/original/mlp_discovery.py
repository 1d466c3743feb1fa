"""`MLPServiceDiscovery`: the MLP scheduler tells every process the addresses of all others."""

from __future__ import annotations

import logging
import threading

from monolith.cluster.discovery import ServiceDiscovery, check_entry, check_name
from monolith.cluster.net import check_port, split_address
from monolith.errors import ConfigError, DiscoveryError, InvalidArgumentError
from monolith.original.mlp import CheckPort, MLPEnv

__all__ = ["MLPServiceDiscovery"]

_log = logging.getLogger(__name__)
_PORT_CHECK_SECS = 3600.0
_SAY_SECS = 30.0
_NAMES = ("ps", "worker", "chief")


class MLPServiceDiscovery(ServiceDiscovery):
    """The addresses of `MLPEnv`, without those that were taken back here.

    Addresses are known before their processes run, so asking for the `ps` waits until each of them accepts connections.
    Registering changes nothing for others; it only ends a `deregister` of this process.

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
        """Take `env`, by default that of this process; `ConfigError` if the scheduler did not start it."""
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
        """Show an entry again; `InvalidArgumentError` if it is not the one the scheduler knows."""
        self._check_expected(name, index, addr)
        with self._lock:
            self._filters.discard((name, index))

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Hide an entry from this process; `InvalidArgumentError` if it is not the one the scheduler knows."""
        self._check_expected(name, index, addr)
        with self._lock:
            self._filters.add((name, index))

    def query(self, name: str, skip_port_check: bool = False) -> dict[int, str]:
        """Addresses of a service by index. `ps` only when they answer, `DiscoveryError` if one does not within an hour.

        Every 30 seconds a log line says which server is being waited for.
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

    def query_all(self, skip_port_check: bool = False) -> dict[str, dict[int, str]]:
        """Addresses of `ps`, `worker` and `chief`, by name and index."""
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
        # The host may be known by several addresses; a port is a port.
        expected = self._env.get_port(name, index)
        if port != expected:
            raise InvalidArgumentError(f"addr: expected port {expected} of {name} {index}, got {addr!r}")
