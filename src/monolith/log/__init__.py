"""The change log: which rows changed, in order. Each commit is a durable segment with a sequence number."""

from monolith.log.change_log import ChangeLog, Flusher
from monolith.log.reader import LogReader, Verdict, prune
from monolith.log.replay import RowChange, history, replay
from monolith.log.segment import LogSegment
from monolith.log.segment_format import SegmentInfo, SegmentTable, TableChanges

__all__ = [
    "ChangeLog",
    "Flusher",
    "LogReader",
    "LogSegment",
    "RowChange",
    "SegmentInfo",
    "SegmentTable",
    "TableChanges",
    "Verdict",
    "history",
    "prune",
    "replay",
]
