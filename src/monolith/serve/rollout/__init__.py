"""Rollout of model versions: split of the traffic, shadows, quality by labels, and rollback."""

from monolith.serve.rollout.labels import PredictionMemory, ServedLabel, parse_labels, read_label_file
from monolith.serve.rollout.moments import RollbackTarget, moment_of
from monolith.serve.rollout.plan import QualityBounds, RolloutPlan
from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.rollout.routes import RolloutCollector, rollout_routes

__all__ = [
    "PredictionMemory",
    "QualityBounds",
    "RollbackTarget",
    "RolloutCollector",
    "RolloutPlan",
    "RolloutRouter",
    "ServedLabel",
    "moment_of",
    "parse_labels",
    "read_label_file",
    "rollout_routes",
]
