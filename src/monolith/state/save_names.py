"""`SaveHelper`: what checkpoints are called, and which steps there are."""

from __future__ import annotations

from monolith.errors import InvalidArgumentError
from monolith.state.checkpoint_state import read_checkpoint_state
from monolith.state.paths import base_name, parent_folder
from monolith.state.storage import StrPath

__all__ = ["BASENAME", "SaveHelper", "step_of_name"]

BASENAME = "model.ckpt"
"""What the names of a run's checkpoints begin with."""


class SaveHelper:
    """Names of the checkpoints that begin with `basename`, such as `/runs/ctr/model.ckpt`.

    Example:
        >>> names = SaveHelper("/runs/ctr/model.ckpt")
        >>> names.get_ckpt_prefix(30), names.get_ckpt_asset_dir(names.get_ckpt_prefix(30))
        ('/runs/ctr/model.ckpt-30', '/runs/ctr/model.ckpt-30.assets/')
        >>> SaveHelper.get_global_step_value("/runs/ctr/model.ckpt-30")
        30
    """

    def __init__(self, basename: StrPath) -> None:
        self.basename = str(basename)

    def get_ckpt_prefix(self, step: int) -> str:
        """The checkpoint of `step`."""
        return f"{self.basename}-{step}"

    def get_ckpt_asset_dir(self, ckpt_prefix: str) -> str:
        """Where the original keeps what belongs to a checkpoint and is no dense variable."""
        return f"{ckpt_prefix}.assets/"

    @staticmethod
    def get_global_step_value(ckpt_prefix: str) -> int:
        """The step in the name of a checkpoint. `InvalidArgumentError` (a ValueError) if it has none."""
        step = step_of_name(ckpt_prefix)
        if step is None:
            raise InvalidArgumentError(f"{ckpt_prefix!r}: expected a name that ends with '-' and a step")
        return step

    def get_existing_checkpoint_steps(self) -> set[int]:
        """The steps that the index of their folder lists. A checkpoint whose name has no step is left out."""
        state = read_checkpoint_state(parent_folder(self.basename))
        steps = map(step_of_name, state.all_model_checkpoint_paths if state else ())
        return {step for step in steps if step is not None}


def step_of_name(path: str) -> int | None:
    """The step in the name of a checkpoint. None if it has none.

    Example:
        >>> step_of_name("/runs/ctr-2/model.ckpt-30"), step_of_name("/runs/ctr-2/model.ckpt")
        (30, None)
    """
    _, dash, digits = base_name(path).rpartition("-")
    return int(digits) if dash and digits.isascii() and digits.isdigit() else None
