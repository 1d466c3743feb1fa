"""Danger: a writer that crashes has perhaps published changes which its log has lost. A follower must not keep them."""

from __future__ import annotations

from followed_tables import Copies, FeedProcess, KnownLog, following, rows_of, table, train, until, writer_at
from monolith.follow.feed import LogPosition

LOGGED = LogPosition(sequence=5, checksum=77)
LATER = LogPosition(sequence=6, checksum=78)


def restarted(process: FeedProcess, **tables: object) -> FeedProcess:
    """Kill the process and start another one on its port."""
    port = process.server.port
    process.close()
    return FeedProcess(tables, port=port, complete=True, log=KnownLog(LOGGED))  # type: ignore[arg-type]


def committed(process: FeedProcess, position: LogPosition) -> None:
    process.feed.cut()(position)


def test_changes_that_were_lost_are_taken_back() -> None:
    one, kept, copies = table(), table(), Copies()
    process = FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED))
    try:
        with following(copies, writer_at(process.address)) as follower:
            progress = follower.progress["run"]
            for each in (one, kept):
                train(each, range(100))
            until(lambda: progress.sequence == process.publish())
            for each in (one, kept):
                train(each, range(40, 60), seed=1)
            until(lambda: progress.sequence == process.publish())
            committed(process, LOGGED)
            # Published, but not in the log: changed, new and removed rows.
            train(one, [41, 42, 5000], seed=2)
            one.erase([43])
            until(lambda: progress.sequence == process.publish())
            assert copies.rows() == rows_of(one)
            process = restarted(process, item=kept)
            until(lambda: progress.rewinds == 1)
            until(lambda: copies.rows() == rows_of(kept))
            assert progress.resyncs == 1
            train(kept, [41, 9], seed=3)
            newest = process.publish()
            until(lambda: progress.sequence == newest)
            assert copies.rows() == rows_of(kept)
    finally:
        process.close()


def test_a_log_that_went_back_makes_followers_read_all_rows() -> None:
    one, older, copies = table(), table(), Copies()
    process = FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED))
    try:
        with following(copies, writer_at(process.address)) as follower:
            progress = follower.progress["run"]
            train(older, range(10))
            train(one, range(100))
            until(lambda: progress.sequence == process.publish())
            train(one, range(100), seed=1)
            until(lambda: progress.sequence == process.publish())
            committed(process, LATER)
            process = restarted(process, item=older)  # its log does not lead on from LATER
            until(lambda: progress.resyncs == 2)
            assert copies.rows() == rows_of(older)
            assert progress.rewinds == 0
    finally:
        process.close()


def test_without_a_durable_position_all_rows_are_read_again() -> None:
    one, copies = table(), Copies()
    process = FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED))
    try:
        with following(copies, writer_at(process.address)) as follower:
            progress = follower.progress["run"]
            train(one, range(100))
            newest = process.publish()
            until(lambda: progress.sequence == newest)
            empty = table()
            process = restarted(process, item=empty)
            until(lambda: progress.resyncs == 2)
            assert copies.rows() == {}
    finally:
        process.close()


def test_rows_that_were_read_as_a_whole_may_not_be_durable_either() -> None:
    one, kept, copies = table(), table(), Copies()
    for each in (one, kept):
        train(each, range(100))
    process = FeedProcess({"item": one}, complete=True, log=KnownLog(LOGGED))
    train(one, range(100), seed=9)  # neither published nor durable when the follower reads all rows
    try:
        with following(copies, writer_at(process.address)) as follower:
            progress = follower.progress["run"]
            process.feed.durable, process.feed.log_position = 0, LOGGED
            until(lambda: follower._threads[0]._asked.log_sequence == LOGGED.sequence)
            process = restarted(process, item=kept)
            until(lambda: progress.resyncs == 2)
            assert copies.rows() == rows_of(kept)
    finally:
        process.close()


def test_the_lag_grows_while_the_writer_is_away() -> None:
    one, copies = table(), Copies()
    process = FeedProcess({"item": one})
    try:
        with following(copies, writer_at(process.address)) as follower:
            progress = follower.progress["run"]
            until(lambda: progress.connected)
            process.close()
            until(lambda: not progress.connected)
            assert progress.error
            as_of = progress.as_of
            process = FeedProcess({"item": one}, port=process.server.port)
            until(lambda: progress.connected and progress.as_of != as_of)
    finally:
        process.close()
