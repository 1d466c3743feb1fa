"""Danger: a release that cannot read the log of the one before. These bytes may change only together with the version; the
reader of each old version stays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from monolith.log import LogSegment
from monolith.log.commit import UnwrittenChanges, write_segment
from monolith.log.segment_format import SegmentMeta, TableMeta, TableStateMeta, segment_name
from monolith.state_bytes import pack_state

VERSION_1 = Path(__file__).with_name(segment_name(7))


def meta() -> SegmentMeta:
    state = TableStateMeta(max_event_time=99, updates=3, hashnet_scales=(1.0, 0.5))
    table = TableMeta(name="user", config={"name": "user", "seed": 5}, layout="two bytes", row_bytes=2, state=state)
    return SegmentMeta(
        sequence=7,
        parent=5,
        parent_checksum=123456789,
        step=40,
        time=1700000000.25,
        event_time=99,
        kind="rows",
        complete=True,
        has_dense=True,
        has_source=True,
        tables=(table, table.model_copy(update={"name": "item"})),
    )


def changes() -> list[UnwrittenChanges]:
    none = np.empty(0, dtype=np.int64)
    rows = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.uint8)
    return [
        UnwrittenChanges(
            0, np.array([-1, 2**62, 3]), np.array([7, 8, 2**32 - 1], dtype=np.uint32), rows, np.array([4, -5])
        ),
        UnwrittenChanges(1, none, none.astype(np.uint32), rows[:0], np.array([6])),
    ]


def test_the_bytes_of_version_1(tmp_path: Path) -> None:
    state = pack_state({"dense": {"w": torch.tensor([1.5, -2.0])}, "source": {"offset": 12}})
    info = write_segment(tmp_path, meta(), changes(), state)
    assert info.path.read_bytes() == VERSION_1.read_bytes()


def test_version_1_is_read() -> None:
    segment = LogSegment(VERSION_1)
    info = segment.info
    assert (info.sequence, info.parent, info.parent_checksum, info.step) == (7, 5, 123456789, 40)
    assert (info.time, info.event_time, info.kind) == (1700000000.25, 99, "rows")
    assert [(table.name, table.rows, table.erased, table.row_bytes) for table in info.tables] == [
        ("user", 3, 2, 2),
        ("item", 0, 1, 2),
    ]
    assert info.tables[0].meta == meta().tables[0]
    user, item = segment
    assert user.ids.tolist() == [-1, 2**62, 3]
    assert user.times.tolist() == [7, 8, 2**32 - 1]
    assert user.rows.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (user.erased.tolist(), item.erased.tolist(), len(item.ids)) == ([4, -5], [6], 0)
    dense = segment.dense()
    assert isinstance(dense, dict)
    assert dense["w"].tolist() == [1.5, -2.0]
    assert segment.source() == {"offset": 12}
