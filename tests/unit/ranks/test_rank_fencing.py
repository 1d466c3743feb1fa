"""Danger: a rank that was stopped and replaced wakes up and writes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monolith.errors import FencedError
from monolith.log import LogReader
from monolith.ranks.rank_folder import RankFolder
from rank_state_run import new_tables, train


def test_a_replaced_rank_cannot_write_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = [new_tables(), new_tables()]
    stopped = RankFolder(str(tmp_path), tables[0], rank=1, ranks=2)
    train(tables[0], 1)
    stopped.begin_cut(step=1).result()
    with caplog.at_level(logging.WARNING):
        successor = RankFolder(str(tmp_path), tables[1], rank=1, ranks=2)
    assert "cannot write any more" in caplog.text
    for begin in (lambda: stopped.begin_cut(step=2), lambda: stopped.begin_save("model.ckpt-2", step=2)):
        with pytest.raises(FencedError):
            begin().result()
    train(tables[1], 1)
    entry = successor.begin_cut(step=1).result()
    successor.close()
    stopped.close()
    reader = LogReader(tmp_path / "ps" / "1" / "log")
    assert reader.chain(reader.newest)[-1].name == Path(entry.name).name
    assert [info.step for info in reader.chain(reader.newest)] == [1]
