"""Danger: a commit written during training that holds rows of a later step, misses one, or runs twice at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from comparison import int64, snapshot
from log_tables import new_table, rebuilt, train
from monolith import EmbeddingTable, InvalidArgumentError, StorageError
from monolith.log import ChangeLog, LogReader, replay
from monolith.log import change_log as module
from monolith.log.commit import Item, TablesCut, Throttle, UnwrittenChanges
from monolith.log.segment_format import SegmentInfo, SegmentMeta
from monolith.state_bytes import PackedState


class Gate:
    """Holds a commit back between its cut and its first write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = module.write_segment

        def held(*arguments: object) -> object:
            self.reached.set()
            assert self.opened.wait(60)
            return write(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "write_segment", held)


def test_the_segment_is_the_state_at_the_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, gate, weight = new_table(), Gate(monkeypatch), torch.ones(2)
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(100), event_time=5)
        expected = snapshot(table)
        future = log.commit_in_background(step=1, dense={"weight": weight})
        assert gate.reached.wait(60)
        train(table, range(50, 150), step=1, event_time=6)
        table.erase(int64(range(10)))
        weight.zero_()
        gate.opened.set()
        sequence = future.result()
        assert snapshot(rebuilt(tmp_path, sequence)) == expected
        assert torch.equal(LogReader(tmp_path).read(sequence).dense()["weight"], torch.ones(2))  # type: ignore[index]
        assert snapshot(rebuilt(tmp_path, log.commit(step=2))) == snapshot(table)


def test_commits_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, gate = new_table(), Gate(monkeypatch)
    with ChangeLog(tmp_path, [table]) as log:
        assert not log.busy
        first = log.commit_in_background(step=1)
        assert gate.reached.wait(60)
        assert log.busy
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(log.commit(step=2)))
        thread.start()
        assert later == []
        gate.opened.set()
        thread.join()
        assert (first.result(), later) == (1, [2])
    assert [info.parent for info in LogReader(tmp_path).segments()] == [0, 1]


def test_close_waits_for_the_commit_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    log = ChangeLog(tmp_path, [new_table()])
    future = log.commit_in_background(step=1)
    assert gate.reached.wait(60)
    closing = threading.Thread(target=log.close)
    closing.start()
    gate.opened.set()
    closing.join()
    assert future.done()
    assert LogReader(tmp_path).sequences() == [1]


def test_close_waits_for_a_commit_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    log = ChangeLog(tmp_path, [new_table()])
    committing, closing = threading.Thread(target=log.commit, kwargs={"step": 1}), threading.Thread(target=log.close)
    committing.start()
    assert gate.reached.wait(60)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    with pytest.raises(StorageError, match="another writer"):
        ChangeLog(tmp_path, [])
    gate.opened.set()
    committing.join()
    closing.join()
    assert LogReader(tmp_path).sequences() == [1]


def test_a_replica_follows_a_table_that_trains_without_pause(tmp_path: Path) -> None:
    table, copy = new_table(), new_table()
    stop = threading.Event()

    def keep_training() -> None:
        step = 0
        while not stop.is_set():
            train(table, [(step * 31 + i) % 500 for i in range(40)], step=step, event_time=step)
            table.erase(int64([step % 500]))
            step += 1

    reader = LogReader(tmp_path)
    with ChangeLog(tmp_path, [table]) as log:
        trainer = threading.Thread(target=keep_training)
        trainer.start()
        futures = [log.commit_in_background(step=n) for n in range(30)]
        stop.set()
        trainer.join()
        log.commit(step=99)
        for future in futures:
            future.result()
    for info in reader.chain(reader.newest):
        replay(reader.read(info.sequence), {"user": copy})
    assert snapshot(copy) == snapshot(table)


def test_a_commit_without_tables_is_a_place_in_the_data_alone(tmp_path: Path) -> None:
    none: list[EmbeddingTable] = []
    with ChangeLog(tmp_path, none) as log:
        sequence = log.commit_in_background(step=1, source={"offset": 7}).result()
    assert LogReader(tmp_path).read(sequence).source() == {"offset": 7}


class Resting:
    """Stands for the clock of a writer that has worked for a second with every piece, and says when it rests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        clock = itertools.count().__next__

        class Watched(Throttle):
            def __init__(pace, share: float) -> None:  # noqa: N805
                super().__init__(share, worked=clock)

            def paced(pace, items: Iterable[Item]) -> Iterator[Item]:  # noqa: N805
                for piece in super().paced(items):
                    self.begun.set()
                    yield piece

        monkeypatch.setattr(module, "Throttle", Watched)


@pytest.mark.parametrize("waiter", ["hurry", "commit", "commit_in_background", "close"])
def test_a_slow_commit_ends_its_rests_when_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiter: str
) -> None:
    resting, table = Resting(monkeypatch), new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(100))
        expected = snapshot(table)
        slow = log.commit_in_background(step=1, share=1e-9)  # would rest for thirty years
        assert resting.begun.wait(60)
        assert not slow.done()
        if waiter.startswith("commit"):
            getattr(log, waiter)(step=2)
        else:
            getattr(log, waiter)()
        assert slow.result(timeout=60) == 1
    assert snapshot(rebuilt(tmp_path, 1)) == expected


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused_before_anything_is_cut(tmp_path: Path, share: float) -> None:
    table = new_table()
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(3))
        with pytest.raises(InvalidArgumentError, match=r"share: expected a number in \(0, 1\]"):
            log.commit_in_background(step=1, share=share)
        assert log.changed == 3
        assert log.commit(step=1) == 1


@pytest.mark.parametrize(("share", "read"), [(0.5, 3), (1.0, 1)])
def test_a_commit_that_rests_has_read_its_rows_before_it_writes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, read: int
) -> None:
    table, made, made_by_first_write = new_table(), [], []
    write, changes = module.write_segment, TablesCut.changes

    def counted(cut: TablesCut) -> Iterator[UnwrittenChanges]:
        for piece in changes(cut):
            made.append(len(piece.ids))
            yield piece

    def writing(
        folder: Path, meta: SegmentMeta, pieces: Iterable[UnwrittenChanges], state: PackedState | None
    ) -> SegmentInfo:
        first = next(iterator := iter(pieces))
        made_by_first_write.append(len(made))
        return write(folder, meta, itertools.chain([first], iterator), state)

    monkeypatch.setattr(TablesCut, "changes", counted)
    monkeypatch.setattr(module, "write_segment", writing)
    with ChangeLog(tmp_path, [table]) as log:
        train(table, range(40_000))
        expected = snapshot(table)
        sequence = log.commit_in_background(step=1, share=share).result()
    assert made_by_first_write == [read]
    assert sum(made) == 40_000
    assert snapshot(rebuilt(tmp_path, sequence)) == expected
