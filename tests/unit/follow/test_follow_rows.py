"""Danger: a change that never reaches a follower is served wrong for ever, and a removed row comes back from the dead."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from followed_tables import Copies, FeedProcess, following, rows_of, table, train, until, writer_at
from monolith.errors import InvalidArgumentError
from monolith.follow import Feed, Follower
from monolith.table import EmbeddingTable, OneBit, Segment, TableConfig


def test_rows_from_before_and_after_arrive() -> None:
    one, copies = table(), Copies()
    train(one, range(1000))
    process = FeedProcess({"item": one})
    try:
        with following(copies, writer_at(process.address)) as follower:
            assert copies.rows() == rows_of(one)
            train(one, range(500, 1500), seed=1)
            one.erase(list(range(100)))
            newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
            assert copies.rows() == rows_of(one)
            assert follower.progress["run"].resyncs == 1
            one.clear()
            train(one, [7])
            newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
            assert copies.rows() == rows_of(one)
    finally:
        process.close()


def test_a_follower_that_fell_behind_reads_all_rows_again() -> None:
    one, copies = table(), Copies()
    process = FeedProcess({"item": one}, kept_bytes=1)
    try:
        with following(copies, writer_at(process.address)):
            pass
        train(one, range(100))
        one.erase([3])
        process.publish()
        train(one, range(50, 200), seed=1)
        process.publish()
        with following(copies, writer_at(process.address)) as follower:
            assert copies.rows() == rows_of(one)
            assert follower.progress["run"].resyncs == 1
    finally:
        process.close()


def test_rows_of_a_restore_replace_those_that_were_followed() -> None:
    one, copies = table(), Copies()
    train(one, range(100))
    process = FeedProcess({"item": one})
    try:
        with following(copies, writer_at(process.address)) as follower:
            other = table()
            train(other, range(50, 80), seed=5)
            one.take_over(other)
            process.publish()
            until(lambda: follower.progress["run"].resyncs == 2)
            assert copies.rows() == rows_of(one)
            train(one, [60, 2000], seed=6)
            newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
            assert copies.rows() == rows_of(one)
    finally:
        process.close()


def test_two_followers_see_the_same_while_writers_write() -> None:
    one, first, second = table(), Copies(), Copies()
    process = FeedProcess({"item": one})
    done = threading.Event()

    def write() -> None:
        random = np.random.default_rng(0)
        while not done.is_set():
            ids = random.integers(0, 2000, 300)
            train(one, np.unique(ids).tolist(), seed=int(random.integers(1 << 30)))
            one.erase(random.integers(0, 2000, 20))

    writer = threading.Thread(target=write)
    try:
        with following(first, writer_at(process.address)) as a:
            writer.start()
            with following(second, writer_at(process.address)) as b:
                for _ in range(30):
                    process.publish()
                done.set()
                writer.join()
                newest = process.publish()
                until(lambda: a.progress["run"].sequence == newest == b.progress["run"].sequence)
                assert first.rows() == rows_of(one) == second.rows()
    finally:
        done.set()
        process.close()


def test_tables_that_are_made_later_and_one_bit_scales_are_followed() -> None:
    segment = Segment(dim=8, compressor=OneBit(step_size=1))
    config = TableConfig(name="bits", segments=(segment,))
    bits = EmbeddingTable(config)
    copies = Copies("item")
    copies.kept["bits"] = [EmbeddingTable(config.model_copy(update={"mode": "serving", "unseen": "zeros"}))]
    process = FeedProcess({"item": table()})
    try:
        with following(copies, writer_at(process.address)) as follower:
            process.tables["bits"] = bits
            process.feed.add_tables(process.tables)
            bits.apply_gradients([1, 2], np.ones((2, 8), np.float32), step=400)
            newest = process.publish()
            until(lambda: follower.progress["run"].sequence == newest)
            assert follower.progress["run"].resyncs == 1
            copy = copies.kept["bits"][0]
            assert copy.state().hashnet_scales == bits.state().hashnet_scales
            # A serving table keeps one bit of each value.
            assert copy.lookup([1, 2]).sign().tolist() == bits.lookup([1, 2]).sign().tolist()
    finally:
        process.close()


def test_a_segment_that_cannot_be_published_makes_followers_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, copies = table(), Copies()
    process = FeedProcess({"item": one})
    try:
        with following(copies, writer_at(process.address)) as follower:
            train(one, range(10))
            monkeypatch.setattr("monolith.follow.feed.ranges_of", lambda mask: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                process.publish()
            monkeypatch.undo()
            until(lambda: follower.progress["run"].resyncs == 2)
            assert copies.rows() == rows_of(one)
    finally:
        process.close()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="every"):
        Feed(dict, every=0)
    with pytest.raises(InvalidArgumentError, match="has not been started"):
        Feed(dict).drain()
    with pytest.raises(InvalidArgumentError, match="writers"):
        Follower([], Copies())
