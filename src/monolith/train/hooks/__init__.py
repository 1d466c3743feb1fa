"""Hooks: code that runs at the moments of a training run."""

from monolith.train.hooks.barrier import BarrierHook, BarrierSaverListener
from monolith.train.hooks.checkpoint import NoFirstSaveCheckpointSaverHook
from monolith.train.hooks.deep_insight import DeepInsightHook
from monolith.train.hooks.feature_statistics import ColumnStatistics, FeatureStatisticsHook, column_statistics
from monolith.train.hooks.global_step import GlobalStepHook
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.log import LoggingHook
from monolith.train.hooks.nan_guard import NanGuardHook
from monolith.train.hooks.profiler import ProfilerHook
from monolith.train.hooks.progress import ProgressHook, ProgressReport, json_lines, rich_lines
from monolith.train.hooks.save_listener import CheckpointSaverListener
from monolith.train.hooks.save_timer import SecondOrStepTimerWithTideSetting
from monolith.train.hooks.stop import StopAtStepHook
from monolith.train.hooks.sync import ChiefSyncHook, SyncHelper, TrainingHooksHelper, WorkerSyncHook
from monolith.train.hooks.tensorboard import TensorBoardHook
from monolith.train.hooks.tide import (
    CustomGlobalStepWaiterHook,
    TideStoppingHook,
    TideWindow,
    before,
    tide_available_now,
)

__all__ = [
    "BarrierHook",
    "BarrierSaverListener",
    "CheckpointSaverListener",
    "ChiefSyncHook",
    "ColumnStatistics",
    "CustomGlobalStepWaiterHook",
    "DeepInsightHook",
    "FeatureStatisticsHook",
    "GlobalStepHook",
    "Hook",
    "LoggingHook",
    "NanGuardHook",
    "NoFirstSaveCheckpointSaverHook",
    "ProfilerHook",
    "ProgressHook",
    "ProgressReport",
    "SecondOrStepTimerWithTideSetting",
    "StopAtStepHook",
    "SyncHelper",
    "TensorBoardHook",
    "TideStoppingHook",
    "TideWindow",
    "TrainingHooksHelper",
    "WorkerSyncHook",
    "before",
    "column_statistics",
    "json_lines",
    "rich_lines",
    "tide_available_now",
]
