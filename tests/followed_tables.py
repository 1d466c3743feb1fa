"""Writers with a feed that tests start, move and kill, and a follower's copies to compare with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from monolith.errors import UnavailableError
from monolith.follow import Feed, Follower, Writer
from monolith.follow.calls import FollowCall, FollowCalls
from monolith.follow.feed import LogPosition
from monolith.table import Adagrad, EmbeddingTable, Segment, TableConfig
from monolith.table.buckets import NUM_BUCKETS, mask_of
from monolith.transport.calls import Answer, BasicCall, FrameCalls
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig

DIM = 4
Rows = dict[int, tuple[float, ...]]


def table(name: str = "item", *, mode: str = "training") -> EmbeddingTable:
    segment = Segment(dim=DIM, optimizer=Adagrad(learning_rate=0.1))
    return EmbeddingTable(TableConfig(name=name, segments=(segment,), mode=mode, unseen="zeros"))


def rows_of(one: EmbeddingTable) -> Rows:
    entries = one.entries()
    return dict(zip(entries.ids.tolist(), map(tuple, entries.values.tolist()), strict=True))


def train(one: EmbeddingTable, ids: Sequence[int], seed: int = 0) -> None:
    gradients = np.random.default_rng(seed).normal(size=(len(ids), DIM)).astype(np.float32)
    one.apply_gradients(np.array(ids), gradients)


class Buckets:
    """Which buckets a writer owns."""

    def __init__(self, first: int = 0, end: int = NUM_BUCKETS) -> None:
        self.owned = mask_of([(first, end)])

    def mask(self) -> np.ndarray:
        return self.owned.copy()


class KnownLog:
    """A change log that continues the given segments. After the first of them it has changes of some ids."""

    def __init__(self, *positions: LogPosition, changed: Mapping[str, np.ndarray] | None = None) -> None:
        self.positions, self.changed = positions, changed or {}

    def changed_since(self, position: LogPosition) -> Mapping[str, np.ndarray] | None:
        if position not in self.positions:
            return None
        return self.changed if position == self.positions[0] else {}


class _Calls(FrameCalls):
    def __init__(self, feed: Feed, moved_to: Callable[[], tuple[str, ...]]) -> None:
        super().__init__(max_frame_bytes=2**28)
        self._handlers |= FollowCalls(feed, moved_to=moved_to).calls()
        self._handlers[BasicCall.HEALTH] = lambda frame: Answer()


class FeedProcess:
    """A server with a feed, as a process would be. It publishes when `publish` is called."""

    def __init__(
        self, tables: Mapping[str, EmbeddingTable], *, port: int = 0, complete: bool = False, **options: object
    ) -> None:
        self.tables = dict(tables)
        self.moved_to: tuple[str, ...] = ()
        self.feed = Feed(lambda: self.tables, every=3600.0, dense_every=3600.0, **options)  # type: ignore[arg-type]
        if complete:
            self.feed.start(complete=True)
        self.server = FrameServer(ListenConfig(port=port), _Calls(self.feed, lambda: self.moved_to))

    @property
    def address(self) -> str:
        return self.server.address

    def publish(self) -> int:
        return self.feed.drain()

    def close(self) -> None:
        self.server.ask_to_stop()
        self.feed.close()
        self.server.close(grace=5.0)


def writer_at(address: str, name: str = "run") -> Writer:
    return Writer(name=name, connect=lambda: Link(address, timeout=5.0, max_streams=1))


class Cable:
    """Connects a follower with its writers, until it is cut.

    Args:
        reads: How many calls that read rows of buckets are answered before it is cut. None: all.
    """

    def __init__(self, *, reads: int | None = None) -> None:
        self.cut, self._reads = threading.Event(), reads

    def through(self, writer: Writer) -> Writer:
        """Return the writer at the other end."""

        def connect() -> Link:
            self._require()
            link = writer.connect()
            call: Callable[..., Frame] = link.call

            def checked(kind: FollowCall, *values: object, **options: object) -> Frame:
                if kind == FollowCall.READ_BUCKETS and self._reads is not None:
                    self._reads -= 1
                    if self._reads < 0:
                        self.cut.set()
                self._require()
                answer = call(kind, *values, **options)
                self._require()
                return answer

            link.call = checked  # type: ignore[method-assign, assignment]
            return link

        return Writer(name=writer.name, connect=connect)

    def _require(self) -> None:
        if self.cut.is_set():
            raise UnavailableError("the cable is cut")


class Copies:
    """What a follower keeps."""

    def __init__(self, *names: str) -> None:
        self.kept = {name: [table(name, mode="serving")] for name in names or ("item",)}
        self.weights: list[Mapping[str, np.ndarray]] = []

    def tables(self) -> Mapping[str, Sequence[EmbeddingTable]]:
        return self.kept

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights.append(weights)

    def rows(self, name: str = "item") -> Rows:
        return rows_of(self.kept[name][0])


@contextmanager
def following(copies: Copies, *writers: Writer, **options: object) -> Iterator[Follower]:
    follower = Follower(writers, copies, wait=0.1, **options)  # type: ignore[arg-type]
    try:
        assert follower.wait_until_read(60)
        yield follower
    finally:
        follower.close()


def until(condition: Callable[[], bool], what: str = "the condition", *, limit: float = 240.0) -> None:
    """Wait for a condition that threads will make true. The limit only ends a test that has failed."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit:g} s for {what}"
        time.sleep(0.005)
