"""Calls to a Consul agent: the entries of a service, adding one with a time to live, keeping it alive, removing it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from monolith.cluster.discovery import warn_of_entry
from monolith.cluster.extras import import_extra
from monolith.cluster.net import concat_ip_and_port, split_address
from monolith.errors import DiscoveryError, InvalidArgumentError

__all__ = ["ConsulAgent", "ConsulEntry"]

_PORT = 8500
_ANSWER_SECS = 10.0
# What is dead for so long is removed for good; until then a process that was only cut off comes back by itself.
_REMOVE_AFTER = "10m"

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ConsulEntry:
    """One process of a service."""

    name: str
    index: int
    addr: str
    id: str
    """What Consul knows it by."""
    node: str
    """The machine whose agent it was registered with."""
    created: int
    """Grows with every entry that is made, anywhere."""


class ConsulAgent:
    """The agent of this machine. Every method may raise OSError if it does not answer, and `DiscoveryError` if it refuses."""

    def __init__(self, address: str | None = None) -> None:
        """Use the agent at `address`, `host:port`; by default where the environment says."""
        self._consul = import_extra("consul", extra="consul", purpose="discovery through Consul")
        host, port = _location(address, os.environ)
        self._client = self._consul.Consul(host=host, port=port, connections_timeout=_ANSWER_SECS)
        self.address = f"{self._client.http.host}:{self._client.http.port}"
        # The connections below are not made for several threads.
        self._lock = threading.Lock()

    def entries(self, service: str, *, alive: bool = True) -> list[ConsulEntry]:
        """The entries of `service`, in the order they were made; those that passed their last check, or all."""
        _, found = self._ask(lambda: self._client.health.service(service, passing=alive))
        entries = [entry for item in found if (entry := _parse(item)) is not None]
        return sorted(entries, key=lambda entry: entry.created)

    def add(self, service: str, entry_id: str, name: str, index: int, addr: str, *, ttl_secs: float) -> None:
        """Add an entry, alive for `ttl_secs`."""
        host, port = split_address(addr)
        check = {"ttl": f"{ttl_secs:g}s", "DeregisterCriticalServiceAfter": _REMOVE_AFTER}
        tags = [f"index:{index}", f"name:{name}", f"ip:{host}"]
        register = self._client.agent.service.register
        self._ask(lambda: register(service, service_id=entry_id, address=host, port=port, tags=tags, check=check))
        self.keep_alive(entry_id)

    def keep_alive(self, entry_id: str) -> None:
        """Let an entry live for another time to live; `DiscoveryError` if this agent has no such entry."""
        if not self._ask(lambda: self._client.agent.check.ttl_pass(f"service:{entry_id}")):
            raise DiscoveryError(f"the Consul agent at {self.address} has no entry {entry_id}")

    def remove(self, entry: ConsulEntry) -> bool:
        """Remove an entry of this agent; whether it is one."""
        if entry.id not in self._ask(self._client.agent.services):
            return False
        self._ask(lambda: self._client.agent.service.deregister(entry.id))
        return True

    def remove_anywhere(self, entry: ConsulEntry) -> None:
        """Remove an entry. If it is of another machine's agent and that is alive, it may bring the entry back."""
        if not self.remove(entry):
            self._ask(lambda: self._client.catalog.deregister(entry.node, service_id=entry.id))

    def close(self) -> None:
        """Let go of connections."""
        self._client.http.session.close()

    def _ask(self, call: Callable[[], Result]) -> Result:
        try:
            with self._lock:
                return call()
        except self._consul.ConsulException as error:
            raise DiscoveryError(f"the Consul agent at {self.address} refused: {error}") from error


def _location(address: str | None, environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    if address is not None:
        return split_address(address)
    if environ.get("CONSUL_HTTP_ADDR"):
        return None, None  # the client reads it, with its scheme
    host = environ.get("CONSUL_HTTP_HOST") or environ.get("TCE_HOST_IP") or "127.0.0.1"
    return split_address(concat_ip_and_port(host, environ.get("CONSUL_HTTP_PORT") or _PORT))


def _parse(item: Mapping[str, Any]) -> ConsulEntry | None:
    """An entry as `add` makes them; None for one that others made for themselves."""
    service = item["Service"]
    tags = dict(tag.partition(":")[::2] for tag in service["Tags"] or ())
    index = tags.get("index", "")
    if not (tags.get("name") and index.isascii() and index.isdecimal()):
        return None
    try:
        addr = concat_ip_and_port(tags.get("ip", ""), service["Port"])
        split_address(addr)
    except InvalidArgumentError as error:
        warn_of_entry("Consul", service["ID"], str(error))
        return None
    return ConsulEntry(
        name=tags["name"],
        index=int(index),
        addr=addr,
        id=service["ID"],
        node=item["Node"]["Node"],
        created=service.get("CreateIndex", 0),
    )
