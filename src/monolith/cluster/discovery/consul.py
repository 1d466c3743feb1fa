"""`ConsulServiceDiscovery`: processes are entries of one Consul service, which expire unless they are kept alive."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from monolith.cluster.discovery.service_discovery import (
    ServiceDiscovery,
    check_entry,
    check_name,
    retry_with_socket_error,
    warn_of_entry,
)
from monolith.cluster.net import concat_ip_and_port, split_address
from monolith.errors import DiscoveryError, InvalidArgumentError
from monolith.optional_packages import import_extra

__all__ = ["ConsulAgent", "ConsulEntry", "ConsulServiceDiscovery", "deregister_all"]

_PORT = 8500
_ANSWER_SECS = 10.0
# An entry that is dead for so long is removed. Until then a process that lost its connection comes back by itself.
_REMOVE_AFTER = "10m"

Result = TypeVar("Result")
_logger = logging.getLogger(__name__)
_CONSUL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FIRST_LOOK_SECS = 0.05


@dataclass(frozen=True, kw_only=True)
class ConsulEntry:
    """One process of a service, as an entry in Consul."""

    name: str
    index: int
    addr: str
    id: str
    """Its id in Consul."""
    node: str
    """The machine of the agent that it was registered with."""
    created: int
    """Number of the registration, larger for later ones."""


class ConsulAgent:
    """A Consul agent. Methods raise OSError if it does not answer, and `DiscoveryError` if it refuses."""

    def __init__(self, address: str | None = None) -> None:
        """Use the agent at `address`, `host:port`, by default that of the environment."""
        self._consul = import_extra("consul", extra="consul", purpose="discovery through Consul")
        host, port = _location(address, os.environ)
        self._client = self._consul.Consul(host=host, port=port, connections_timeout=_ANSWER_SECS)
        self.address = f"{self._client.http.host}:{self._client.http.port}"
        # The connections below are not made for several threads.
        self._lock = threading.Lock()

    def entries(self, service: str, *, alive: bool = True) -> list[ConsulEntry]:
        """Return the entries of `service` in the order they were made: those that passed their last check, or all."""
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
        """Renew the time to live of an entry. Raises `DiscoveryError` if this agent has no such entry."""
        if not self._ask(lambda: self._client.agent.check.ttl_pass(f"service:{entry_id}")):
            raise DiscoveryError(f"the Consul agent at {self.address} has no entry {entry_id}")

    def remove(self, entry: ConsulEntry) -> bool:
        """Remove an entry if it belongs to this agent. Returns whether it does."""
        if entry.id not in self._ask(self._client.agent.services):
            return False
        self._ask(lambda: self._client.agent.service.deregister(entry.id))
        return True

    def remove_anywhere(self, entry: ConsulEntry) -> None:
        """Remove an entry. If it belongs to the agent of another machine that is alive, that agent may restore it."""
        if not self.remove(entry):
            self._ask(lambda: self._client.catalog.deregister(entry.node, service_id=entry.id))

    def close(self) -> None:
        """Close the connections."""
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
    """Return an entry that `add` made, or None for an entry of another kind."""
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


class ConsulServiceDiscovery(ServiceDiscovery):
    """One service `consul_id` per job, whose entries have the tags `name:`, `index:` and `ip:`.

    A thread, started by the first registration, renews the entries of this process every half `ttl_secs`, and makes them
    again if Consul has lost them. An entry that a successor has replaced is given up. If several entries have the same name
    and index, the latest counts.
    """

    def __init__(
        self,
        consul_id: str,
        retry_time_secs: float = 3.0,
        *,
        address: str | None = None,
        ttl_secs: float = 60.0,
        visible_secs: float = 180.0,
        cache_secs: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Use the agent at `address`, by default that of CONSUL_HTTP_ADDR, else this machine's. Nothing is sent yet.

        `register` waits up to `visible_secs` for its entry to appear and checks at least every `retry_time_secs`. Answers of
        `query` may be `cache_secs` old.
        """
        if not _CONSUL_ID.fullmatch(consul_id):
            expected = "letters, digits and _ . -, beginning with a letter or digit"
            raise InvalidArgumentError(f"consul_id: expected {expected}, got {consul_id!r}")
        self._consul_id = consul_id
        self._agent = ConsulAgent(address)
        self._retry_time, self._ttl, self._visible_secs = retry_time_secs, ttl_secs, visible_secs
        self._cache_secs = cache_secs
        self._clock, self._sleep, self._uniform = clock, sleep, uniform
        self._own: dict[tuple[str, int], str] = {}
        # Held while entries are made and removed, so that a late renewal cannot undo a removal.
        self._lock = threading.Lock()
        self._cache: tuple[float, list[ConsulEntry]] | None = None
        self._keeper: threading.Thread | None = None
        self._closed = threading.Event()

    def register(self, name: str, index: int, addr: str) -> None:
        """Make an entry in place of earlier ones. Raises `DiscoveryError` if Consul does not show it in time."""
        check_entry(name, index, addr)
        if self._closed.is_set():
            raise DiscoveryError("this discovery is closed")
        with self._lock:
            for entry in self._entries(alive=False):
                if (entry.name, entry.index) == (name, index):
                    self._ask(partial(self._agent.remove, entry))
            self._add(name, index, addr)
            self._own[name, index] = addr
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name=f"consul {self._consul_id}", daemon=True)
                self._keeper.start()
        try:
            self._wait_until_visible(name, index, addr)
        except DiscoveryError:
            self.deregister(name, index, addr)
            raise

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Remove the entry."""
        check_entry(name, index, addr)
        with self._lock:
            if self._own.get((name, index)) == addr:
                del self._own[name, index]
            self._remove(lambda entry: (entry.name, entry.index, entry.addr) == (name, index, addr))

    def query(self, name: str) -> dict[int, str]:
        """Addresses of a service by index, of processes that are alive."""
        check_name(name)
        return self.query_all().get(name, {})

    def query_all(self) -> dict[str, dict[int, str]]:
        """Addresses of all services of the job, by name and index."""
        cached = self._cache
        if cached is None or self._clock() - cached[0] >= self._cache_secs:
            # Two callers at once may both ask; neither waits for the other.
            cached = self._cache = (self._clock(), self._entries())
        found: dict[str, dict[int, str]] = {}
        for entry in cached[1]:  # in the order they were made
            found.setdefault(entry.name, {})[entry.index] = entry.addr
        return {name: dict(sorted(addresses.items())) for name, addresses in sorted(found.items())}

    def deregister_all(self) -> None:
        """Remove all entries of the job, dead ones too."""
        with self._lock:
            self._own.clear()
            self._remove(lambda entry: True)

    def close(self) -> None:
        """Remove the entries of this process, as far as Consul answers, and end the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._keeper is not None:
            self._keeper.join()
        for (name, index), addr in list(self._own.items()):
            try:
                self.deregister(name, index, addr)
            except DiscoveryError as error:
                _logger.warning("%s %d at %s stays in Consul until it expires: %s", name, index, addr, error)
        self._agent.close()

    def _entries(self, *, alive: bool = True) -> list[ConsulEntry]:
        return self._ask(lambda: self._agent.entries(self._consul_id, alive=alive))

    def _add(self, name: str, index: int, addr: str) -> None:
        entry_id = self._entry_id(name, index, addr)
        self._ask(lambda: self._agent.add(self._consul_id, entry_id, name, index, addr, ttl_secs=self._ttl))
        self._cache = None

    def _remove(self, chosen: Callable[[ConsulEntry], bool]) -> None:
        for entry in self._entries(alive=False):
            if chosen(entry):
                self._ask(partial(self._agent.remove_anywhere, entry))
        self._cache = None

    def _entry_id(self, name: str, index: int, addr: str) -> str:
        # With the address, so that a process that was replaced on the same machine cannot keep its successor's entry alive.
        return f"{self._consul_id}-{name}-{index}-{addr}"

    def _wait_until_visible(self, name: str, index: int, addr: str) -> None:
        deadline, pause = self._clock() + self._visible_secs, _FIRST_LOOK_SECS
        while self._holder(name, index) != addr:
            if self._clock() + pause > deadline:
                raise DiscoveryError(
                    f"{name} {index} at {addr} is registered but not shown by Consul after {self._visible_secs:g} seconds; "
                    "is this host blacklisted, or does another process keep registering the same index?"
                )
            self._sleep(pause)
            pause = min(2 * pause, self._retry_time)

    def _holder(self, name: str, index: int) -> str | None:
        self._cache = None
        return self.query_all().get(name, {}).get(index)

    def _ask(self, call: Callable[[], Result]) -> Result:
        """Return what the agent answers, with retries while the network fails."""
        try:
            return retry_with_socket_error(call, sleep=self._sleep, uniform=self._uniform)
        except DiscoveryError:
            raise
        except OSError as error:
            raise DiscoveryError(f"the Consul agent at {self._agent.address} does not answer: {error}") from error

    def _keep(self) -> None:
        while not self._closed.wait(self._ttl / 2):
            with self._lock:
                for (name, index), addr in list(self._own.items()):
                    try:
                        self._keep_alive(name, index, addr)
                    except OSError as error:
                        _logger.warning("could not keep %s %d at %s alive in Consul: %s", name, index, addr, error)

    def _keep_alive(self, name: str, index: int, addr: str) -> None:
        try:
            self._agent.keep_alive(self._entry_id(name, index, addr))
        except DiscoveryError:
            entries = self._agent.entries(self._consul_id)
            if any((entry.name, entry.index) == (name, index) and entry.addr != addr for entry in entries):
                _logger.warning("%s %d at %s gives up: a successor has replaced it", name, index, addr)
                del self._own[name, index]
                return
            self._agent.add(self._consul_id, self._entry_id(name, index, addr), name, index, addr, ttl_secs=self._ttl)
            _logger.info("%s %d at %s was lost by Consul and is registered again", name, index, addr)


def deregister_all(consul_id: str, *, address: str | None = None) -> None:
    """Remove every entry of a job from Consul, also those of other processes."""
    with ConsulServiceDiscovery(consul_id, address=address) as discovery:
        discovery.deregister_all()
