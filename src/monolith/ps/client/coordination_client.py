"""`CoordinationClient`: the `Coordination` of a run that parameter servers keep, as one worker sees it."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from monolith.cluster.coordination import Barrier, Members, Phase, Seen
from monolith.cluster.liveness import BEATS_PER_LEASE
from monolith.config import Config
from monolith.errors import (
    MonolithError,
    OwnershipChangedError,
    ServerError,
    ServerRestartedError,
    StalePushError,
    UnavailableError,
)
from monolith.ps.client.routes import ask_each, destinations_of
from monolith.ps.client.server_group import FIND_SECONDS, ClientConfig, link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import Buckets
from monolith.ps.protocol.messages import Greet, Hold, PlaceBarrier
from monolith.transport.addresses import distinct_addresses
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange, Link

__all__ = ["CoordinationClient", "HostLink", "ServerSteps", "find_host"]

STAY_SECONDS = 2.0
"""Time limit of the last call of a worker that has failed, perhaps because of the server."""
RETRY_PAUSE = 0.1
"""Seconds between two attempts while the first bucket moves."""

_logger = logging.getLogger(__name__)


def find_host(addresses: Sequence[str], connect: Callable[[str], Link]) -> str | None:
    """Return the address of the server that coordinates the run: the owner of the first bucket.

    Until ownership is assigned, it is the first one. None if it is not known now, because servers do not answer or the bucket is
    in transit. Servers to which others have moved buckets are asked too.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server:
        ...     find_host([server.address], lambda address: link_to(address, ClientConfig())) == server.address
        True
    """
    owned: dict[str, Buckets | None] = {}
    waiting = list(distinct_addresses(addresses))
    while waiting:
        owned |= _ask_all(waiting, connect)
        waiting = sorted(destinations_of(owned.values()) - set(owned))
    owners = [address for address, one in owned.items() if one is not None and one.ranges and one.ranges[0][0] == 0]
    if len(owners) == 1:
        return owners[0]
    nobody_owns = all(one is not None and one.version == 0 for one in owned.values())
    return next(iter(owned), None) if nobody_owns else None


def _ask_all(addresses: Sequence[str], connect: Callable[[str], Link]) -> dict[str, Buckets | None]:
    links = {address: connect(address) for address in addresses}
    try:
        answers = ask_each(list(links.values()))
    finally:
        for link in links.values():
            link.close()
    found: dict[str, Buckets | None] = {}
    for address, link in links.items():
        answer = answers[link]
        found[address] = Buckets.from_json(answer.text) if isinstance(answer, Frame) else None
    return found


class HostLink:
    """A link to the owner of the first bucket, which it follows to other addresses and other servers.

    Args:
        addresses: of the servers of the run, the same and in the same order for all workers.
        config: how to connect to them.
        find: returns the addresses of all servers, called when the owner is not where it was.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        config: ClientConfig,
        find: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._addresses, self._config, self._find = tuple(addresses), config, find
        self._looking = threading.Lock()
        self._link = link_to(self._found() or self._addresses[0], config)
        self._link.on_unavailable = self._look

    @property
    def address(self) -> str:
        """The last known address of the owner."""
        return self._link.address

    def call(self, call: Call, message: Config | None = None, *, timeout: float | None = None) -> Frame:
        """Return the answer of the owner, which is searched for until the call times out."""
        text = "{}" if message is None else message.model_dump_json()
        limit = self._link.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while True:
            # Any incarnation of the server may answer: every call is self-contained.
            self._link.instance = 0
            try:
                return self._link.call(call, text, timeout=max(0.001, deadline - time.monotonic()))
            except ServerRestartedError:
                continue
            except OwnershipChangedError as error:
                if time.monotonic() + RETRY_PAUSE >= deadline:
                    raise UnavailableError(f"{error}; no owner of the first bucket was found in {limit:g} s") from None
                self._look()
                time.sleep(RETRY_PAUSE)

    def send(self, call: Call, message: Config | None = None) -> Exchange:
        """Send a request whose answer `answered` takes later."""
        self._link.instance = 0
        exchange = self._link.begin(call, "{}" if message is None else message.model_dump_json())
        exchange.send()
        return exchange

    def answered(self, exchange: Exchange) -> Frame | None:
        """Return the answer to `sent`. None if the server was restarted or is no longer the owner."""
        try:
            return exchange.finish()
        except ServerRestartedError:
            return None
        except OwnershipChangedError:
            self._look()
            return None

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _look(self) -> None:
        """Follow the first bucket. Does nothing while another thread does."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            host = self._found()
            if host is not None and host != self._link.address:
                _logger.info("coordination of the run is now at %s, no longer at %s", host, self._link.address)
                self._link.move_to(host)
        finally:
            self._looking.release()

    def _found(self) -> str | None:
        known: Sequence[str] = ()
        try:
            known = () if self._find is None else self._find()
        except MonolithError as error:
            _logger.warning("the addresses of the servers could not be found: %s", error)
        soon = self._config.model_copy(update={"timeout": min(self._config.timeout, FIND_SECONDS)})
        # The given addresses come first, in their order: until buckets are assigned, all workers must meet at the same server.
        candidates = list(dict.fromkeys((*self._addresses, *known)))
        return find_host(candidates, lambda address: link_to(address, soon))


class ServerSteps:
    """The global step that the servers derive from pushes. Closes `link` with itself.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server:
        ...     steps = ServerSteps(HostLink([server.address], config=ClientConfig()))
        ...     steps.now()
        ...     steps.close()
        0
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._step = 0
        self._asked: Exchange | None = None

    def now(self) -> int:
        """Return the global step."""
        self._step = int(json.loads(self._link.call(Call.GLOBAL_STEP).text)["step"])
        return self._step

    def report(self) -> int:
        """Ask for the global step without waiting. Returns the answer to the call before."""
        asked, self._asked = self._asked, None
        answer = None if asked is None else self._link.answered(asked)
        if answer is not None:
            self._step = int(json.loads(answer.text)["step"])
        self._asked = self._link.send(Call.GLOBAL_STEP)
        return self._step

    def close(self) -> None:
        """Close the connection."""
        if self._asked is not None:
            self._asked.abandon()
        self._link.close()


