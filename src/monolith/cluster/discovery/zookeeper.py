"""`ZKServiceDiscovery`: processes are ephemeral nodes in ZooKeeper, which vanish when they die."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from monolith.cluster.discovery.service_discovery import ServiceDiscovery, check_entry, check_name, warn_of_entry
from monolith.cluster.net import split_address
from monolith.cluster.zookeeper import close_zk_client, import_kazoo, job_path, make_zk_client, start_zk_client
from monolith.errors import DiscoveryError, InvalidArgumentError

if TYPE_CHECKING:
    from kazoo.client import KazooClient
    from kazoo.interfaces import IAsyncResult
    from kazoo.protocol.states import WatchedEvent

__all__ = ["ZKEntries", "ZKServiceDiscovery"]

# A round fails only if another process changed the node at the same moment.
_ROUNDS = 10
_logger = logging.getLogger(__name__)
_REGISTRATION_PERIOD_SECS = 1800.0


class ZKEntries:
    """Reads and writes the nodes below `path`. Every call of ZooKeeper is given `answer_secs` seconds."""

    def __init__(self, client: KazooClient, path: str, *, answer_secs: float) -> None:
        self.path = path
        self._client = client
        self._answer_secs = answer_secs
        self._exceptions = import_kazoo("exceptions")
        self._sessions: set[int] = set()

    def read(self, watch: Callable[[WatchedEvent], None]) -> list[tuple[str, int, str]]:
        """Return (name, index, address) of every entry. `watch` is called once when something changes."""
        try:
            children = self._await(self._client.get_children_async(self.path, watch=watch))
        except self._exceptions.NoNodeError:
            self._await(self._client.exists_async(self.path, watch=watch))
            return []
        found = []
        for child in children:
            name, _, index = child.rpartition(".")
            if not (index.isascii() and index.isdecimal()):
                continue
            try:
                data, _ = self._await(self._client.get_async(f"{self.path}/{child}", watch=watch))
            except self._exceptions.NoNodeError:
                continue  # removed since the list was read, which triggers the watch on the list
            found.append((name, int(index), (data or b"").decode(errors="replace")))
        return found

    def publish(self, name: str, index: int, addr: str, *, replace: bool) -> bool:
        """Make the node of an entry this session's own, with `addr` as data.

        Returns False and changes nothing if `replace` is off and the node belongs to a live session of another process with
        another address.
        """
        path, data = self._path(name, index), addr.encode()
        for _ in range(_ROUNDS):
            if self._create(path, data):
                return True
            session = self._session()
            try:
                current, stat = self._await(self._client.get_async(path))
                if stat.ephemeralOwner == session:
                    if current != data:
                        self._await(self._client.set_async(path, data, version=stat.version))
                    return True
                former = stat.ephemeralOwner == 0 or stat.ephemeralOwner in self._sessions
                if not (replace or former or current == data):
                    return False
                if self._take_over(path, data, stat.version):
                    return True
            except (self._exceptions.NoNodeError, self._exceptions.BadVersionError):
                continue
        raise DiscoveryError(f"{path} is changed by others all the time; are there two processes {name} {index}?")

    def withdraw(self, name: str, index: int, addr: str) -> None:
        """Remove the node of an entry, if it has this address."""
        path = self._path(name, index)
        try:
            current, stat = self._await(self._client.get_async(path))
            if current == addr.encode():
                self._await(self._client.delete_async(path, version=stat.version))
        except (self._exceptions.NoNodeError, self._exceptions.BadVersionError):
            return  # removed, or replaced by a successor

    def withdraw_all(self) -> None:
        """Remove every node."""
        try:
            children = self._await(self._client.get_children_async(self.path))
        except self._exceptions.NoNodeError:
            return
        for child in children:
            try:
                self._await(self._client.delete_async(f"{self.path}/{child}"))
            except self._exceptions.NoNodeError:
                continue

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._await(self._client.create_async(path, data, ephemeral=True, makepath=True))
        except self._exceptions.NodeExistsError:
            return False
        self._session()
        return True

    def _take_over(self, path: str, data: bytes, version: int) -> bool:
        """Replace a node of another session by one of this session, atomically. Returns False if another process was faster.

        Setting only the data would leave the node to the other session, and it would vanish with that.
        """
        transaction = self._client.transaction()
        transaction.delete(path, version=version)
        transaction.create(path, data, ephemeral=True)
        results = self._await(transaction.commit_async())
        return not any(isinstance(result, Exception) for result in results)

    def _session(self) -> int:
        """Return the id of this session, and remember it: nodes of earlier sessions belong to this process too."""
        session = self._client.client_id
        if session is None:
            raise self._exceptions.ConnectionLoss
        self._sessions.add(session[0])
        return int(session[0])

    def _path(self, name: str, index: int) -> str:
        return f"{self.path}/{name}.{index}"

    def _await(self, result: IAsyncResult) -> Any:  # noqa: ANN401 - what it is depends on the call
        # Without a connection the client would queue calls and wait for ever.
        return result.get(timeout=self._answer_secs)


class ZKServiceDiscovery(ServiceDiscovery):
    """Each process is an ephemeral node `/monolith/<job>/<name>.<index>` with its address, which lives as long as its session.

    `query` answers from a copy that watches keep up to date, also while ZooKeeper is unreachable. A thread renews the
    announcements of this process every `registration_period_secs`, and when a session was lost and another one begins. A
    process that a successor has replaced meanwhile gives up.
    """

    def __init__(
        self,
        job_name: str,
        zk_server: str | None = None,
        max_tries: int = 3,
        delay: float = 5.0,
        *,
        registration_period_secs: float = _REGISTRATION_PERIOD_SECS,
        session_secs: float = 10.0,
        start_secs: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect. Raises `DiscoveryError` if ZooKeeper does not answer within `start_secs`.

        A call that ZooKeeper does not answer is tried again `max_tries` times, with waits that grow from `delay` seconds.
        """
        exceptions, retry, handlers = (import_kazoo(name) for name in ("exceptions", "retry", "handlers.threading"))
        self._failures = (exceptions.KazooException, handlers.KazooTimeoutError, retry.RetryFailedError)
        self._retry = retry.KazooRetry(max_tries=max_tries, delay=delay, ignore_expire=True, sleep_func=sleep)
        self.job_name, self.zk_server = job_name, zk_server
        path = job_path(job_name)
        self._client = make_zk_client(zk_server, session_secs=session_secs)
        self._entries = ZKEntries(self._client, path, answer_secs=start_secs)
        self._period, self._delay, self._session_secs, self._clock = (
            registration_period_secs,
            delay,
            session_secs,
            clock,
        )
        # Held while nodes are written and read, so that a late announcement cannot undo a withdrawal and an older copy of the
        # nodes cannot replace a newer one.
        self._lock = threading.Lock()
        self._own: dict[tuple[str, int], str] = {}
        self._known: dict[str, dict[int, str]] = {}
        self._wake = threading.Event()
        self._renew = False
        self._away_since: float | None = None
        # Held while the client is stopped, so that it is not started again after `close`.
        self._stopping = threading.Lock()
        self._closed = threading.Event()
        self._client.add_listener(self._session_changed)
        start_zk_client(self._client, start_secs)
        self._keeper = threading.Thread(target=self._keep, name=f"zookeeper {path}", daemon=True)
        try:
            with self._changing():
                pass
        except BaseException:
            close_zk_client(self._client)
            raise
        self._keeper.start()

    def register(self, name: str, index: int, addr: str) -> None:
        """Announce this process, in place of an earlier one. Raises `DiscoveryError` if ZooKeeper does not accept it."""
        check_entry(name, index, addr)
        with self._changing():
            self._retry.copy()(self._entries.publish, name, index, addr, replace=True)
            self._own[name, index] = addr

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Withdraw the announcement."""
        check_entry(name, index, addr)
        with self._changing():
            if self._own.get((name, index)) == addr:
                del self._own[name, index]
            self._retry.copy()(self._entries.withdraw, name, index, addr)

    def query(self, name: str) -> dict[int, str]:
        """Return the addresses of a service by index, as last reported by ZooKeeper."""
        check_name(name)
        return dict(self._known.get(name, {}))

    def deregister_all(self) -> None:
        """Remove all announcements of the job."""
        with self._changing():
            self._own.clear()
            self._retry.copy()(self._entries.withdraw_all)

    def close(self) -> None:
        """End the thread and the session, which removes all announcements of this process."""
        self._closed.set()
        self._wake.set()
        with self._stopping:
            close_zk_client(self._client)
        self._keeper.join()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change, and read the result afterwards so that the caller sees it."""
        if self._closed.is_set():
            raise DiscoveryError("this discovery is closed")
        try:
            with self._lock:
                yield
                self._retry.copy()(self._read)
        except self._failures as error:
            raise DiscoveryError(f"the request failed in ZooKeeper, in {self._entries.path}: {error!r}") from error

    def _read(self) -> None:
        """Read everything again and set watches."""
        known: dict[str, dict[int, str]] = {}
        for name, index, addr in sorted(self._entries.read(self._changed)):
            if _is_entry(name, addr):
                known.setdefault(name, {})[index] = addr
        self._known = known

    def _changed(self, event: WatchedEvent) -> None:
        # Called by the client's thread, which must keep reading from the network, so the keeper does the work.
        self._wake.set()

    def _session_changed(self, state: str) -> None:
        if state == "LOST":
            self._renew = True  # the nodes of the old session are removed, or will be
        if state == "CONNECTED":
            self._away_since = None
            self._wake.set()
        elif self._away_since is None:
            self._away_since = self._clock()

    def _keep(self) -> None:
        due = self._clock() + self._period
        while True:
            woken = self._wake.wait(max(due - self._clock(), 0))
            self._wake.clear()
            if self._closed.is_set():
                return
            if not woken and self._clock() >= due:
                self._renew = True
            due = self._refresh(due)

    def _refresh(self, due: float) -> float:
        """Announce again if that is due, and read. Returns when to announce the next time."""
        try:
            with self._lock:
                if self._renew:
                    self._renew = False
                    self._publish_own()
                    due = self._clock() + self._period
                self._read()
        except (*self._failures, DiscoveryError) as error:
            if not self._closed.is_set():
                _logger.warning("could not refresh %s in ZooKeeper, trying again: %r", self._entries.path, error)
            self._renew = True
            self._start_over_if_away()
            return min(due, self._clock() + self._delay)
        return due

    def _start_over_if_away(self) -> None:
        """Begin a new session when the old one must have expired.

        A server that has lost its data refuses clients that have seen newer data, for as long as they keep their session.
        """
        with self._stopping:
            away = 0.0 if self._away_since is None else self._clock() - self._away_since
            if away < 2 * self._session_secs or self._closed.is_set():
                return
            self._client.stop()
            self._away_since = self._clock()
            self._client.start_async()

    def _publish_own(self) -> None:
        for (name, index), addr in list(self._own.items()):
            if not self._entries.publish(name, index, addr, replace=False):
                _logger.warning("%s %d at %s gives up: a successor has replaced it", name, index, addr)
                del self._own[name, index]


def _is_entry(name: str, addr: str) -> bool:
    try:
        check_name(name)
        split_address(addr)
    except InvalidArgumentError as error:
        warn_of_entry("ZooKeeper", name, str(error))
        return False
    return True
