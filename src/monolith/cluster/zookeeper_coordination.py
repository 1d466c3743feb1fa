"""`ZKCoordination`: the `Coordination` of a job that has a ZooKeeper.

Below `/monolith/<job>/coordination/<launch>` there are, for each worker, a node `members/<index>` with its epoch and phase,
which stays, and an ephemeral node `alive/<index>`, which ends with its session. The ephemeral node `barrier` ends with the
session of the chief. Its number is that of the transaction that made it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from monolith.cluster.coordination import Barrier, Member, Members, Phase, Seen, StepCounter
from monolith.cluster.liveness import Liveness
from monolith.cluster.zookeeper import close_zk_client, import_kazoo, job_path, make_zk_client, start_zk_client
from monolith.errors import ServerError, StalePushError, UnavailableError

if TYPE_CHECKING:
    from kazoo.client import KazooClient
    from kazoo.interfaces import IAsyncResult
    from kazoo.protocol.states import ZnodeStat

__all__ = ["ZKCoordination", "ZKSession"]

# A round fails only if another process changed the node at the same moment.
_ROUNDS = 20

_logger = logging.getLogger(__name__)


class ZKSession:
    """The session of one process of a job with ZooKeeper: as long as it lasts, the process counts as alive.

    Args:
        job_name: the name of the job in ZooKeeper.
        zk_server: ZooKeeper's servers, by default those of the environment.
        run: name of this launch of the job, "" if there is only one. Members of other launches are not seen.
        liveness: a process that ZooKeeper has not heard from for the lease counts as dead.
        answer_secs: the time limit of a call.
    """

    def __init__(
        self,
        job_name: str,
        zk_server: str | None = None,
        *,
        run: str = "",
        liveness: Liveness | None = None,
        answer_secs: float = 15.0,
    ) -> None:
        self.liveness = liveness or Liveness()
        self.path = f"{job_path(job_name)}/coordination" + f"/{quote(run, safe='')}" * bool(run)
        self._answer_secs = answer_secs
        self.exceptions = import_kazoo("exceptions")
        timeout = import_kazoo("handlers.threading").KazooTimeoutError
        self._failures = (self.exceptions.KazooException, timeout)
        self.client: KazooClient = make_zk_client(zk_server, session_secs=self.liveness.lease_secs)
        start_zk_client(self.client, answer_secs)
        with self.calling():
            for folder in ("members", "alive"):
                self.client.ensure_path(f"{self.path}/{folder}")

    @property
    def number(self) -> int:
        """The id of the session, which changes after the session has expired."""
        session = self.client.client_id
        return 0 if session is None else int(session[0])

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Turn failures of ZooKeeper calls into `UnavailableError`, after which they may be repeated."""
        try:
            yield
        except self._failures as error:
            raise UnavailableError(f"the request failed in ZooKeeper, in {self.path}: {error!r}") from error

    def answer(self, result: IAsyncResult) -> Any:  # noqa: ANN401 - what it is depends on the call
        """Return the answer to a call. Without a connection the client itself would wait for ever."""
        return result.get(timeout=self._answer_secs)

    def read(self, path: str) -> tuple[dict[str, Any], ZnodeStat] | None:
        """Return the JSON in a node, or None if there is no node."""
        return self.taken(self.client.get_async(f"{self.path}/{path}"))

    def taken(self, result: IAsyncResult) -> tuple[dict[str, Any], ZnodeStat] | None:
        """Return the JSON that a call in progress reads, or None if there is no node."""
        try:
            data, stat = self.answer(result)
        except self.exceptions.NoNodeError:
            return None
        return json.loads(data or b"{}"), stat

    def close(self) -> None:
        """End the session: the process counts as dead at once."""
        close_zk_client(self.client)


