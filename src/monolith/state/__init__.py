"""Checkpoints: everything a run continues from, complete and durable or not there at all."""

from monolith.state.alias import AliasRules, generate_aliases
from monolith.state.checkpoint_folder import (
    begin_checkpoint,
    is_complete,
    read_state,
    remove_checkpoint,
    write_checkpoint,
)
from monolith.state.dense import DenseReport, plan_dense
from monolith.state.fit import RestoreReport, TableFit
from monolith.state.in_use import in_use
from monolith.state.inspect import inspect_checkpoint, read_row
from monolith.state.lineage import needs_snapshot
from monolith.state.manifest import Manifest, read_manifest
from monolith.state.pending import PendingCheckpoint
from monolith.state.reachability import remove_unreachable
from monolith.state.redirect import get_checkpoint_state
from monolith.state.restore import plan_restore, prepare_tables, restore_tables
from monolith.state.restore_points import RestorePoint, find_restore_point, restore_point_of, restore_points
from monolith.state.save_names import SaveHelper
from monolith.state.snapshot import OpenSnapshot, write_snapshot
from monolith.state.verify import verify
from monolith.state.writing import remove_unfinished

__all__ = [
    "AliasRules",
    "DenseReport",
    "Manifest",
    "OpenSnapshot",
    "PendingCheckpoint",
    "RestorePoint",
    "RestoreReport",
    "SaveHelper",
    "TableFit",
    "begin_checkpoint",
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
