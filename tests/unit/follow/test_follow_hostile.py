"""Danger: a broken or hostile writer makes a replica crash, take all memory or serve rows of others; a broken or hostile follower
makes a run or a server allocate without bound, or end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import monolith.follow.feed as feed_module
from followed_tables import DIM, Copies, FeedProcess, following, rows_of, table, train, until, writer_at
from monolith.errors import AuthenticationError, ConfigError, InvalidArgumentError, MonolithError, ProtocolError
from monolith.follow import Follower
from monolith.follow.calls import Follow, FollowCall, FollowCalls, ReadBuckets
from monolith.follow.feed import Feed
from monolith.table.buckets import NUM_BUCKETS, bucket_of
from monolith.transport.calls import Answer, BasicCall, FrameCalls
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig

IDS, VALUES, NONE = np.arange(3), np.ones((3, DIM), np.float32), np.empty(0, np.int64)
HUGE = 2**63 - 1


def followed(**changes: object) -> str:
    answer = {
        "state": "segments", "stream": 5, "newest": 1, "age": 0.0, "durable": 0, "dense_version": 0, "step": 1, "event_time": 0,
        "ranges": [[0, NUM_BUCKETS]], "rows": {"item": 3},
    }  # fmt: skip
    return json.dumps(answer | changes)


def segment(**changes: object) -> dict[str, object]:
    return {"sequence": 1, "step": 1, "event_time": 0, "age": 0.0, "tables": [{"name": "item"}]} | changes


class _Liar(FrameCalls):
    """A writer that has three rows, and then says something wrong."""

    def __init__(self, lie: Answer, call: FollowCall) -> None:
        super().__init__(max_frame_bytes=2**24)
        self.lies = 0
        self._lie, self._lying = lie, call
        self._handlers |= {
            BasicCall.HEALTH: lambda frame: Answer(),
            FollowCall.FOLLOW: self._follow,
            FollowCall.READ_BUCKETS: self._read,
            FollowCall.READ_WEIGHTS: lambda frame: self._say(
                FollowCall.READ_WEIGHTS, Answer(text='{"version": 0, "names": []}')
            ),
        }

    def _say(self, call: FollowCall, truth: Answer) -> Answer:
        if call != self._lying:
            return truth
        self.lies += 1
        return self._lie

    def _follow(self, frame: Frame) -> Answer:
        asked = Follow.from_json(frame.text)
        if asked.stream == 0 and self._lying == FollowCall.FOLLOW and not self.lies:
            return Answer(text=followed(state="resync", newest=0))
        truth = Answer(text=followed(state="resync" if asked.stream == 0 else "segments", newest=0))
        return self._say(FollowCall.FOLLOW, truth) if asked.stream else truth

    def _read(self, frame: Frame) -> Answer:
        asked = ReadBuckets.from_json(frame.text)
        mine = (bucket_of(IDS) >= asked.first) & (bucket_of(IDS) < asked.end)
        truth = Answer(text=json.dumps({"end": asked.end}), arrays=(IDS[mine], VALUES[mine]))
        return self._say(FollowCall.READ_BUCKETS, truth)


@contextmanager
def lying(lie: Answer, call: FollowCall) -> Iterator[tuple[Follower, Copies, _Liar]]:
    calls, copies = _Liar(lie, call), Copies()
    with FrameServer(ListenConfig(), calls) as server:
        follower = Follower([writer_at(server.address)], copies, wait=0.1)
        try:
            until(lambda: calls.lies > 0 and follower.progress["run"].error != "", "an error")
            yield follower, copies, calls
        finally:
            follower.close()


def changes(*arrays: np.ndarray, **fields: object) -> Answer:
    return Answer(text=followed(segments=[segment(**fields)]), arrays=arrays)


@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        (Answer(text="{}"), "state"),
        (Answer(text="[" * 5000), "Followed"),
        (Answer(text=followed(newest=2**63)), "newest"),
        (Answer(text=followed(age=float("nan"))), "age"),
        (Answer(text=followed(age=-1.0)), "age"),
        (Answer(text=followed(ranges=[[0, NUM_BUCKETS + 1]])), "ranges"),
        (Answer(text=followed(ranges=[[0, 1]] * (NUM_BUCKETS + 1))), "ranges"),
        (Answer(text=followed(moved_to=["h:1"] * 1025)), "moved_to"),
        (changes(IDS, VALUES), "expected 3 arrays, got 2"),
        (changes(IDS, VALUES, NONE, NONE), "expected 3 arrays, got 4"),
        (changes(IDS.astype(np.float32), VALUES, NONE), "expected int64"),
        (changes(IDS.reshape(3, 1), VALUES, NONE), "expected int64"),
        (changes(IDS, VALUES.astype(np.float64), NONE), "expected float32"),
        (changes(IDS, VALUES[:2], NONE), r"expected float32 \[3, dim\]"),
        (changes(IDS, np.ones((3, DIM + 1), np.float32), NONE), "rows of 5 values, the model has 4"),
        (changes(IDS, VALUES, VALUES), "expected int64"),
        (changes(IDS, VALUES, NONE, sequence=2), "expected a number"),
        (changes(IDS, VALUES, NONE, sequence=0), "expected a number"),
        (changes(IDS, VALUES, NONE, tables=[{"name": "item", "event_time": 2**32}]), "event_time"),
        (changes(IDS, VALUES, NONE, tables=[{"name": "item", "scales": [-1.0]}]), "scales"),
        (changes(IDS, VALUES, NONE, tables=[{"name": "../item"}]), "name"),
    ],
)
def test_a_wrong_answer_is_a_typed_error_and_the_replica_keeps_its_rows(lie: Answer, complaint: str) -> None:
    with lying(lie, FollowCall.FOLLOW) as (follower, copies, _):
        assert re.search(complaint, follower.progress["run"].error), follower.progress["run"].error
        assert set(copies.rows()) <= set(IDS.tolist())
        assert not follower.progress["run"].connected


@pytest.mark.parametrize(
    "lie",
    [
        Answer(text="{}", arrays=(IDS, VALUES)),
        Answer(text='{"end": 0}', arrays=(NONE, VALUES[:0])),
        Answer(text=json.dumps({"end": NUM_BUCKETS}), arrays=(IDS,)),
        Answer(text=json.dumps({"end": NUM_BUCKETS}), arrays=(IDS, VALUES[:, :2])),
    ],
    ids=["no end", "no progress", "no values", "dim"],
)
def test_a_wrong_answer_to_a_read_is_an_error(lie: Answer) -> None:
    with lying(lie, FollowCall.READ_BUCKETS) as (follower, copies, _):
        assert copies.rows() == {}
        assert not follower.progress["run"].connected


def test_ids_of_other_buckets_are_refused_in_a_read() -> None:
    copies = Copies()
    calls = _Liar(Answer(), FollowCall.CONFIRM)
    calls._handlers[FollowCall.READ_BUCKETS] = lambda frame: Answer(
        text=json.dumps({"end": ReadBuckets.from_json(frame.text).end}), arrays=(IDS, VALUES)
    )
    with FrameServer(ListenConfig(), calls) as server:
        follower = Follower([writer_at(server.address)], copies, wait=0.1, buckets=range(5))
        try:
            until(lambda: "buckets from" in follower.progress["run"].error)
            assert copies.rows() == {}
        finally:
            follower.close()


def test_values_that_are_not_numbers_are_copied_and_end_nothing() -> None:
    one, copies = table(), Copies()
    process = FeedProcess({"item": one})
    try:
        with following(copies, writer_at(process.address)) as follower:
            one.assign([1, 2], np.array([[np.nan] * DIM, [np.inf] * DIM], np.float32))
            newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
            assert np.array_equal(
                copies.kept["item"][0].lookup([1, 2]).numpy(), one.lookup([1, 2]).numpy(), equal_nan=True
            )
    finally:
        process.close()


def asked(address: str, call: FollowCall, message: dict[str, object], *arrays: np.ndarray) -> Frame:
    link = Link(address, timeout=5.0, max_streams=1)
    try:
        return link.call(call, json.dumps(message), arrays)
    finally:
        link.close()


@pytest.mark.parametrize(
    ("call", "message", "arrays"),
    [
        (FollowCall.FOLLOW, {"since": -1}, []),
        (FollowCall.FOLLOW, {"since": 2**63}, []),
        (FollowCall.FOLLOW, {"max_bytes": HUGE}, []),
        (FollowCall.FOLLOW, {"wait": 1e9}, []),
        (FollowCall.FOLLOW, {"wait": "for ever"}, []),
        (FollowCall.READ_BUCKETS, {"table": "item", "first": 7, "end": 7}, []),
        (FollowCall.READ_BUCKETS, {"table": "item", "first": 9, "end": 7}, []),
        (FollowCall.READ_BUCKETS, {"table": "item", "first": 0, "end": HUGE}, []),
        (FollowCall.READ_BUCKETS, {"table": "other", "first": 0, "end": 1}, []),
        (FollowCall.READ_BUCKETS, {"table": "../item", "first": 0, "end": 1}, []),
        (FollowCall.READ_IDS, {"table": "item"}, []),
        (FollowCall.READ_IDS, {"table": "item"}, [VALUES]),
        (FollowCall.READ_IDS, {"table": "item"}, [IDS.reshape(3, 1)]),
        (FollowCall.READ_IDS, {"table": "item"}, [np.zeros(2**20, np.int64)]),
        (FollowCall.CONFIRM, {"wait": float("inf")}, []),
    ],
)
def test_a_wrong_request_is_a_typed_error_and_the_writer_goes_on(
    call: FollowCall, message: dict[str, object], arrays: list[np.ndarray]
) -> None:
    one, copies = table(), Copies()
    train(one, range(10))
    process = FeedProcess({"item": one})
    try:
        with pytest.raises((ConfigError, InvalidArgumentError, ProtocolError)):
            asked(process.address, call, message, *arrays)
        with following(copies, writer_at(process.address)):
            assert copies.rows() == rows_of(one)
    finally:
        process.close()


def test_a_follower_that_asks_for_everything_gets_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "ANSWER_BYTES", 4096)
    one, copies = table(), Copies()
    train(one, range(2000))
    process = FeedProcess({"item": one})
    try:
        frame = asked(process.address, FollowCall.READ_BUCKETS, {"table": "item", "first": 0, "end": NUM_BUCKETS})
        end = json.loads(frame.text)["end"]
        assert 0 < end < NUM_BUCKETS
        assert frame.arrays[1].nbytes < 3 * 4096
        with following(copies, writer_at(process.address)):
            assert copies.rows() == rows_of(one)
    finally:
        process.close()


def test_an_interval_with_many_changes_becomes_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SEGMENT_BYTES", 1)
    tables = {name: table(name) for name in ("item", "user", "query")}
    copies = Copies(*tables)
    process = FeedProcess(tables)
    try:
        with following(copies, *[writer_at(process.address)]) as follower:
            for one in tables.values():
                train(one, range(100))
            assert process.publish() == 3
            until(lambda: follower.progress["run"].sequence == 3)
            assert {name: copies.rows(name) for name in tables} == {name: rows_of(one) for name, one in tables.items()}
    finally:
        process.close()


def test_a_flood_of_followers_neither_ends_the_writer_nor_fills_its_memory() -> None:
    one, copies = table(), Copies()
    train(one, range(10))
    process = FeedProcess({"item": one})
    links = [Link(process.address, timeout=5.0, max_streams=1) for _ in range(300)]
    try:
        for number, link in enumerate(links):
            message = {"follower": number + 1, "stream": process.feed.stream, "wait": 0}
            with suppress(MonolithError):  # they are more streams than a server has
                link.call(FollowCall.FOLLOW, json.dumps(message), timeout=0.5)
        for number in range(3000):
            process.feed.note(number + 1, since=0, dense_version=0)
        assert len(process.feed._followers) <= 1100
        for link in links:
            link.close()
        with following(copies, writer_at(process.address)):
            assert copies.rows() == rows_of(one)
    finally:
        for link in links:
            link.close()
        process.close()


def test_nobody_reads_a_feed_without_its_token() -> None:
    class Calls(FrameCalls):
        def __init__(self, feed: Feed) -> None:
            super().__init__(max_frame_bytes=2**20)
            self._handlers |= FollowCalls(feed).calls()

    feed = Feed(lambda: {"item": table()}, every=3600)
    try:
        with FrameServer(ListenConfig(token="sixteen letters!".replace(" ", "-")), Calls(feed)) as server:
            for token in (None, "another-token-16"):
                link = Link(server.address, timeout=5.0, token=token)
                with pytest.raises(AuthenticationError):
                    link.call(FollowCall.FOLLOW, "{}")
                link.close()
            assert not feed.is_active
    finally:
        feed.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_a_feed_that_other_machines_reach_needs_a_token(host: str) -> None:
    with pytest.raises(
        ConfigError, match=r"needs tls_cert, tls_key and a token .--tls-cert, --tls-key and --token-file"
    ):
        FrameServer(ListenConfig(host=host), FrameCalls(max_frame_bytes=4096))
