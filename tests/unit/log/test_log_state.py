"""Danger: rows are restored with the dense weights or the position in the data of another moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from log_tables import new_table, train
from monolith.log import ChangeLog, LogReader


def test_everything_given_to_a_commit_comes_back(tmp_path: Path) -> None:
    table = new_table()
    source = {"file": 3, "held": (torch.arange(4), [None, True])}
    with ChangeLog(tmp_path, [table], clock=lambda: 1234.5) as log:
        train(table, [1, 2], event_time=77)
        log.commit(step=10, source=source, dense={"weight": torch.full((2, 2), 0.5)})
        log.commit(step=11, event_time=99)
        log.commit(step=12, dense={})
    reader = LogReader(tmp_path)
    first, second, third = (reader.read(sequence) for sequence in (1, 2, 3))
    assert (first.info.step, first.info.time, first.info.event_time) == (10, 1234.5, 77)
    assert (first.info.has_dense, first.info.has_source, first.info.kind) == (True, True, "rows")
    dense = first.dense()
    assert isinstance(dense, dict)
    assert torch.equal(dense["weight"], torch.full((2, 2), 0.5))
    place = first.source()
    assert isinstance(place, dict)
    assert place["file"] == 3
    assert torch.equal(place["held"][0], torch.arange(4))
    assert place["held"][1] == [None, True]
    assert (second.info.event_time, second.dense(), second.source()) == (99, None, None)
    assert (second.info.has_dense, second.info.has_source) == (False, False)
    assert (third.info.has_dense, third.dense(), third.source()) == (True, {}, None)


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    with ChangeLog(tmp_path, [], parent=np.int64(4)) as log:  # type: ignore[arg-type]
        info = LogReader(tmp_path).info(log.commit(step=torch.tensor(7), event_time=np.uint32(8)))  # type: ignore[arg-type]
    assert (info.parent, info.step, info.event_time) == (4, 7, 8)


def test_configuration_and_state_of_the_tables_come_back(tmp_path: Path) -> None:
    table = new_table()
    with ChangeLog(tmp_path, {"0/user": table}) as log:
        train(table, [1, 2], event_time=77)
        info = LogReader(tmp_path).info(log.commit(step=1))
    (part,) = info.tables
    assert (part.name, part.layout, part.rows, part.erased) == ("0/user", table.layout, 2, 0)
    assert part.config() == table.config
    assert part.meta.state.max_event_time == 77
    assert info.size == info.path.stat().st_size
