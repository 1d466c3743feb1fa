"""`ShardReplica`: the connection to one replica of a shard, single attempts to ask it, and its health."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from monolith.config import Config, Positive
from monolith.errors import MonolithError, UnavailableError
from monolith.ps.protocol.messages import Wire
from monolith.serve.shards.messages import ShardDescription
from monolith.transport.calls import BasicCall, CallNumber
from monolith.transport.errors import decode_error
from monolith.transport.frames import Frame, encode_parts
from monolith.transport.link import CallStream, StreamPool, Transport, connector_to, jittered
from monolith.transport.server import read_pem
from monolith.transport.tokens import Token, reveal

__all__ = ["Attempt", "ReplicaStatus", "ShardClientConfig", "ShardReplica"]

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds until a replica that failed is probed. Doubled with every failure, up to the longest."""
LAST_GRACE = 0.005
"""Seconds to read an answer whose time is over, which may have arrived while another replica was waited for."""


class ShardClientConfig(Config):
    """How a front end asks its shards.

    Example:
        >>> ShardClientConfig(timeout=0.2).partial
        'refuse'
    """

    config_group: ClassVar[str] = "serve"

    timeout: Positive = 1.0
    """Seconds that a lookup may take, with all attempts. The deadline of a request shortens it."""
    attempts: Annotated[int, Field(ge=1, le=16)] = 3
    """Replicas of a shard that a lookup asks at most, one after the other. Each gets an equal share of the time that is left."""
    partial: Literal["refuse", "initial"] = "refuse"
    """What to do when no replica of a shard answers. "refuse": the lookup raises `UnavailableError`. "initial": ids of that shard
    read as if they had never been seen, which is counted and reported in the metadata of the answer."""
    wire: Wire = "float32"
    """Precision of rows in messages. 16 bits halve the traffic, and round."""
    pool_on_shards: bool = True
    """Whether shards sum bags with at least two ids for each shard, which sends less. The sums of several shards are added in
    another order than one table would. False: rows are sent, and predictions equal those of one process bit for bit."""
    token: Token = None
    """The secret that the shards require."""
    tls_root_certs: Path | None = None
    """CA bundle (PEM) that signed the certificates of the shards. None: no TLS."""
    transport: Transport | None = None
    """How frames are sent: "socket", or "flight", which can encrypt. None: Flight with `tls_root_certs`, sockets without."""
    max_streams: Annotated[int, Field(ge=1)] = 32
    """Streams to each replica, and so the number of concurrent lookups on it from this process."""
    start_secs: Annotated[float, Field(ge=0)] = 30.0
    """Seconds to wait for shards at the start."""
    refresh_secs: Positive = 5.0
    """Seconds between two queries of a service discovery for new and removed replicas."""


class Attempt:
    """One request to one replica, which is not repeated here."""

    def __init__(
        self, replica: ShardReplica, call: CallNumber, frame: list[np.ndarray], request: int, *, limit: float
    ) -> None:
        self.replica, self.call = replica, call
        self.began = time.monotonic()
        self._frame, self._request = frame, request
        self._deadline = self.began + limit
        self.refused = False
        """Whether the error that `finish` raised came from the replica, not from the network."""
        self._stream: CallStream | None = None
        self._failure: MonolithError | None = None

    def send(self) -> None:
        """Send the request. `finish` raises what failed."""
        try:
            self._stream = self.replica.pool.take(deadline=self._deadline)
            self._stream.send(*self._frame, deadline=self._deadline)
        except MonolithError as error:
            self._drop()
            self._failure = error

    def finish(self) -> Frame:
        """Return the answer. Raises the error of the network or of the replica."""
        if self._failure is not None:
            raise self._failure
        assert self._stream is not None
        try:
            frame = self._stream.receive(self._request, deadline=max(self._deadline, time.monotonic() + LAST_GRACE))
        except BaseException:
            self._drop()
            raise
        error = decode_error(frame.text, self.replica.address) if frame.call == BasicCall.ERROR else None
        if isinstance(error, UnavailableError):  # the server may close the stream after this answer
            self._drop()
        else:
            stream, self._stream = self._stream, None
            self.replica.pool.give_back(stream)
        if error is not None:
            self.refused = True
            raise error
        return frame

    def abandon(self) -> None:
        """Give up without waiting for the answer."""
        self._drop()

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self.replica.pool.discard(stream)


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """The health of a replica, as one front end sees it."""

    address: str
    shard: int | None
    """Number of its shard. None if it has not answered yet, or does not belong to the group."""
    healthy: bool
    outstanding: int
    """Requests that wait for its answer."""
    failures: int
    """Failures since it last answered."""
    problem: str
    """What went wrong last. "" if nothing did."""


