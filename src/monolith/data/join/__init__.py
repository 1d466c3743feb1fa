"""The online joiner: impressions and actions from streams become examples, each with its labels, exactly once."""

from importlib import import_module
from typing import TYPE_CHECKING

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
from monolith.data.join.repartition import Repartition
from monolith.data.join.unit import origin_of
from monolith.data.join.window_join import WindowJoin, is_kept

if TYPE_CHECKING:
    from monolith.data.join.archive import ParquetArchive, stream_positions

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
    "Repartition",
    "StreamOutput",
    "WindowJoin",
    "is_kept",
    "origin_of",
    "stream_positions",
]

# Loaded when first asked for: only a joiner that writes Parquet needs Arrow.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in ("ParquetArchive", "stream_positions"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module("monolith.data.join.archive"), name)
        return value
