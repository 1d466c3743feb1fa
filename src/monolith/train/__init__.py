"""Training: the step loop and its hooks, the estimator that puts them together, and `Head`, whose home is `monolith.nn`."""

from monolith.nn import Head
from monolith.train.config import RunConfig
from monolith.train.distributed.config import RunnerConfig
from monolith.train.estimator import Estimator
from monolith.train.model_checkpoints import ModelCheckpoints
from monolith.train.trainer import StepResult, Trainer

__all__ = [
    "Estimator",
    "Head",
    "ModelCheckpoints",
    "RunConfig",
    "RunnerConfig",
    "StepResult",
    "Trainer",
]
