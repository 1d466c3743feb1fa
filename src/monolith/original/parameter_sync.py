"""The sending end of parameter sync: rows that training has touched are pushed to serving targets.

An id is touched when its row changes. What is pushed is its row at the time of the push, the newest. Unlike in the original an id
stays touched, for each target by itself, until that target has it, and a target that is new or was started again gets all rows.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from monolith.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    MonolithError,
    OwnershipChangedError,
    ServerRestartedError,
    UnavailableError,
)
from monolith.follow.feed import Feed
from monolith.original.assign_signatures import RAW_ASSIGN, PushHeader, SyncCall
from monolith.original.remote_predict import StatusCode
from monolith.original.touched_keys import TOUCHED_KEY_SET_CAPACITY
from monolith.proto.parameter_sync_pb2 import (
    ClientConfig,
    DeltaEmbeddingHashTable,
    PushRequest,
    PushResponse,
    PushResult,
)
from monolith.table.buckets import NUM_BUCKETS, bucket_of, mask_of
from monolith.transport.link import Link

__all__ = ["MAX_REQUEST_BYTES", "ParameterSyncClient", "split_request"]

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Bytes of a push. Larger ones are split."""
READ_BYTES = 2**26
"""Bytes of rows that are read from the tables at a time."""
VIEW_BYTES = 2**24
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds until a target that failed is tried again, doubled each time."""
LOG_SECS = 10.0
"""Seconds between two log lines about a target that fails."""
PARALLEL_TARGETS = 8

_log = logging.getLogger(__name__)


def split_request(request: PushRequest, limit: int = MAX_REQUEST_BYTES) -> list[PushRequest]:
    """Split a request that has more than `limit` bytes, as the original does.

    There are ceil(size / limit) parts. The ids of every table are divided evenly, and the last part takes the remainder. Every
    part has all tables.

    Example:
        >>> delta = DeltaEmbeddingHashTable(unique_id="item", dim_size=1, fids=range(10), embeddings=[0.5] * 10)
        >>> whole = PushRequest(delta_hash_tables=[delta])
        >>> [list(part.delta_hash_tables[0].fids) for part in split_request(whole, limit=whole.ByteSize() // 3 + 1)]
        [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    """
    parts = math.ceil(request.ByteSize() / limit)
    if parts <= 1:
        return [request]
    found = []
    for part in range(parts):
        piece = PushRequest(
            model_name=request.model_name, signature_name=request.signature_name, timeout_in_ms=request.timeout_in_ms
        )
        for kind in ("delta_hash_tables", "delta_multi_hash_tables"):
            getattr(piece, kind).extend(_piece(delta, part, parts) for delta in getattr(request, kind))
        found.append(piece)
    return found


def _piece(delta: DeltaEmbeddingHashTable, part: int, parts: int) -> DeltaEmbeddingHashTable:
    def bounds(count: int) -> slice:
        size = count // parts
        return slice(part * size, count if part == parts - 1 else (part + 1) * size)

    ids = bounds(len(delta.fids))
    return DeltaEmbeddingHashTable(
        unique_id=delta.unique_id,
        dim_size=delta.dim_size,
        fids=delta.fids[ids],
        embeddings=delta.embeddings[ids.start * delta.dim_size : ids.stop * delta.dim_size],
        erased_fids=delta.erased_fids[bounds(len(delta.erased_fids))],
        scales=delta.scales,
    )


@dataclass
class _Target:
    """What a target lacks. One thread at a time uses it."""

    address: str
    link: Link
    touched: dict[str, np.ndarray] = field(default_factory=dict)
    """By table: ids whose rows have changed, sorted, each once."""
    buckets: list[tuple[str, int, int]] = field(default_factory=list)
    """Tables and buckets whose rows it gets all of."""
    pushed: int = 0
    """Ids that it has received."""
    failures: int = 0
    """Since the last push that it accepted."""
    retry_at: float = float("-inf")
    logged_at: float = float("-inf")
    remark: str = ""

    @property
    def count(self) -> int:
        return sum(map(len, self.touched.values()))


class ParameterSyncClient:
    """Pushes the rows of a feed to targets. The feed must have been started. Not thread-safe.

    Args:
        feed: of the process that trains: its `RunFeed.feed`, or that of a parameter server or a rank.
        capacity: touched ids that are remembered for each target. With more, it gets all rows, and nothing is lost.
        connect: returns a link to a target, given its address and the seconds of a call.
        clock: seconds, rising.

    Example:
        >>> from monolith import EmbeddingTable
        >>> from monolith.original.assign_signatures import ParameterSyncServer
        >>> from monolith.testing import sgd_table_config
        >>> trained, served = (EmbeddingTable(sgd_table_config(1, name="item")) for _ in range(2))
        >>> feed = Feed(lambda: {"item": trained}, every=3600)
        >>> feed.start()
        >>> trained.assign([7], np.ones((1, 1), np.float32))
        >>> _ = feed.drain()
        >>> with ParameterSyncServer({"item": [served]}) as target, ParameterSyncClient(feed) as client:
        ...     _ = client.sync(ClientConfig(targets=[target.address]))
        >>> served.lookup([7]).tolist()
        [[1.0]]
        >>> feed.close()
    """

    def __init__(
        self,
        feed: Feed,
        *,
        capacity: int = TOUCHED_KEY_SET_CAPACITY,
        connect: Callable[[str, float], Link] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed, self._capacity, self._clock = feed, capacity, clock
        self._connect = connect or (lambda address, timeout: Link(address, timeout=timeout, max_streams=1))
        self._stream = self._since = 0
        self._targets: dict[str, _Target] = {}
        self._sender = secrets.randbits(62) | 1
        self._sequence = 0
        self._counting = threading.Lock()

    @property
    def position(self) -> tuple[int, int]:
        """The stream and the number of the newest changes that were taken from the feed."""
        return self._stream, self._since

    @property
    def lacking(self) -> dict[str, bool]:
        """Whether each target lacks something that was taken from the feed."""
        return {address: bool(one.touched or one.buckets) for address, one in self._targets.items()}

    def sync(self, config: ClientConfig, *, retry: bool = False) -> PushResult:
        """Push what each target of `config` lacks. Returns the outcome for each that was called.

        A target that failed is left alone for a while, unless `retry`. What it lacks is kept.
        """
        self._take()
        self._retarget(config)
        due = [
            one
            for one in self._targets.values()
            if (one.touched or one.buckets) and (retry or self._clock() >= one.retry_at)
        ]
        if not due:
            return PushResult()
        with ThreadPoolExecutor(min(len(due), PARALLEL_TARGETS), thread_name_prefix="monolith-sync") as pool:
            return PushResult(responses=pool.map(lambda one: self._pushed(one, config), due))

    def close(self) -> None:
        """Close the connections."""
        for one in self._targets.values():
            one.link.close()
        self._targets = {}

    def __enter__(self) -> ParameterSyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _retarget(self, config: ClientConfig) -> None:
        wanted = list(dict.fromkeys(config.targets))
        for address in [address for address in self._targets if address not in wanted]:
            self._targets.pop(address).link.close()
        for address in wanted:
            if address not in self._targets:
                one = _Target(address, self._connect(address, config.timeout_in_ms / 1000))
                one.buckets = self._all_buckets()
                self._targets[address] = one

    def _take(self) -> None:
        """Take the newest changes from the feed: which ids were touched."""
        while True:
            view = self._feed.view(stream=self._stream, since=self._since, max_bytes=VIEW_BYTES)
            if view.segments is None:
                # Another stream, or changes that are not kept any more: only all rows are complete.
                self._stream, self._since = view.stream, view.newest
                for one in self._targets.values():
                    self._needs_all(one)
                return
            if not view.segments:
                return
            for segment in view.segments:
                for one in self._targets.values():
                    for part in segment.parts:
                        ids = np.concatenate([part.ids, part.erased])
                        one.touched[part.name] = np.union1d(one.touched.get(part.name, ids[:0]), ids)
                    one.buckets += [(name, *span) for name in self._feed.tables() for span in segment.gained]
                self._since = segment.sequence
            for one in self._targets.values():
                if one.count > self._capacity:
                    self._needs_all(one)

    def _needs_all(self, one: _Target) -> None:
        one.touched, one.buckets = {}, self._all_buckets()

    def _all_buckets(self) -> list[tuple[str, int, int]]:
        """Return all tables and buckets of the feed, in parts of about `MAX_REQUEST_BYTES`."""
        found = []
        for name, table in self._feed.tables().items():
            step = max(1, MAX_REQUEST_BYTES * NUM_BUCKETS // max(1, len(table) * (8 + 4 * table.dim)))
            for first, end in self._feed.ranges():
                found += [(name, at, min(end, at + step)) for at in range(first, end, step)]
        return found

    def _pushed(self, one: _Target, config: ClientConfig) -> PushResponse:
        before = one.pushed
        try:
            self._push_buckets(one, config)
            self._push_touched(one, config)
        except ServerRestartedError:
            # Its rows are those it started with. The next round pushes all of them.
            _log.info("%s was started again: it gets all rows", one.address)
            one.link.close()
            one.link = self._connect(one.address, config.timeout_in_ms / 1000)
            self._needs_all(one)
            return self._failed(one, UnavailableError(f"{one.address} was started again"), wait=False)
        except OwnershipChangedError as error:
            # Rows are moving to another process, which pushes them.
            return self._failed(one, error, wait=False)
        except MonolithError as error:
            return self._failed(one, error)
        one.failures, one.retry_at = 0, float("-inf")
        return PushResponse(status_code=StatusCode.OK, target=one.address, update_num=one.pushed - before)

    def _failed(self, one: _Target, error: MonolithError, *, wait: bool = True) -> PushResponse:
        one.failures += 1
        now = self._clock()
        if wait:
            one.retry_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(one.failures - 1, 10))
            if now - one.logged_at >= LOG_SECS:
                one.logged_at = now
                _log.warning("rows cannot be pushed to %s and are kept for it: %s", one.address, error)
        codes = {
            DeadlineExceededError: StatusCode.DEADLINE_EXCEEDED,
            InvalidArgumentError: StatusCode.INVALID_ARGUMENT,
            UnavailableError: StatusCode.UNAVAILABLE,
        }
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), StatusCode.INTERNAL)
        return PushResponse(status_code=code, error_message=str(error), target=one.address, update_num=0)

    def _push_buckets(self, one: _Target, config: ClientConfig) -> None:
        while one.buckets:
            name, first, end = one.buckets[-1]
            owned = mask_of(self._feed.ranges())
            read_until = end
            if owned[first:end].all():
                read_until, ids, values = self._feed.rows(name, first, end)
                delta = self._delta(name, ids, values)
                delta.first_bucket, delta.end_bucket = first, read_until
                # Not split: the target removes what it holds of these buckets and this request does not have.
                self._send(one, self._request(config, {name: delta}))
            one.buckets.pop()
            if read_until < end:
                one.buckets.append((name, read_until, end))

    def _push_touched(self, one: _Target, config: ClientConfig) -> None:
        while one.touched:
            some = self._some(one.touched)
            owned = mask_of(self._feed.ranges())
            deltas = {}
            for name, ids in some.items():
                mine = ids[owned[bucket_of(ids)]]
                found, values = self._feed.values(name, mine)
                deltas[name] = self._delta(name, found, values, np.setdiff1d(mine, found))
            for part in split_request(self._request(config, deltas)):
                self._send(one, part)
            left = {name: ids[len(some[name]) :] for name, ids in one.touched.items()}
            one.touched = {name: ids for name, ids in left.items() if len(ids)}

    def _some(self, touched: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return so many ids of each table that their rows fit in memory."""
        budget = READ_BYTES // len(touched)
        dims = {name: self._feed.table(name).dim for name in touched}
        return {name: ids[: max(1, budget // (8 + 4 * dims[name]))] for name, ids in touched.items()}

    def _delta(
        self, name: str, ids: np.ndarray, values: np.ndarray, erased: Sequence[int] | np.ndarray = ()
    ) -> DeltaEmbeddingHashTable:
        table = self._feed.table(name)
        return DeltaEmbeddingHashTable(
            unique_id=name,
            dim_size=table.dim,
            fids=ids.tolist(),
            embeddings=values.reshape(-1).tolist(),
            erased_fids=np.asarray(erased, dtype=np.int64).tolist(),
            scales=table.state().hashnet_scales,
        )

    def _request(self, config: ClientConfig, deltas: Mapping[str, DeltaEmbeddingHashTable]) -> PushRequest:
        request = PushRequest(
            model_name=config.model_name, signature_name=config.signature_name, timeout_in_ms=config.timeout_in_ms
        )
        if config.signature_name.endswith(f"/{RAW_ASSIGN}"):
            request.delta_multi_hash_tables.extend(self._in_order(deltas))
        else:
            request.delta_hash_tables.extend(deltas.values())
        return request

    def _in_order(self, deltas: Mapping[str, DeltaEmbeddingHashTable]) -> Iterator[DeltaEmbeddingHashTable]:
        for name, table in self._feed.tables().items():
            yield deltas.get(name) or DeltaEmbeddingHashTable(unique_id=name, dim_size=table.dim)

    def _send(self, one: _Target, request: PushRequest) -> None:
        with self._counting:
            self._sequence += 1
            header = PushHeader(sender=self._sender, sequence=self._sequence)
        data = np.frombuffer(request.SerializeToString(), np.uint8)
        timeout = request.timeout_in_ms / 1000
        frame = one.link.call(SyncCall.PUSH, header.model_dump_json(), [data], timeout=timeout)
        response = PushResponse.FromString(frame.arrays[0].tobytes())
        if response.error_message and response.error_message != one.remark:
            one.remark = response.error_message
            _log.warning("%s: %s", one.address, response.error_message)
        one.pushed += response.update_num
