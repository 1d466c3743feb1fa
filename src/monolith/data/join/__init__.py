"""The online joiner: impressions and actions from streams become examples, each with its labels, exactly once."""

from monolith.data.join.archive import ParquetArchive, stream_positions
from monolith.data.join.config import (
    ActionInput,
    ImpressionInput,
    JoinConfig,
    JoinState,
    Label,
    NegativeSampling,
    ParquetOutput,
    StreamOutput,
)
from monolith.data.join.joiner import Joiner, JoinStatus
from monolith.data.join.unit import origin_of
from monolith.data.join.window_join import WindowJoin, is_kept

__all__ = [
    "ActionInput",
    "ImpressionInput",
    "JoinConfig",
    "JoinState",
    "JoinStatus",
    "Joiner",
    "Label",
    "NegativeSampling",
    "ParquetArchive",
    "ParquetOutput",
    "StreamOutput",
    "WindowJoin",
    "is_kept",
    "origin_of",
    "stream_positions",
]
