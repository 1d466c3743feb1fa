"""Danger: buckets move between servers, the removal of their rows at the source reaches a follower after their arrival at the
destination, and live rows are lost. Segments of two servers may come in any order."""

from __future__ import annotations

import numpy as np

from followed_tables import Buckets, Copies, FeedProcess, Rows, following, rows_of, table, train, until, writer_at
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS, bucket_of

HALF = NUM_BUCKETS // 2
IDS = np.arange(3000)


class Group:
    """Two servers that share the buckets of one table."""

    def __init__(self) -> None:
        self.tables = [table(), table()]
        self.owned = [Buckets(0, HALF), Buckets(HALF, NUM_BUCKETS)]
        self.processes = [
            FeedProcess({"item": one}, owner=owner) for one, owner in zip(self.tables, self.owned, strict=True)
        ]

    def train(self, seed: int) -> None:
        """Train some ids at their owners, and let some expire."""
        random = np.random.default_rng(seed)
        some, gone = random.choice(IDS, 500, replace=False), random.choice(IDS, 50, replace=False)
        for one, owner in zip(self.tables, self.owned, strict=True):
            train(one, some[owner.owned[bucket_of(some)]].tolist(), seed=seed)
            one.erase(gone[owner.owned[bucket_of(gone)]])

    def give(self, source: int, first: int, end: int) -> None:
        """Give up ownership, as a move begins."""
        self.owned[source].owned[first:end] = False

    def install(self, source: int, first: int, end: int) -> None:
        """Copy the rows to the other server, which owns them from then on."""
        taken = self.tables[source].rows_of_buckets(range(first, end))
        self.tables[1 - source].insert_rows(taken.ids, taken.times, taken.rows)
        self.owned[1 - source].owned[first:end] = True

    def delete(self, source: int, first: int, end: int) -> None:
        self.tables[source].erase(self.tables[source].rows_of_buckets(range(first, end)).ids)

    def rows(self) -> Rows:
        found: Rows = {}
        for one, owner in zip(self.tables, self.owned, strict=True):
            found |= {id_: row for id_, row in rows_of(one).items() if owner.owned[bucket_of([id_])[0]]}
        return found

    def writers(self) -> list[object]:
        return [writer_at(process.address, f"ps {n}") for n, process in enumerate(self.processes)]

    def close(self) -> None:
        for process in self.processes:
            process.close()


def settled(group: Group, copies: Copies) -> None:
    """Publish until the follower has everything."""
    until(lambda: (*(process.publish() for process in group.processes), copies.rows() == group.rows())[-1], "rows")


def test_moves_in_every_order_of_arrival() -> None:
    for order in ([0, 1], [1, 0], [1], [0]):
        group, copies = Group(), Copies()
        try:
            group.train(0)
            with following(copies, *group.writers()):  # type: ignore[arg-type]
                settled(group, copies)
                group.train(1)
                group.give(0, 100, 900)
                group.install(0, 100, 900)
                for server in order:
                    group.processes[server].publish()
                group.train(2)
                group.delete(0, 100, 900)
                for server in order:
                    group.processes[server].publish()
                settled(group, copies)
        finally:
            group.close()


def test_no_row_is_missing_while_it_moves() -> None:
    """The removal at the source is not published: a request between the two would find nothing."""
    group, copies = Group(), Copies()
    try:
        group.train(0)
        with following(copies, *group.writers()) as follower:  # type: ignore[arg-type]
            settled(group, copies)
            before = copies.rows()
            group.give(0, 0, HALF)
            group.install(0, 0, HALF)
            group.delete(0, 0, HALF)
            newest = group.processes[0].publish()
            until(lambda: follower.progress["ps 0"].sequence == newest)
            assert copies.rows() == before
            settled(group, copies)
            assert copies.rows() == before
    finally:
        group.close()


def test_a_move_that_is_taken_back_loses_no_change() -> None:
    group, copies = Group(), Copies()
    try:
        group.train(0)
        with following(copies, *group.writers()):  # type: ignore[arg-type]
            settled(group, copies)
            group.train(3)  # not published when the buckets are given up
            group.give(0, 0, 1000)
            group.processes[0].publish()
            group.owned[0].owned[0:1000] = True
            settled(group, copies)
    finally:
        group.close()


def test_buckets_that_moved_there_and_back() -> None:
    group, copies = Group(), Copies()
    try:
        group.train(0)
        with following(copies, *group.writers()):  # type: ignore[arg-type]
            settled(group, copies)
            for seed, source in enumerate([0, 1, 0, 1], 4):
                group.give(source, 200, 700)
                group.install(source, 200, 700)
                group.delete(source, 200, 700)
                group.processes[seed % 2].publish()
                group.train(seed)
            settled(group, copies)
    finally:
        group.close()


def test_a_new_server_is_found_by_those_that_gave_it_buckets() -> None:
    group, copies = Group(), Copies()
    third = FeedProcess({"item": table()}, owner=Buckets(0, 0))
    try:
        group.train(0)
        names = {third.address: "ps 2"}
        with following(
            copies,
            *group.writers(),
            find_writer=lambda address: writer_at(address, names[address]),  # type: ignore[arg-type]
        ) as follower:
            settled(group, copies)
            moved = group.tables[0].rows_of_buckets(range(500))
            group.give(0, 0, 500)
            new: EmbeddingTable = third.tables["item"]
            new.insert_rows(moved.ids, moved.times, moved.rows)
            third.feed._owner.owned[0:500] = True  # type: ignore[union-attr]
            group.delete(0, 0, 500)
            group.processes[0].moved_to = (third.address,)
            train(new, moved.ids[:10].tolist(), seed=8)
            until(lambda: "ps 2" in follower.progress)
            expected = {**group.rows(), **rows_of(new)}

            def equal() -> bool:
                if third.feed.is_active:
                    third.publish()
                return copies.rows() == expected

            until(equal)
    finally:
        third.close()
        group.close()
