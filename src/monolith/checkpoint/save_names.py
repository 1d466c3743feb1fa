"""`SaveHelper`: what checkpoints are called, and which steps there are."""

from __future__ import annotations

from monolith.checkpoint.checkpoint_state import read_checkpoint_state
from monolith.checkpoint.paths import parent_folder
from monolith.checkpoint.storage import StrPath
from monolith.errors import InvalidArgumentError

__all__ = ["BASENAME", "SaveHelper"]

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
        """The step in the name of a checkpoint."""
        digits = ckpt_prefix.rsplit("-", 1)[-1]
        if not (digits.isascii() and digits.isdigit()):
            raise InvalidArgumentError(f"{ckpt_prefix!r}: expected a name that ends with '-' and a step")
        return int(digits)

    def get_existing_checkpoint_steps(self) -> set[int]:
        """The steps that the index beside them lists."""
        state = read_checkpoint_state(parent_folder(self.basename))
        return {self.get_global_step_value(path) for path in state.all_model_checkpoint_paths} if state else set()
