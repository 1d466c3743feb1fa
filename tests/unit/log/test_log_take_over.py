"""Danger: a writer that was replaced while it wrote replaces a segment that its successor has committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from log_tables import new_table
from monolith.errors import FencedError, StorageError
from monolith.log import ChangeLog, LogReader
from monolith.log.commit import Throttle, write_segment


def test_what_a_replaced_writer_was_writing_hides_nothing_of_its_successor(tmp_path: Path) -> None:
    stale_table, table = new_table(), new_table()
    stale = ChangeLog(tmp_path, [stale_table])
    stale.commit(step=1)
    stale_table.assign([1], torch.ones(1, stale_table.dim))
    under_way = stale._cut(2, None, 0, None, Throttle(1.0))
    with pytest.raises(StorageError, match="another writer has this log open"):
        ChangeLog(tmp_path, [table])
    with ChangeLog(tmp_path, [table], take_over=True) as log:
        table.assign([2], torch.ones(1, table.dim))
        sequence = log.commit(step=2)
        with pytest.raises(FencedError, match="another process has taken this log over"):
            stale._write(under_way)
        with pytest.raises(FencedError):
            stale.commit(step=3)
        stale.close()
        table.assign([3], torch.ones(1, table.dim))
        last = log.commit(step=3)
        reader = LogReader(tmp_path)
        assert [info.sequence for info in reader.chain(last)] == [1, sequence, last]
        assert not [verdict for verdict in reader.verify() if verdict.error]
    # Nobody holds it any more, whoever was replaced.
    ChangeLog(tmp_path, [new_table()]).close()


def test_a_writer_whose_unfinished_segment_its_successor_has_removed_is_told_that_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    successors: list[ChangeLog] = []

    def replaced_meanwhile(folder: Path, meta: object, changes: Iterable[object], state: object) -> object:
        def pieces() -> Iterator[object]:
            yield from changes
            successors.append(ChangeLog(tmp_path, [new_table()], take_over=True))

        return write_segment(folder, meta, pieces(), state)  # type: ignore[arg-type]

    monkeypatch.setattr("monolith.log.change_log.write_segment", replaced_meanwhile)
    table = new_table()
    stale = ChangeLog(tmp_path, [table])
    table.assign([1], torch.ones(1, table.dim))
    with pytest.raises(FencedError, match="another process has taken this log over"):
        stale.commit(step=1)
    stale.close()
    (log,) = successors
    assert log.sequence == 0
    log.close()


def test_taking_over_what_nobody_holds_is_opening_it(tmp_path: Path) -> None:
    for _ in range(2):
        with ChangeLog(tmp_path, [new_table()], take_over=True) as log:
            log.commit(step=1)
    assert len(LogReader(tmp_path).line()) == 2
