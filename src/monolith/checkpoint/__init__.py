"""Checkpoints: everything a run continues from, complete and durable or not there at all."""

from monolith.checkpoint.alias import AliasRules, generate_aliases
from monolith.checkpoint.checkpoint_folder import (
    begin_checkpoint,
    is_complete,
    read_state,
    remove_checkpoint,
    write_checkpoint,
)
from monolith.checkpoint.copy_files import copy_file, copy_recursively
from monolith.checkpoint.dense import DenseReport, plan_dense
from monolith.checkpoint.fit import RestoreReport, TableFit
from monolith.checkpoint.in_use import in_use
from monolith.checkpoint.inspect import inspect_checkpoint, read_row
from monolith.checkpoint.lineage import needs_snapshot
from monolith.checkpoint.manifest import Manifest, read_manifest
from monolith.checkpoint.pending import PendingCheckpoint
from monolith.checkpoint.ps_monitor import PsMonitor
from monolith.checkpoint.reachability import remove_unreachable
from monolith.checkpoint.redirect import get_checkpoint_state
from monolith.checkpoint.restore import plan_restore, prepare_tables, restore_tables
from monolith.checkpoint.restore_points import RestorePoint, find_restore_point, restore_point_of, restore_points
from monolith.checkpoint.save_names import SaveHelper
from monolith.checkpoint.saver import PartialRecoverySaver
from monolith.checkpoint.snapshot import OpenSnapshot, write_snapshot
from monolith.checkpoint.verify import verify
from monolith.checkpoint.writing import remove_unfinished

__all__ = [
    "AliasRules",
    "DenseReport",
    "Manifest",
    "OpenSnapshot",
    "PartialRecoverySaver",
    "PendingCheckpoint",
    "PsMonitor",
    "RestorePoint",
    "RestoreReport",
    "SaveHelper",
    "TableFit",
    "begin_checkpoint",
    "copy_file",
    "copy_recursively",
    "find_restore_point",
    "generate_aliases",
    "get_checkpoint_state",
    "in_use",
    "inspect_checkpoint",
    "is_complete",
    "needs_snapshot",
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