class ShardReplica:
    """One replica of a shard: its streams, and whether it answers. Thread-safe."""

    def __init__(self, address: str, config: ShardClientConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        certificates = None if config.tls_root_certs is None else read_pem(config.tls_root_certs, "tls_root_certs")
        connector = connector_to(
            address,
            transport=config.transport,
            timeout=config.timeout,
            token=reveal(config.token),
            tls_root_certs=certificates,
        )
        self.pool = StreamPool(address, connector, max_streams=config.max_streams)
        self.described: ShardDescription | None = None
        """What it holds. None until it has answered."""
        self.outstanding = 0
        """Requests that wait for its answer."""
        self.failures = 0
        """Failures since it last answered."""
        self.retry_at = 0.0
        """When it is probed again."""
        self.problem = ""
        """What went wrong last."""
        self.told: tuple[float, str] | None = None
        """When it last said how far its rows are behind training, and what. None if it does not follow a run."""
        self._failed_at = -1.0
        self._clock = clock
        self._requests = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def healthy(self) -> bool:
        """Whether it is known to hold rows of the export, and has not failed since it last answered."""
        return self.described is not None and not self.failures

    @property
    def load(self) -> tuple[int, int]:
        """What the replica with less of it is preferred by: failures, then requests in flight."""
        return (self.failures, self.outstanding)

    def begin(self, call: CallNumber, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, limit: float) -> Attempt:
        """Return a request to be sent, which may take `limit` seconds. `ended` must be called when it has finished."""
        request = next(self._requests)
        with self._lock:
            self.outstanding += 1
        frame = encode_parts(call=call, request=request, text=text, arrays=arrays)
        return Attempt(self, call, frame, request, limit=limit)

    def ask(self, call: CallNumber, text: str = "{}", *, limit: float) -> Frame:
        """Send one request and return its answer, without a change of its health."""
        attempt = self.begin(call, text, limit=limit)
        try:
            attempt.send()
            return attempt.finish()
        finally:
            self.ended()

    def ended(self) -> None:
        """Count a request less in flight."""
        with self._lock:
            self.outstanding -= 1

    def answered(self, began: float) -> None:
        """Note that a request that began then was answered."""
        if self.failures:
            with self._lock:
                # An answer to an older request says nothing about a failure after it.
                if began >= self._failed_at:
                    self.failures, self.problem = 0, ""

    def failed(self, error: BaseException, began: float) -> None:
        """Note that a request that began then has failed. Requests that were in flight together count as one failure."""
        with self._lock:
            self.problem = f"{type(error).__name__}: {error}"
            if began < self._failed_at:
                return
            self.failures += 1
            self._failed_at = self._clock()
            pause = min(FIRST_PAUSE * 2 ** min(self.failures - 1, 16), LONGEST_PAUSE)
            self.retry_at = self._failed_at + jittered(pause)

    def recovered(self, described: ShardDescription) -> None:
        """Note that it answered a probe."""
        with self._lock:
            self.described, self.failures, self.problem = described, 0, ""

    def status(self, shard: int | None) -> ReplicaStatus:
        """Return its health."""
        return ReplicaStatus(
            address=self.address,
            shard=shard,
            healthy=self.healthy,
            outstanding=self.outstanding,
            failures=self.failures,
            problem=self.problem,
        )

    def why(self) -> str:
        """Say in a message what is wrong with it."""
        return f"{self.address}: {self.problem or 'has not answered yet'}"

    def close(self) -> None:
        """Close the connection."""
        self.pool.close()
