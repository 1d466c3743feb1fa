"""Danger: a follower that takes back what a writer has lost misses what the writer has kept and the follower has never seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import monolith.follow.followed_writer as module
from followed_tables import (
    DIM,
    Buckets,
    Copies,
    FeedProcess,
    KnownLog,
    Rows,
    following,
    rows_of,
    table,
    train,
    until,
    writer_at,
)
from monolith.errors import UnavailableError
from monolith.follow import Writer
from monolith.follow.calls import Follow, FollowCall
from monolith.follow.feed import LogPosition
from monolith.follow.follower import WriterProgress
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.table import Bags, Gradient
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.frames import Frame
from monolith.transport.link import Link

LOGGED = LogPosition(sequence=5, checksum=77)
LATER = LogPosition(sequence=6, checksum=78)
HALF = NUM_BUCKETS // 2


class Wire(Link):
    """A connection on which tests see each request before it is sent, and may change or fail it."""

    before: Callable[[FollowCall, str], str]

    def call(  # type: ignore[override]
        self, call: FollowCall, text: str = "", arrays: Sequence[np.ndarray] = (), *, timeout: float
    ) -> Frame:
        return super().call(call, self.before(call, text), arrays, timeout=timeout)


def wired(address: str, before: Callable[[FollowCall, str], str]) -> Writer:
    def connect() -> Link:
        link = Wire(address, timeout=5.0, max_streams=1)
        link.before = before
        return link

    return Writer(name="run", connect=connect)


def known_durable(process: FeedProcess, progress: WriterProgress, *tables: object) -> None:
    """Train until the follower knows that all it has is durable."""
    for seed in range(2):
        for one in tables:
            train(one, range(50), seed=seed)  # type: ignore[arg-type]
        newest = process.publish()
        until(lambda newest=newest: progress.sequence == newest)  # type: ignore[misc]
    process.feed.cut()(LOGGED)
    until(lambda: progress.durable == 2)


def restarted(process: FeedProcess, *, log: KnownLog, **tables: object) -> FeedProcess:
    """Kill the process and start another one on its port."""
    port, owner = process.server.port, process.feed._owner
    process.close()
    return FeedProcess(tables, port=port, complete=True, log=log, owner=owner)  # type: ignore[arg-type]


def push(store: ServerStore, ids: np.ndarray, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(len(ids), DIM)).astype(np.float32)
    bags = Bags(table="item", ids=ids, offsets=np.arange(len(ids) + 1))
    store.apply([Gradient(bags=bags, values=torch.from_numpy(values))], step=seed)


def rows_on(store: ServerStore) -> Rows:
    found: Rows = {}
    for ids, values in store.iter_rows("item"):
        found |= dict(zip(ids.tolist(), map(tuple, values.tolist()), strict=True))
    return found


def test_durable_changes_that_were_never_received_arrive_after_a_restart(tmp_path: Path) -> None:
    copies = Copies()
    one = ParameterServer(ServerConfig(folder=tmp_path / "ps", feed_secs=3600))
    port = one.port
    stopped, waiting = threading.Event(), threading.Event()

    def before(call: FollowCall, text: str) -> str:
        if stopped.is_set():
            waiting.set()
            until(lambda: not stopped.is_set())
        return text

    try:
        with ServerStore([one.address]) as store:
            store.declare([table().config])
            with following(copies, wired(one.address, before)) as follower:
                progress = follower.progress["run"]
                seed = 0
                while progress.durable < 3:
                    push(store, np.arange(1000), seed := seed + 1)
                    newest = one.feed.drain()
                    until(lambda newest=newest: progress.sequence == newest)  # type: ignore[misc]
                stopped.set()
                assert waiting.wait(60)
                push(store, np.arange(900, 1500), 50)  # acknowledged, so it is durable, and not received
                one.close()
                one = ParameterServer(ServerConfig(folder=tmp_path / "ps", feed_secs=3600, port=port))
                stopped.clear()
                until(lambda: progress.resyncs + progress.rewinds == 2)
                assert copies.rows() == rows_on(store)
                assert progress.rewinds == 1
    finally:
        one.close()


def test_durable_segments_that_were_not_received_are_not_skipped() -> None:
    one, kept, copies = table(), table(), Copies()
    process = FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED))
    gated, waiting, permits = threading.Event(), threading.Event(), threading.Semaphore(0)

    def before(call: FollowCall, text: str) -> str:
        if call != FollowCall.FOLLOW:
            return text
        if gated.is_set():
            waiting.set()
            assert permits.acquire(timeout=60)
        # One segment with each answer.
        return Follow.from_json(text).model_copy(update={"max_bytes": 1}).model_dump_json()

    try:
        with following(copies, wired(process.address, before)) as follower:
            progress = follower.progress["run"]
            known_durable(process, progress, one, kept)
            gated.set()
            assert waiting.wait(60)
            for first in (100, 200, 300):
                for each in (one, kept):
                    train(each, range(first, first + 50))
                process.publish()
            process.feed.cut()(LATER)
            waiting.clear()
            permits.release()
            assert waiting.wait(60)
            assert progress.sequence == 3  # and the writer has said that segment 5 is durable
            log = KnownLog(LOGGED, LATER, changed={"item": np.arange(100, 350)})
            process = restarted(process, log=log, item=kept)
            gated.clear()
            permits.release()
            until(lambda: progress.resyncs + progress.rewinds == 2)
            assert copies.rows() == rows_of(kept)
    finally:
        process.close()


def test_buckets_that_were_gained_right_before_a_crash_are_read() -> None:
    first, second, copies = table(), table(), Copies()
    owned = [Buckets(0, HALF), Buckets(HALF, NUM_BUCKETS)]
    processes = [
        FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED), owner=owner)
        for one, owner in zip((first, second), owned, strict=True)
    ]
    try:
        names = ("ps 0", "ps 1")
        with following(
            copies, *(writer_at(process.address, name) for process, name in zip(processes, names, strict=True))
        ) as follower:
            progress = follower.progress["ps 1"]
            known_durable(processes[1], progress, second)
            train(first, range(100, 200))
            second.insert_rows(*[getattr(first.rows_of_buckets(range(HALF)), key) for key in ("ids", "times", "rows")])
            owned[0].owned[:] = False
            owned[1].owned[:] = True
            train(second, range(120, 140), seed=5)
            # It has not published that it owns them. Its successor has restored all of it.
            processes[1] = restarted(
                processes[1], log=KnownLog(LOGGED, changed={"item": np.arange(100, 200)}), item=second
            )
            until(lambda: progress.resyncs + progress.rewinds == 2)
            until(lambda: follower.progress["ps 1"].connected)
            assert copies.rows() == rows_of(second)
    finally:
        for process in processes:
            process.close()


def test_rows_that_were_half_read_before_a_second_crash_are_read_again() -> None:
    one, second, third = table(), table(), table()
    copies = Copies()
    process = FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED))
    reads = iter([])  # type: ignore[var-annotated]
    gone = threading.Event()

    def before(call: FollowCall, text: str) -> str:
        if call == FollowCall.FOLLOW and gone.is_set():
            until(lambda: not gone.is_set())
        if call == FollowCall.READ_BUCKETS and next(reads, False):
            gone.set()
            raise UnavailableError("killed")
        return text

    try:
        with following(copies, wired(process.address, before)) as follower:
            progress = follower.progress["run"]
            known_durable(process, progress, one, second, third)
            train(second, range(50), seed=9)  # changes of the second process, which it loses
            size, module._READ_BYTES = module._READ_BYTES, 1  # bucket by bucket
            try:
                port = process.server.port
                process.close()
                # It has lost its log, so it cannot say what has changed: all its rows are read.
                reads = iter([False] * 500 + [True])
                process = FeedProcess({"item": second}, port=port, complete=True, log=KnownLog())
                assert gone.wait(60)
                process = restarted(process, log=KnownLog(LOGGED), item=third)
                gone.clear()
                until(lambda: progress.resyncs + progress.rewinds == 2)
            finally:
                module._READ_BYTES = size
            assert copies.rows() == rows_of(third)
    finally:
        process.close()
