"""`ServiceDiscovery`: the interface through which the processes of a job find each other."""

from __future__ import annotations

import functools
import logging
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self, TypeVar

from monolith.cluster.net import split_address
from monolith.errors import DiscoveryError, InvalidArgumentError

__all__ = ["ScheduledDiscovery", "ServiceDiscovery", "ServiceDiscoveryType", "retry_with_socket_error"]

_logger = logging.getLogger(__name__)
# Names become parts of paths and tags, so special characters are not allowed.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_TRIES = 5
_MAX_BACKOFF_SECS = 5.0

Result = TypeVar("Result")


class ServiceDiscoveryType(StrEnum):
    """The back ends, as configurations name them."""

    PRIMUS = "primus"
    """TF_CONFIG, which Primus and others set."""
    CONSUL = "consul"
    """Consul."""
    ZK = "zk"
    """ZooKeeper."""
    MLP = "mlp"
    """The environment of the MLP scheduler."""
    FILE = "file"
    """Files in a folder that all processes see."""
    RAY = "ray"
    """An actor of a Ray cluster."""


class ServiceDiscovery(ABC):
    """Announces the address of this process to others, and finds theirs.

    A process is `index` of the service `name`, as in ps 0, ps 1, worker 0. All methods may be called from any thread.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     discovery.register("ps", 0, "10.0.0.7:2222")
        ...     discovery.query("ps")
        {0: '10.0.0.7:2222'}
    """

    @abstractmethod
    def register(self, name: str, index: int, addr: str) -> None:
        """Announce that `index` of `name` is at `addr`, in place of an earlier address. It is visible on return."""

    @abstractmethod
    def deregister(self, name: str, index: int, addr: str) -> None:
        """Withdraw the announcement of `index` of `name` if its address is still `addr`. That of a successor stays."""

    @abstractmethod
    def query(self, name: str) -> dict[int, str]:
        """Return the addresses of a service by index, in order. Empty if none was announced."""

    def query_now(self, name: str) -> dict[int, str]:
        """Return the addresses that `query` would, without waiting for processes that have not started."""
        return self.query(name)

    @abstractmethod
    def deregister_all(self) -> None:
        """Withdraw every announcement of the job, also those of other processes."""

    def close(self) -> None:  # noqa: B027 - most back ends hold nothing open
        """Stop announcing, and close connections and threads. Calling it again is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ScheduledDiscovery(ServiceDiscovery):
    """The discovery of a scheduler, which also says which process of the job this one is."""

    @property
    @abstractmethod
    def server_type(self) -> str:
        """The service this process belongs to."""

    @property
    @abstractmethod
    def index(self) -> int:
        """The index of this process in its service."""

    @property
    @abstractmethod
    def addr(self) -> str:
        """The address this process should serve at."""


def check_entry(name: str, index: int, addr: str) -> tuple[str, int]:
    """Return host and port of `addr`. Raises `InvalidArgumentError` if `register` would not accept the three."""
    check_name(name)
    if index < 0:
        raise InvalidArgumentError(f"index: expected a number from 0, got {index}")
    return split_address(addr)


@functools.cache
def warn_of_entry(service: str, entry: str, problem: str) -> None:
    """Log that an entry of `service` is ignored, once for each entry, as discoveries read all entries repeatedly."""
    _logger.warning("entry %r of %s is ignored: %s", entry, service, problem)


def check_name(name: str) -> None:
    """Raise `InvalidArgumentError` if `name` is not a valid name of a service."""
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(f"name: expected letters, digits, _ and -, beginning with a letter, got {name!r}")


def retry_with_socket_error(
    call: Callable[[], Result],
    *,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = random.uniform,
) -> Result:
    """Return what `call` returns, with up to five attempts when the network fails (OSError).

    Between attempts it waits a random time of up to five seconds. The last failure is raised. A `DiscoveryError` is an
    answer, not a failure of the network, and raised at once.

    Example:
        >>> retry_with_socket_error(lambda: "answer")
        'answer'
    """
    for attempt in range(1, _TRIES):
        try:
            return call()
        except DiscoveryError:
            raise
        except OSError as error:
            _logger.warning("attempt %d of %d failed: %s", attempt, _TRIES, error)
            sleep(uniform(0, _MAX_BACKOFF_SECS))
    return call()
