"""`RayServiceDiscovery`: processes find each other through an actor of a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from monolith.cluster.discovery.service_discovery import ServiceDiscovery, check_entry, check_name
from monolith.cluster.net import check_port, split_address
from monolith.errors import DiscoveryError, InvalidArgumentError
from monolith.optional_packages import import_extra

__all__ = ["NAMESPACE", "RayServiceDiscovery", "RaySession", "Registry", "import_ray"]

NAMESPACE = "monolith"
"""The Ray namespace of the actors of jobs."""

_ANSWER_SECS = 10.0
_lock = threading.Lock()
_logger = logging.getLogger(__name__)
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
EntryKey = tuple[str, int]
"""Name of a service, and index."""
Entry = tuple[int, str]
"""Order of the announcement, and address."""


def import_ray() -> ModuleType:
    """Import the package `ray`. Raises `MissingPackageError` if it is not installed."""
    return import_extra("ray", extra="ray", purpose="a job on Ray")


class RaySession:
    """Membership of this process in a Ray cluster until `close`. A process that was a member before stays one.

    Ray sends actors and their arguments as pickles, so everyone who is let into a Ray cluster can run code on it. A cluster
    that is started here listens on the machine's own address, as Ray always does, and requires its token.
    """

    def __init__(self, address: str | None, **options: Any) -> None:  # noqa: ANN401 - what ray.init takes
        """Join the cluster at `address`, or with None start one on this machine with `options`."""
        # Usage statistics are not sent unless the user asks for it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address is None and "ray" not in sys.modules:
            # Read when Ray is imported. Newer releases require a token by default, older ones only with this setting.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        self._ray = import_ray()
        _require_someone(address)
        where = {"address": address} if address else {"include_dashboard": False}
        with _lock:
            self._is_ours = not self._ray.is_initialized()
            if self._is_ours:
                try:
                    self._ray.init(
                        **where, namespace=NAMESPACE, log_to_driver=False, logging_level="warning", **options
                    )
                except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                    raise DiscoveryError(
                        f"cannot join the Ray cluster at {address or 'this machine'}: {error}"
                    ) from error

    @property
    def address(self) -> str:
        """Where other processes join the same cluster."""
        return str(self._ray.get_runtime_context().gcs_address)

    def close(self) -> None:
        """Leave the cluster if this object joined it. A cluster that was started here ends."""
        with _lock:
            if self._is_ours and self._ray.is_initialized():
                self._ray.shutdown()
            self._is_ours = False


def _require_someone(address: str | None) -> None:
    """Raise `DiscoveryError` if nothing answers: Ray would take minutes to notice, and then end the process."""
    try:
        host, port = split_address(address or "")
    except InvalidArgumentError:
        return  # "auto", and the like
    if not check_port(host, port, timeout=_ANSWER_SECS):
        raise DiscoveryError(
            f"cannot join the Ray cluster at {address}: nothing answers there; is it the address of the head node?"
        )


class Registry:
    """The addresses of a job, as the actor holds them. It does not use Ray, so it can be tested without it.

    Example:
        >>> registry = Registry()
        >>> order = registry.register("ps", 0, "10.0.0.7:2222")
        >>> registry.query("ps")
        {0: '10.0.0.7:2222'}
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        """`clock` orders the registrations, also those made to an earlier incarnation of this actor."""
        self._clock = clock
        self._entries: dict[EntryKey, Entry] = {}

    def register(self, name: str, index: int, addr: str) -> int:
        """Set an entry. Returns its number in the order of registrations."""
        order = max(self._clock(), self._entries.get((name, index), (0, ""))[0] + 1)
        self._entries[name, index] = (order, addr)
        return order

    def renew(self, own: Mapping[EntryKey, Entry]) -> list[EntryKey]:
        """Set the entries of `own` that no later registration has replaced. Returns the keys of the others."""
        for place, entry in own.items():
            self._entries[place] = max(self._entries.get(place, entry), entry)
        return [place for place, entry in own.items() if self._entries[place] != entry]

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Remove an entry if it is still of `addr`."""
        if self._entries.get((name, index), (0, ""))[1] == addr:
            del self._entries[name, index]

    def deregister_all(self) -> None:
        """Remove all."""
        self._entries.clear()

    def query(self, name: str) -> dict[int, str]:
        """Addresses of a service by index, in order."""
        return {index: addr for (service, index), (_, addr) in sorted(self._entries.items()) if service == name}


class RayServiceDiscovery(ServiceDiscovery):
    """One actor per job, `discovery-<job>`, made by the first process. Ray restarts it if its machine is lost.

    A restarted actor has lost its entries, so a thread of each registered process registers again every `renew_secs`, until a
    successor has replaced the entry: of two registrations the later counts. A process that died stays listed until its
    successor registers.
    """

    def __init__(
        self,
        job: str,
        address: str | None = None,
        *,
        is_owner: bool = False,
        renew_secs: float = 5.0,
        answer_secs: float = 60.0,
    ) -> None:
        """Join the Ray cluster at `address`, by default the one this process belongs to.

        The actor outlives the processes of the job, and ends with the one that `is_owner`, if there is one.
        """
        if not _JOB.fullmatch(job):
            raise InvalidArgumentError(f"job: expected letters, digits and _ . -, got {job!r}")
        self._ray = import_ray()
        self._session = RaySession(address or "auto")
        self._renew_secs, self._answer_secs = renew_secs, answer_secs
        self._is_owner = is_owner
        self._own: dict[EntryKey, Entry] = {}
        # Held while entries are made and removed: a late renewal must not undo a withdrawal.
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._closed = threading.Event()
        try:
            self._registry = self._ray.remote(Registry).options(**self._options(f"discovery-{job}")).remote()
        except Exception:
            self._session.close()
            raise

    def register(self, name: str, index: int, addr: str) -> None:
        """Tell the actor, and begin to tell it again."""
        check_entry(name, index, addr)
        with self._lock:
            self._own[name, index] = (self._ask("register", name, index, addr), addr)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="ray discovery", daemon=True)
                self._keeper.start()

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Take it back."""
        check_entry(name, index, addr)
        with self._lock:
            if self._own.get((name, index), (0, ""))[1] == addr:
                del self._own[name, index]
            self._ask("deregister", name, index, addr)

    def query(self, name: str) -> dict[int, str]:
        """Ask the actor."""
        check_name(name)
        found: dict[int, str] = self._ask("query", name)
        return found

    def deregister_all(self) -> None:
        """Let the actor forget all of the job."""
        with self._lock:
            self._own.clear()
            self._ask("deregister_all")

    def close(self) -> None:
        """Take back what this process announced, and leave the cluster if it was joined for this."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._keeper is not None:
            self._keeper.join()
        for (name, index), (_, addr) in list(self._own.items()):
            try:
                self.deregister(name, index, addr)
            except DiscoveryError as error:
                _logger.warning("%s %d at %s stays listed in Ray: %s", name, index, addr, error)
        if self._is_owner:
            self._ray.kill(self._registry)
        self._session.close()

    def _options(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": None if self._is_owner else "detached",
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
        }

    def _ask(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - what the method returns
        if not self._ray.is_initialized():
            raise DiscoveryError("this discovery is closed")
        try:
            call = getattr(self._registry, method).remote(*arguments)
            return self._ray.get(call, timeout=self._answer_secs)
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise DiscoveryError(f"the actor of the discovery did not answer: {error}") from error

    def _keep(self) -> None:
        while not self._closed.wait(self._renew_secs):
            with self._lock:
                try:
                    taken = self._ask("renew", self._own) if self._own else []
                except DiscoveryError as error:
                    _logger.warning("could not announce this process again: %s", error)
                    continue
                for name, index in taken:
                    _logger.warning("%s %d gives up its place: a successor has taken it", name, index)
                    del self._own[name, index]
