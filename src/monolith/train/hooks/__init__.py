"""Hooks: code that runs at the moments of a training run."""

from monolith.train.hooks.cached_parameters import FetchCachedVariablesHook
from monolith.train.hooks.checkpoint import NoFirstSaveCheckpointSaverHook
from monolith.train.hooks.deep_insight import DeepInsightHook
from monolith.train.hooks.event_time import EventTimeHook
from monolith.train.hooks.hook import CheckpointSaverListener, Hook
from monolith.train.hooks.inspection import (
    ColumnStatistics,
    FeatureStatisticsHook,
    ProfilerHook,
    TensorBoardHook,
    column_statistics,
)
from monolith.train.hooks.progress import LoggingHook, ProgressHook, ProgressReport, json_lines, rich_lines
from monolith.train.hooks.stop import NanGuardHook, StopAtStepHook
from monolith.train.hooks.tide import CustomGlobalStepWaiterHook, SecondOrStepTimerWithTideSetting, TideWindow

__all__ = [
    "CheckpointSaverListener",
    "ColumnStatistics",
    "CustomGlobalStepWaiterHook",
    "DeepInsightHook",
    "EventTimeHook",
    "FeatureStatisticsHook",
    "FetchCachedVariablesHook",
    "Hook",
    "LoggingHook",
    "NanGuardHook",
    "NoFirstSaveCheckpointSaverHook",
    "ProfilerHook",
    "ProgressHook",
    "ProgressReport",
    "SecondOrStepTimerWithTideSetting",
    "StopAtStepHook",
    "TensorBoardHook",
    "TideWindow",
    "column_statistics",
    "json_lines",
    "rich_lines",
]
