"""`BucketGroup`: servers that own buckets, with routes that follow servers as they join, move and leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from monolith.errors import DeadlineExceededError, OwnershipChangedError, ServerRestartedError, UnavailableError
from monolith.ps.client.routes import ServerRoutes
from monolith.ps.client.scatter_gather import FIRST_PAUSE
from monolith.ps.client.server_group import FIND_SECONDS, ClientConfig, ServerGroup
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import DeclaredTable, Joined
from monolith.ps.protocol.ownership import OwnershipMap
from monolith.ps.rebalance.client import rebalance_buckets
from monolith.table.buckets import mask_of, ranges_of
from monolith.table.config import TableConfig
from monolith.transport.addresses import distinct_addresses
from monolith.transport.calls import CallNumber
from monolith.transport.frames import Frame
from monolith.transport.link import Link

__all__ = ["BucketGroup"]


class BucketGroup(ServerGroup):
    """Links to the servers that own the buckets. Base of `ServerStore`, which describes the arguments."""

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Iterable[TableConfig | DeclaredTable] = (),
        *,
        ranges: Sequence[range] | None = None,
        replace_lost: bool = False,
        config: ClientConfig | None = None,
        find: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        first = OwnershipMap.even(distinct_addresses(addresses), ranges)
        self._retired: list[Link] = []
        self._candidates: dict[str, Link] = {}
        self._routes = ServerRoutes(
            lambda: self.links,
            keep=self._keep,
            join=self._join_one_more,
            timeout=(config or ClientConfig()).timeout,
        )
        super().__init__(addresses, tables, config=config, find=find)
        try:
            self._routes.begin(first, replace_lost=replace_lost)
        except BaseException:
            self.close()
            raise

    @property
    def ownership(self) -> OwnershipMap:
        """Return which server owns which buckets, as far as this worker knows."""
        return self._routes.current.map()

    def rebalance(
        self, addresses: Sequence[str], *, report: Callable[[int, int], None] = lambda moved, planned: None
    ) -> OwnershipMap:
        """Let the servers at `addresses`, and no others, own all buckets, as equally as possible. Returns the new map.

        As few buckets as possible move, in small transfers, while other workers train: none of their updates is lost or applied
        twice. New servers must be running. A server that is not in `addresses` owns nothing in the end, and may be stopped when
        all workers have made another step. If this fails, every bucket still has an owner or is in transit: call it again.

        Args:
            addresses: all servers that shall own buckets. Dense parameters of servers that leave move to those that stay, and the
                coordination of the run moves with the first bucket.
            report: called with the numbers of buckets moved so far and to be moved in all.

        Example:
            >>> from monolith.ps import ParameterServer, ServerStore
            >>> with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address]) as store:
            ...     grown = store.rebalance([one.address, two.address])
            >>> [server.ranges for server in grown.servers]
            [((0, 2048),), ((2048, 4096),)]
        """
        wanted, current = distinct_addresses(addresses), self._routes.settled().map()
        links = {link.address: link for link in self.links}
        try:
            for address in wanted:
                if address not in links:
                    links[address] = self._candidates[address] = self._required(address)
            rebalance_buckets(current, wanted, links, report=report, timeout=self.config.timeout)
            return self._routes.settled().map()
        finally:
            # Servers that were given buckets belong to the group by now.
            while self._candidates:
                self._candidates.popitem()[1].close()

    def refresh_routes(self) -> None:
        """Find the servers that now own these buckets."""
        self._routes.after(self._routes.current)

    def close(self) -> None:
        """Close all connections. The servers keep running."""
        for link in self._retired:
            link.close()
        super().close()

    def _required(self, address: str) -> Link:
        link = self._join_one_more(address, self.config.timeout)
        if link is None:
            raise UnavailableError(f"addresses: there is no server at {address}; start it first")
        return link

    def _ask_all(self, call: CallNumber, text: str = "{}") -> list[Frame]:
        try:
            return super()._ask_all(call, text)
        except OwnershipChangedError:
            # One of the servers has left. Those that have answered are called again.
            self._routes.after(self._routes.current)
            return super()._ask_all(call, text)

    def _look_for(self, link: Link) -> None:
        super()._look_for(link)
        self._routes.refresh_routes(link)

    def _joined_all(self) -> list[Joined]:
        deadline = time.monotonic() + self.config.timeout
        while (missing := _missing(joined := self._joined())) is not None:
            if time.monotonic() >= deadline:
                raise UnavailableError(f"positions: no server that answers has {missing}; start all servers")
            # It arrived between two calls, or its server is new.
            time.sleep(FIRST_PAUSE)
            self._routes.after(self._routes.current)
        return joined

    def _keep(self, links: list[Link], left: list[Link]) -> None:
        # Closed at the end: other threads may still wait for an answer.
        self._retired += left
        self.links = links

    def _returned(self, address: str) -> Link | None:
        """Return the link to a server that had left the group. A new one each time would use up the server's streams."""
        link = next((link for link in self._retired if link.address == address), None)
        if link is not None:
            self._retired.remove(link)
            link.left, link.instance = False, 0
        return link

    def _join_one_more(self, address: str, seconds: float = FIND_SECONDS) -> Link | None:
        if address in self._candidates:
            return self._candidates.pop(address)
        link = self._returned(address) or self._linked(address)
        try:
            link.call(Call.JOIN, self._join_text(), timeout=min(seconds, self.config.timeout))
            self._declare_to(link)
        except (UnavailableError, DeadlineExceededError, ServerRestartedError):
            # ServerRestartedError: the server died between the two calls.
            link.close()
            return None
        except BaseException:
            link.close()
            raise
        return link


def _missing(joined: Sequence[Joined]) -> str | None:
    """Return buckets or a dense parameter that no server has. None if nothing is missing."""
    nobody = ranges_of(~mask_of(pair for one in joined for pair in one.ranges))
    if nobody:
        return f"the buckets {list(nobody)}"
    held = {name for one in joined for name in one.parameters}
    given = [name for one in joined for name in one.gave if name not in held]
    return f"the dense parameter {given[0]!r}" if given else None
