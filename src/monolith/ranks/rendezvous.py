"""How the ranks of a run find their leader."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["DiscoveryRendezvous", "Rendezvous", "StoreRendezvous", "torchrun_rendezvous"]

_SERVICE = "rank-leader"
_STORE_SECONDS = 30.0


class Rendezvous(Protocol):
    """Where rank 0 announces its address, and the other ranks look it up."""

    def announce(self, address: str) -> None:
        """Publish the address of the leader, in place of an earlier one."""

    def find(self) -> str | None:
        """Return the address that was announced last. It may be that of a process that has died. None: not announced yet."""


class DiscoveryRendezvous:
    """Finds the leader through a `ServiceDiscovery`: files in a folder, ZooKeeper, Consul, Ray.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rendezvous = DiscoveryRendezvous(HostServiceDiscovery(folder))
        ...     rendezvous.announce("10.0.0.7:2222")
        ...     rendezvous.find()
        '10.0.0.7:2222'
    """

    def __init__(self, discovery: ServiceDiscovery) -> None:
        self._discovery = discovery

    def announce(self, address: str) -> None:
        """Register the leader."""
        self._discovery.register(_SERVICE, 0, address)

    def find(self) -> str | None:
        """Look the leader up."""
        return self._discovery.query_now(_SERVICE).get(0)


class StoreRendezvous:
    """Finds the leader through a `torch.distributed.Store`, which all ranks reach.

    Example:
        >>> from torch.distributed import HashStore
        >>> rendezvous = StoreRendezvous(HashStore(), job="ads")
        >>> rendezvous.find(), rendezvous.announce("10.0.0.7:2222"), rendezvous.find()
        (None, None, '10.0.0.7:2222')
    """

    def __init__(self, store: Store, *, job: str) -> None:
        """Use the keys of `store` that begin with the name of the job."""
        self.store = store
        self._key = f"monolith/{job}/{_SERVICE}"

    def announce(self, address: str) -> None:
        """Set the key."""
        try:
            self.store.set(self._key, address)
        except RuntimeError as error:
            raise UnavailableError(f"the store of torch.distributed failed: {error}") from None

    def find(self) -> str | None:
        """Read the key. It does not wait."""
        try:
            if not self.store.check([self._key]):
                return None
            found: bytes = self.store.get(self._key)
        except RuntimeError as error:
            raise UnavailableError(f"the store of torch.distributed failed: {error}") from None
        return found.decode()


def torchrun_rendezvous(*, job: str, environ: Mapping[str, str] | None = None) -> StoreRendezvous:
    """Return a rendezvous over the store at MASTER_ADDR and MASTER_PORT, as `torchrun` sets them.

    The agent of `torchrun` runs the store. Without an agent, rank 0 does, and shares it with `init_process_group`.

    Raises:
        ConfigError: a variable is missing or wrong.
        UnavailableError: the store does not answer.
    """
    from torch._C._distributed_c10d import TCPStore

    environ = os.environ if environ is None else environ
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if not environ.get(name)]
    if missing:
        raise ConfigError(f"{missing[0]}: expected it in the environment, as torchrun sets it")
    if not (environ["MASTER_PORT"].isdecimal() and environ["RANK"].isdecimal()):
        raise ConfigError(
            f"MASTER_PORT and RANK: expected numbers, got {environ['MASTER_PORT']!r} and {environ['RANK']!r}"
        )
    is_of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            is_master=environ["RANK"] == "0" and not is_of_agent,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise UnavailableError(
            f"MASTER_ADDR, MASTER_PORT: no store answers at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}"
        ) from None
    return StoreRendezvous(store, job=job)
