"""Saved state: a model directory with checkpoints, snapshots and the change log, complete and durable or not there at all."""

from monolith.state.compatibility import RestoreReport, TableFit
from monolith.state.dense import AliasRules, DenseReport, generate_aliases, plan_dense
from monolith.state.inspect import inspect_checkpoint, read_row, verify
from monolith.state.locks import in_use, remove_unfinished
from monolith.state.manifest import Manifest, read_manifest
from monolith.state.model_dir import ModelDir, is_complete, read_state, remove_checkpoint
from monolith.state.restore import plan_restore, prepare_tables, restore_tables
from monolith.state.restore_points import RestorePoint, find_restore_point, restore_point_of, restore_points
from monolith.state.retention import remove_unreachable
from monolith.state.save import PendingCheckpoint, begin_checkpoint, write_checkpoint
from monolith.state.snapshot import OpenSnapshot, write_snapshot

__all__ = [
    "AliasRules",
    "DenseReport",
    "Manifest",
    "ModelDir",
    "OpenSnapshot",
    "PendingCheckpoint",
    "RestorePoint",
    "RestoreReport",
    "TableFit",
    "begin_checkpoint",
    "find_restore_point",
    "generate_aliases",
    "in_use",
    "inspect_checkpoint",
    "is_complete",
    "plan_dense",
    "plan_restore",
    "prepare_tables",
    "read_manifest",
    "read_row",
    "read_state",
    "remove_checkpoint",
    "remove_unfinished",
    "remove_unreachable",
    "restore_point_of",
    "restore_points",
    "restore_tables",
    "verify",
    "write_checkpoint",
    "write_snapshot",
]
