"""The change log: which rows changed, in order, each commit a durable segment with a sequence number."""

from monolith.log.change_log import ChangeLog
from monolith.log.flusher import Flusher
from monolith.log.history import RowChange, history
from monolith.log.log_reader import LogReader, Verdict
from monolith.log.replay import replay
from monolith.log.retention import prune
from monolith.log.segment import LogSegment
from monolith.log.segment_info import SegmentInfo, SegmentTable, TableChanges

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
