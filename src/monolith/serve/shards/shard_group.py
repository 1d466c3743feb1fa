"""`ShardGroup`: finds the replicas of all shards of an export, chooses among them, and retries on another one."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    MonolithError,
    OverloadedError,
    ProtocolError,
    ServerError,
    UnavailableError,
)
from monolith.process_bound import WorkerThreads
from monolith.serve.replica import Lag
from monolith.serve.shards.addresses import FindShards, ShardAddresses, all_addresses
from monolith.serve.shards.lookup_scope import current_report
from monolith.serve.shards.messages import ShardCall, ShardDescription
from monolith.serve.shards.shard_map import ServedShard, ShardMap, choose_replica, shards_without
from monolith.serve.shards.shard_replica import Attempt, ReplicaStatus, ShardClientConfig, ShardReplica
from monolith.table.buckets import mask_of, ranges_of
from monolith.transport.calls import CallNumber
from monolith.transport.frames import Frame

__all__ = ["ShardCounters", "ShardGroup", "ShardRequest"]

_log = logging.getLogger(__name__)
PROBE_THREADS = 8
"""Replicas that are probed at the same time."""
START_PAUSE = 0.1
"""Seconds between two looks for shards that are missing at the start."""


@dataclass
class ShardCounters:
    """What a front end has asked of its shards since it started."""

    requests: int = 0
    """Requests to shards, without retries."""
    retries: int = 0
    """Requests that were repeated on another replica."""
    failures: int = 0
    """Attempts that failed."""
    unanswered: int = 0
    """Requests that no replica answered."""
    missing_ids: int = 0
    """Ids that were read as unseen, because their shard did not answer."""


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """A request to any replica of a shard."""

    shard: ServedShard
    call: CallNumber
    text: str
    arrays: Sequence[np.ndarray] = ()


class ShardGroup:
    """The replicas of all shards of one export. Thread-safe.

    A request goes to the less busy of two replicas that were drawn at random. If it fails it is repeated on another replica. A
    replica that has failed gets no requests until it answers a probe. Probes are made by a thread, with growing pauses.

    Args:
        addresses: of the replicas, as `parse_shards` returns them. Empty with `find`.
        find: returns the addresses, called at the start and every `ShardClientConfig.refresh_secs`.
        config: how to ask them.
        export: the identity of the export that they must serve. None: any, but all the same.

    Raises:
        ConfigError: shards serve different exports, or some buckets belong to none or to two of them.
        UnavailableError: some shards did not answer within `ShardClientConfig.start_secs`.
    """

    def __init__(
        self,
        addresses: ShardAddresses = (),
        *,
        find: FindShards | None = None,
        config: ShardClientConfig | None = None,
        export: str | None = None,
    ) -> None:
        if bool(addresses) == (find is not None):
            raise InvalidArgumentError("addresses: expected a list of addresses or find, and not both")
        self.config = config or ShardClientConfig()
        self.counters = ShardCounters()
        self.map = ShardMap.of(())
        """The newest map."""
        self._given, self._find, self._export = addresses, find, export
        self._described: ShardDescription | None = None
        self._replicas: dict[str, ShardReplica] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._said: set[str] = set()
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="monolith-shards", daemon=True)
        self._thread.start()

    @property
    def described(self) -> ShardDescription:
        """The export that all of them serve, as the first of them described it."""
        assert self._described is not None
        return self._described

    def status(self) -> list[ReplicaStatus]:
        """Return the health of every replica."""
        shard_of = {
            replica.address: number for number, shard in enumerate(self.map.shards) for replica in shard.replicas
        }
        return [replica.status(shard_of.get(address)) for address, replica in sorted(self._replicas.items())]

    def ask(self, requests: Sequence[ShardRequest]) -> list[Frame | UnavailableError]:
        """Send all requests, each to a replica of its shard. Returns the answer of each, or why no replica gave one."""
        report = current_report()
        deadline = time.monotonic() + self.config.timeout
        deadline = deadline if report is None else min(deadline, report.deadline)
        waiting = [_Waiting(request) for request in requests]
        open_ones = waiting
        for left in range(self.config.attempts, 0, -1):
            self._round(open_ones, deadline, left)
            open_ones = [one for one in open_ones if one.frame is None and not one.given_up]
            if not open_ones or time.monotonic() >= deadline:
                break
            if left > 1 and report is not None:
                report.retries += len(open_ones)
        retries = sum(max(0, len(one.tried) - 1) for one in waiting)
        outcomes = [self._unavailable(one) if one.frame is None else one.frame for one in waiting]
        with self._lock:
            self.counters.requests += len(waiting)
            self.counters.retries += retries
            self.counters.failures += sum(len(one.errors) for one in waiting)
            self.counters.unanswered += sum(isinstance(outcome, UnavailableError) for outcome in outcomes)
        return outcomes

    def lag(self) -> Lag | None:
        """Return how far the rows are behind training, those of the shard that is furthest behind, as answers have said.

        None if no shard follows a run.
        """
        told = [
            max(replica.told for replica in shard.replicas if replica.told is not None)
            for shard in self.map.shards
            if any(replica.told is not None for replica in shard.replicas)
        ]
        if not told:
            return None
        now = time.monotonic()
        each = [(now - received, Lag(**json.loads(text))) for received, text in told]
        return Lag(
            seconds=max(age + lag.seconds for age, lag in each),
            step=min(lag.step for _, lag in each),
            event_time=min(lag.event_time for _, lag in each),
            sequence=min(lag.sequence for _, lag in each),
            connected=all(lag.connected for _, lag in each),
            missing=next((lag.missing for _, lag in each if lag.missing), ""),
        )

    def count_missing(self, ids: int) -> None:
        """Count ids that were read as unseen."""
        with self._lock:
            self.counters.missing_ids += ids

    def close(self) -> None:
        """Close all connections. The shards keep running."""
        self._closed.set()
        self._wake.set()
        thread = getattr(self, "_thread", None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        for replica in self._replicas.values():
            replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _round(self, waiting: Sequence[_Waiting], deadline: float, left: int) -> None:
        """Make one attempt for each of them. All replicas work in parallel."""
        begun: list[tuple[_Waiting, Attempt]] = []
        try:
            for one in waiting:
                request, limit = one.request, deadline - time.monotonic()
                replica = choose_replica(request.shard, one.tried)
                if replica is None or limit <= 0:
                    one.given_up = True
                    continue
                if len(request.shard.replicas) > 1:
                    limit /= left
                one.tried.append(replica)
                attempt = replica.begin(request.call, request.text, request.arrays, limit=limit)
                begun.append((one, attempt))
                attempt.send()
            for one, attempt in begun:
                self._finish(one, attempt)
        except BaseException:
            for _, attempt in begun:
                attempt.abandon()
            raise
        finally:
            for _, attempt in begun:
                attempt.replica.ended()

    def _finish(self, one: _Waiting, attempt: Attempt) -> None:
        try:
            one.frame = attempt.finish()
        except ServerError as error:
            if attempt.refused and isinstance(error, ProtocolError):
                raise  # the request is at fault, not the replica
            one.errors.append(error)
            # The deadline of a request may be too short for any replica.
            patient = time.monotonic() - attempt.began >= 0.5 * self.config.timeout / self.config.attempts
            if not isinstance(error, OverloadedError) and (patient or not isinstance(error, DeadlineExceededError)):
                attempt.replica.failed(error, attempt.began)
                self._wake.set()
        else:
            attempt.replica.answered(attempt.began)
            if attempt.call is ShardCall.LOOKUP and one.frame.text != "{}":
                attempt.replica.told = (time.monotonic(), one.frame.text)

    def _unavailable(self, one: _Waiting) -> UnavailableError:
        shard = one.request.shard
        kind = OverloadedError if one.errors and all(isinstance(e, OverloadedError) for e in one.errors) else None
        said = [f"{replica.address}: {error}" for replica, error in zip(one.tried, one.errors, strict=True)]
        said += [replica.why() for replica in shard.replicas if replica not in one.tried]
        return (kind or UnavailableError)(
            f"{shard}: none of its {len(shard.replicas)} replicas answered within {self.config.timeout:g} s: {'; '.join(said)}"
        )

    def _open(self) -> None:
        """Wait until every bucket has a shard that answers."""
        deadline = time.monotonic() + self.config.start_secs
        while True:
            self._list()
            problems = self._probe(list(self._replicas.values()))
            # A list names the replicas of one export. A service may also list those of the next one.
            if problems and self._find is None:
                raise ConfigError("; ".join(problems))
            if self._described is not None and not self.map.missing:
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(START_PAUSE)
        if self._described is not None and self.config.partial == "initial":
            _log.warning("%s; ids of these buckets read as unseen", self._what_is_missing())
            return
        raise UnavailableError(f"{self._what_is_missing()}, waited for {self.config.start_secs:g} s")

    def _what_is_missing(self) -> str:
        silent = [replica.why() for replica in self._replicas.values() if not replica.healthy]
        missing = ", ".join(f"{first}..{end - 1}" for first, end in self.map.missing)
        return f"shards: none of {len(self._replicas)} replicas serves the buckets {missing}" + "".join(
            f"; {text}" for text in silent
        )

    def _list(self) -> bool:
        """Add replicas that were announced, and remove those that are not any more. Returns whether some are new."""
        try:
            groups = self._given if self._find is None else self._find(self._described.shards if self._described else 0)
        except MonolithError as error:
            self._say(f"the shards cannot be looked up, those known before are used: {error}")
            return False
        found = all_addresses(groups)
        if not found:
            # A failed or empty answer of a service must not replace a list that works.
            known = "those known before are used" if self._replicas else "waiting for the first"
            self._say(f"no shard is announced; {known}")
            return False
        new = [address for address in found if address not in self._replicas]
        with self._lock:
            self._replicas |= {address: ShardReplica(address, self.config) for address in new}
        self._forget([address for address in self._replicas if address not in found])
        return bool(new)

    def _forget(self, gone: Sequence[str]) -> None:
        with self._lock:
            for address in gone:
                replica = self._replicas[address]
                shard = next((shard for shard in self.map.shards if replica in shard.replicas), None)
                if shard is not None and all(other.address in gone for other in shard.replicas):
                    self._say(f"{shard} is not announced any more; {address} is still used")
                    continue
                self.map = ShardMap.of(shards_without(self.map.shards, replica))
                del self._replicas[address]
                replica.close()

    def _watch(self) -> None:
        """Probe replicas that failed, and look for new ones, until `close`."""
        refresh_at = time.monotonic() + self.config.refresh_secs
        while not self._closed.is_set():
            due = [replica.retry_at for replica in list(self._replicas.values()) if not replica.healthy]
            due += [refresh_at] if self._find is not None else []
            self._wake.wait(max(0.01, min(due) - time.monotonic()) if due else None)
            self._wake.clear()
            if self._closed.is_set():
                return
            now = time.monotonic()
            try:
                if self._find is not None and now >= refresh_at:
                    self._list()
                    refresh_at = now + self.config.refresh_secs
                self._probe([one for one in list(self._replicas.values()) if not one.healthy and now >= one.retry_at])
            except Exception:
                _log.exception("shards could not be probed")

    def _probe(self, replicas: Sequence[ShardReplica]) -> list[str]:
        """Ask replicas what they hold. Returns what is wrong with those that answered."""
        waiting = [replica for replica in replicas if not replica.healthy]
        if not waiting:
            return []
        with WorkerThreads(min(PROBE_THREADS, len(waiting)), thread_name_prefix="monolith-shard-probe") as threads:
            problems = list(threads.map(self._probe_one, waiting))
        return [problem for problem in problems if problem]

    def _probe_one(self, replica: ShardReplica) -> str:
        began = time.monotonic()
        try:
            frame = replica.ask(ShardCall.DESCRIBE, limit=self.config.timeout)
            described = ShardDescription.from_json(frame.text)
        except MonolithError as error:
            replica.failed(error, began)
            return ""
        with self._lock:
            problem = self._adopt(replica, described)
        if problem:
            replica.failed(ConfigError(problem), began)
            self._say(problem)
        return problem

    def _adopt(self, replica: ShardReplica, described: ShardDescription) -> str:
        """Give a replica its place in the map. Returns what is wrong with it, "" if nothing is."""
        others = shards_without(self.map.shards, replica)
        problem = self._misfit(replica, described, others)
        if problem:
            replica.described = None
            self.map = ShardMap.of(others)
            return problem
        self._described = self._described or described
        replica.recovered(described)
        shards = {shard.ranges: shard for shard in others}
        there = shards.get(described.ranges)
        replicas = (replica,) if there is None else (*there.replicas, replica)
        shards[described.ranges] = ServedShard(ranges=described.ranges, replicas=replicas)
        self.map = ShardMap.of(shards.values())
        return ""

    def _misfit(self, replica: ShardReplica, described: ShardDescription, shards: Sequence[ServedShard]) -> str:
        wanted = self._export or (self._described.export if self._described else described.export)
        if described.export != wanted:
            version = f" (version {self._described.version})" if self._described else ""
            return (
                f"shards: {replica.address} serves version {described.version} of export {described.export[:12]}, "
                f"expected export {wanted[:12]}{version}; start it with that export"
            )
        mine = mask_of(described.ranges)
        for shard in shards:
            others = ", ".join(other.address for other in shard.replicas)
            if shard.ranges != described.ranges and (mask_of(shard.ranges) & mine).any():
                shared = list(ranges_of(mask_of(shard.ranges) & mine))
                return f"shards: {replica.address} and {others} both serve buckets {shared}"
        return self._misgrouped(replica, described, shards)

    def _misgrouped(self, replica: ShardReplica, described: ShardDescription, shards: Sequence[ServedShard]) -> str:
        groups = self._given if len(self._given) > 1 else ()
        for shard in shards:
            for other in shard.replicas:
                together = any({replica.address, other.address} <= set(group) for group in groups)
                if groups and together != (shard.ranges == described.ranges):
                    return (
                        f"shards: {replica.address} serves buckets {list(described.ranges)} and {other.address} "
                        f"{list(shard.ranges)}; write , between replicas of one shard and ; between shards"
                    )
        return ""

    def _say(self, text: str) -> None:
        """Log a problem once, not with every probe."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)


@dataclass
class _Waiting:
    """A request, and what was tried for it."""

    request: ShardRequest
    frame: Frame | None = None
    tried: list[ShardReplica] = field(default_factory=list)
    errors: list[ServerError] = field(default_factory=list)
    """Of each replica that was tried."""
    given_up: bool = False
    """There is no other replica to try, or no time."""
