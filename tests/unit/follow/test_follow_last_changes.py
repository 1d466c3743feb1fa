"""Danger: a run ends, or says that everything was received, while a follower reads its first rows and has only some of them."""

from __future__ import annotations

import threading

from followed_tables import Copies, FeedProcess, rows_of, table, train, until, writer_at
from monolith.follow import Follower
from monolith.follow.follower import FollowTarget
from monolith.table import EmbeddingTable


class Gated(Copies):
    """Copies that change only once the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = threading.Event(), threading.Event()

    def tables(self) -> dict[str, list[EmbeddingTable]]:
        self.asked.set()
        assert self.gate.wait(240)
        return self.kept


def test_the_end_of_a_run_waits_for_a_follower_that_reads_all_rows() -> None:
    one, copies = table(), Gated()
    target: FollowTarget = copies
    train(one, range(50))
    process = FeedProcess({"item": one})
    follower = Follower([writer_at(process.address)], target, wait=0.05)
    try:
        assert copies.asked.wait(240)
        train(one, range(30, 80), seed=1)
        assert not process.feed.flush(timeout=0.0)
        assert process.feed.confirm(timeout=0.0) == (1, 0)
        copies.gate.set()
        until(lambda: process.feed.flush(timeout=0.5), "the rows to be received")
        assert copies.rows() == rows_of(one)
        assert process.feed.confirm(timeout=240.0) == (1, 1)
    finally:
        copies.gate.set()
        follower.close()
        process.close()
