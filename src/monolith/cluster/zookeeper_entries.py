"""The nodes of a job in ZooKeeper: one ephemeral node per process, named `<name>.<index>`, with its address as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monolith.cluster.zookeeper import import_kazoo
from monolith.errors import DiscoveryError

if TYPE_CHECKING:
    from kazoo.client import KazooClient
    from kazoo.interfaces import IAsyncResult
    from kazoo.protocol.states import WatchedEvent

__all__ = ["ZKEntries"]

# Each round loses only to someone who changed the node in the same moment.
_ROUNDS = 10


class ZKEntries:
    """Reads and writes the nodes below `path`. Every call of ZooKeeper is given `answer_secs` seconds."""

    def __init__(self, client: KazooClient, path: str, *, answer_secs: float) -> None:
        self.path = path
        self._client = client
        self._answer_secs = answer_secs
        self._exceptions = import_kazoo("exceptions")
        self._sessions: set[int] = set()

    def read(self, watch: Callable[[WatchedEvent], None]) -> list[tuple[str, int, str]]:
        """(name, index, address) of every node that looks like an entry; `watch` is called once when something changes."""
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
                continue  # gone since the list was read; the watch on the list will tell
            found.append((name, int(index), (data or b"").decode(errors="replace")))
        return found

    def publish(self, name: str, index: int, addr: str, *, replace: bool) -> bool:
        """Make the node of an entry this session's own, with `addr` as data.

        If `replace` is off and it belongs to a living session of another process with another address, nothing is changed
        and the answer is False.
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
            return  # gone, or a successor's

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
        """Replace a node of another session by one of this, at once; whether nobody was quicker.

        New data alone would leave it to the other session, and it would vanish with it.
        """
        transaction = self._client.transaction()
        transaction.delete(path, version=version)
        transaction.create(path, data, ephemeral=True)
        results = self._await(transaction.commit_async())
        return not any(isinstance(result, Exception) for result in results)

    def _session(self) -> int:
        """The id of this session, remembered: nodes of earlier ones are this process's own."""
        session = self._client.client_id
        if session is None:
            raise self._exceptions.ConnectionLoss
        self._sessions.add(session[0])
        return int(session[0])

    def _path(self, name: str, index: int) -> str:
        return f"{self.path}/{name}.{index}"

    def _await(self, result: IAsyncResult) -> Any:  # noqa: ANN401 - what it is depends on the call
        # Without a connection the client queues calls and would wait for ever.
        return result.get(timeout=self._answer_secs)