class ZKCoordination:
    """Worker `index` of a job, a member of it from now on. See `Coordination`.

    Args:
        session: that of this process. It stays open when this object is closed.
        index: the number of this worker. 0 is the chief.
        epoch: larger than that of every earlier incarnation of this worker.
        steps: the global step, which the parameter servers know. Closed with this object.
    """

    def __init__(self, session: ZKSession, *, index: int, epoch: int, steps: StepCounter) -> None:
        self._session, self._index, self._epoch, self._steps = session, index, epoch, steps
        self._phase: Phase = "joined"
        self._held: int | None = None
        self._stays = False
        self._seen = Seen(step=0)
        self._reported = False
        self._asked: IAsyncResult | None = None
        self._published_in = 0
        # Held while the nodes of this worker are written, by its own thread or the keeper.
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="monolith-zookeeper-heartbeat", daemon=True)
        self._publish()
        self._keeper.start()

    @property
    def index(self) -> int:
        """The number of this worker."""
        return self._index

    def enter(self, phase: Phase) -> None:
        """Report the phase of this worker."""
        self._phase = phase
        self._publish()

    def members(self) -> Members:
        """Ask for all workers, the global step and the barrier."""
        with self._session.calling():
            known, alive = self._nodes("members"), self._nodes("alive")
            barrier = self._standing(self._session.read("barrier"))
        number = None if barrier is None else barrier.number
        found = []
        for index, node in sorted(known.items()):
            sign = alive.get(index, {})
            is_alive = sign.get("epoch") == node["epoch"]
            held = is_alive and number is not None and sign.get("held") == number
            found.append(Member(index=index, epoch=node["epoch"], phase=node["phase"], alive=is_alive, held=held))
        return Members(members=tuple(found), step=self._steps.now(), barrier=barrier)

    def report(self) -> Seen:
        """Ask for the global step and the barrier without waiting for the answers. Returns those of the report before."""
        asked, self._asked = self._asked, None
        with self._session.calling():
            barrier = None if asked is None else self._standing(self._session.taken(asked))
            self._asked = self._session.client.get_async(f"{self._session.path}/barrier")
        self._seen, self._reported = Seen(step=self._steps.report(), barrier=barrier), True
        return self._seen

    def newest(self) -> Seen:
        """Return what the last `report` returned. Without a report since the last call of this method, it is asked for."""
        reported, self._reported = self._reported, False
        if not reported:
            with self._session.calling():
                barrier = self._standing(self._session.read("barrier"))
            self._seen = Seen(step=self._steps.now(), barrier=barrier)
        return self._seen

    def place_barrier(self, action: str) -> tuple[bool, Barrier]:
        """Hold the other workers. Returns whether this call placed the barrier, and the current barrier."""
        self._require_current()
        mine = {"action": action, "index": self._index, "epoch": self._epoch}
        with self._session.calling():
            for _ in range(_ROUNDS):
                placed = self._create("barrier", mine)
                there = self._session.read("barrier")
                if (standing := self._standing(there)) is not None:
                    return placed, standing
                if there is not None:
                    # It belongs to a chief that was replaced and whose session has not expired yet.
                    self._delete("barrier", version=there[1].version)
        raise UnavailableError(f"{self._session.path}/barrier keeps being changed by others; are there two chiefs?")

    def remove_barrier(self) -> None:
        """Let the other workers continue."""
        self._require_current()
        with self._session.calling():
            self._delete("barrier")

    def hold(self, number: int) -> bool:
        """Wait behind barrier `number`. Returns whether the barrier is still there. If so, call again."""
        with self._session.calling():
            barrier = self._standing(self._session.read("barrier"))
        held = number if barrier is not None and barrier.number == number else None
        if held != self._held:
            self._held = held
            self._publish()
        return held is not None

    def end_run(self) -> None:
        """In the chief, after a success: forget all workers, so that none counts as finished in the next run."""
        self._require_current()
        with self._session.calling():
            for index in self._nodes("members"):
                self._delete(f"members/{index}")

    def stay(self, seconds: float) -> None:
        """Remain a member after `close`: as long as the session of this process lasts, whatever `seconds` says."""
        self._stays = True

    def close(self) -> None:
        """Leave the run: remove the ephemeral node of this worker."""
        self._closed.set()
        self._keeper.join()
        self._steps.close()
        if not self._stays:
            try:
                with self._session.calling():
                    self._withdraw()
            except ServerError as error:
                _logger.warning("worker %d counts as alive until its session is over: %s", self._index, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _publish(self) -> None:
        """Write both nodes of this worker, unless a successor has."""
        with self._writing, self._session.calling():
            self._write_member()
            self._write_alive()
            self._published_in = self._session.number

    def _write_member(self) -> None:
        mine = {"epoch": self._epoch, "phase": self._phase}
        for _ in range(_ROUNDS):
            found = self._session.read(f"members/{self._index}")
            if found is None:
                if self._create(f"members/{self._index}", mine, ephemeral=False):
                    return
                continue
            if found[0]["epoch"] > self._epoch:
                raise self._replaced(found[0]["epoch"])
            if found[0] == mine or self._set(f"members/{self._index}", mine, version=found[1].version):
                return
        raise UnavailableError(f"{self._session.path}/members/{self._index} keeps being changed by others")

    def _write_alive(self) -> None:
        path, mine = f"alive/{self._index}", {"epoch": self._epoch, "held": self._held}
        for _ in range(_ROUNDS):
            if self._create(path, mine):
                return
            found = self._session.read(path)
            if found is None:
                continue
            node, stat = found
            if node["epoch"] > self._epoch:
                raise self._replaced(node["epoch"])
            if stat.ephemeralOwner != self._session.number:
                # It belongs to a predecessor: setting only the data would leave it to that session.
                self._delete(path, version=stat.version)
            elif node == mine or self._set(path, mine, version=stat.version):
                return
        raise UnavailableError(f"{self._session.path}/{path} keeps being changed by others")

    def _withdraw(self) -> None:
        found = self._session.read(f"alive/{self._index}")
        if found is not None and found[0]["epoch"] == self._epoch:
            self._delete(f"alive/{self._index}", version=found[1].version)

    def _require_current(self) -> None:
        with self._session.calling():
            found = self._session.read(f"members/{self._index}")
        if found is not None and found[0]["epoch"] > self._epoch:
            raise self._replaced(found[0]["epoch"])

    def _replaced(self, newest: int) -> StalePushError:
        return StalePushError(
            f"epoch: {self._epoch} of worker {self._index} is over, {newest} has joined since; this process has been replaced "
            "and should end"
        )

    def _standing(self, found: tuple[dict[str, Any], ZnodeStat] | None) -> Barrier | None:
        """Return the barrier of a node, or None if the worker that placed it was replaced."""
        if found is None:
            return None
        node, stat = found
        placer = self._session.read(f"members/{node['index']}")
        if placer is None or placer[0]["epoch"] != node["epoch"]:
            return None
        return Barrier(number=stat.czxid, action=node["action"])

    def _nodes(self, folder: str) -> dict[int, dict[str, Any]]:
        client, path = self._session.client, f"{self._session.path}/{folder}"
        names = [name for name in self._session.answer(client.get_children_async(path)) if name.isdecimal()]
        asked = {int(name): client.get_async(f"{path}/{name}") for name in names}
        found = {index: self._session.taken(result) for index, result in asked.items()}
        return {index: one[0] for index, one in found.items() if one is not None}

    def _create(self, path: str, node: dict[str, Any], *, ephemeral: bool = True) -> bool:
        data = json.dumps(node).encode()
        call = self._session.client.create_async(f"{self._session.path}/{path}", data, ephemeral=ephemeral)
        return self._done(call, self._session.exceptions.NodeExistsError)

    def _set(self, path: str, node: dict[str, Any], *, version: int) -> bool:
        data = json.dumps(node).encode()
        call = self._session.client.set_async(f"{self._session.path}/{path}", data, version=version)
        return self._done(call, self._session.exceptions.BadVersionError, self._session.exceptions.NoNodeError)

    def _delete(self, path: str, *, version: int = -1) -> bool:
        call = self._session.client.delete_async(f"{self._session.path}/{path}", version=version)
        return self._done(call, self._session.exceptions.BadVersionError, self._session.exceptions.NoNodeError)

    def _done(self, call: IAsyncResult, *lost: type[Exception]) -> bool:
        """Whether a change was made, and not lost to a concurrent one."""
        try:
            self._session.answer(call)
        except lost:
            return False
        return True

    def _keep(self) -> None:
        """Publish the nodes of this worker again when a session was lost and another one begins."""
        while not self._closed.wait(self._session.liveness.heartbeat_secs):
            if self._session.number == self._published_in:
                continue
            try:
                self._publish()
            except StalePushError as error:
                _logger.error("%s", error)
                return
            except ServerError as error:
                _logger.warning("could not report to ZooKeeper that worker %d is alive: %s", self._index, error)
