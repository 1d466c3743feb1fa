"""Checkpoints: everything a run continues from, complete and durable or not there at all."""

from monolith.checkpoint.ps_monitor import PsMonitor
from monolith.checkpoint.save_names import SaveHelper
from monolith.checkpoint.saver import PartialRecoverySaver

__all__ = ["PartialRecoverySaver", "PsMonitor", "SaveHelper"]