class CoordinationClient:
    """Worker `index` of a run, a member of it from now on. A thread renews its lease.

    The owner of the first bucket keeps the common state. The client follows it when it is restarted, also elsewhere, and when the
    bucket moves to another server.

    Args:
        addresses: of the servers of the run, the same and in the same order for all workers.
        index: the number of this worker. 0 is the chief.
        epoch: larger than that of every earlier incarnation of this worker.
        run: name of this launch of the job, "" if there is only one. Members of an earlier launch are forgotten.
        lease: seconds after the last call for which this worker counts as alive.
        heartbeat: seconds between two renewals, by default three in a lease.
        config: how to connect to the servers.
        find: returns the addresses of all servers, called when one does not answer.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as client:
        ...     client.enter("running")
        ...     [(member.index, member.phase, member.alive) for member in client.members().members]
        [(0, 'running', True)]
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        index: int,
        epoch: int,
        run: str = "",
        lease: float = 30.0,
        heartbeat: float | None = None,
        config: ClientConfig | None = None,
        find: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._link = HostLink(addresses, config=config or ClientConfig(), find=find)
        self._index, self._epoch, self._run, self._lease = index, epoch, run, lease
        self._heartbeat = lease / BEATS_PER_LEASE if heartbeat is None else heartbeat
        self._phase: Phase = "joined"
        self._seen = Seen(step=0)
        self._reported = False
        self._report: Exchange | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="monolith-heartbeat", daemon=True)
        try:
            self._greet()
        except BaseException:
            self._link.close()
            raise
        self._thread.start()

    @property
    def index(self) -> int:
        """The number of this worker."""
        return self._index

    def enter(self, phase: Phase) -> None:
        """Report the phase of this worker."""
        self._seen = self._take_report()
        self._phase = phase
        self._greet()

    def members(self) -> Members:
        """Return all workers, the global step and the barrier."""
        self._seen = self._take_report()
        return Members.from_json(self._link.call(Call.MEMBERS).text)

    def report(self) -> Seen:
        """Ask for the global step and the barrier without waiting. Returns the answer to the report before."""
        self._seen = self._take_report()
        self._report = self._link.send(Call.GREET, self._who())
        self._reported = True
        return self._seen

    def newest(self) -> Seen:
        """Return the answer to the last `report`. Without a report since the last call of this method, it makes a new one."""
        reported, self._reported = self._reported, False
        if not reported:
            self._take_report()
            self._seen = self._greet()
        return self._seen

    def place_barrier(self, action: str) -> tuple[bool, Barrier]:
        """Hold the other workers. Returns whether this call placed the barrier, and the current barrier."""
        place = PlaceBarrier(who=self._who(), action=action, token=secrets.randbits(62))
        answer = json.loads(self._link.call(Call.PLACE_BARRIER, place).text)
        return answer["placed"], Barrier(**answer["barrier"])

    def remove_barrier(self) -> None:
        """Let the other workers continue."""
        self._link.call(Call.REMOVE_BARRIER, self._who())

    def hold(self, number: int) -> bool:
        """Wait at barrier `number`. Returns whether that is still needed."""
        held: bool = json.loads(self._link.call(Call.HOLD, Hold(who=self._who(), number=number)).text)["held"]
        return held

    def end_run(self) -> None:
        """Forget all workers, so that none counts as finished in the next run. Called by the chief after a success."""
        self._link.call(Call.END_RUN, self._who())

    def stay(self, seconds: float) -> None:
        """Count as alive for `seconds` after the last call: this worker has failed and is about to retry."""
        self._lease = max(self._lease, seconds)
        self._link.call(Call.GREET, self._who(), timeout=STAY_SECONDS)

    def close(self) -> None:
        """Stop renewing the lease, which then expires."""
        self._closed.set()
        self._thread.join()
        if self._report is not None:
            self._report.abandon()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _who(self) -> Greet:
        return Greet(index=self._index, epoch=self._epoch, lease=self._lease, phase=self._phase, run=self._run)

    def _greet(self) -> Seen:
        return Seen.from_json(self._link.call(Call.GREET, self._who()).text)

    def _take_report(self) -> Seen:
        """Return the answer to the report in flight, if there is one, and otherwise the newest answer."""
        report, self._report = self._report, None
        answer = None if report is None else self._link.answered(report)
        return self._seen if answer is None else Seen.from_json(answer.text)

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat):
            try:
                self._greet()
            except StalePushError as error:
                _logger.error("%s", error)
                return
            except ServerError as error:
                _logger.warning("the server that coordinates the run was not reached: %s", error)
