"""Rows per slot next to a checkpoint, as the original writes them: `slot_counts` of `ckpt.info-<step>`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from monolith.errors import InvalidArgumentError
from monolith.nn import embedding_collections
from monolith.state.index import read_checkpoint_info, write_checkpoint_info
from monolith.train.hooks.hook import CheckpointSaverListener

if TYPE_CHECKING:
    from monolith.table.store import Store
    from monolith.train.trainer import Trainer

__all__ = ["FidSlotCountSaverListener"]


class FidSlotCountSaverListener(CheckpointSaverListener):
    """Adds the rows of each slot to `ckpt.info-<step>`, which has the rows of each table in any case.

    They are counted between two steps, where the rows are: in this process, on servers or on ranks. Training waits for that, so
    the counts are those of the checkpoint. Features without slots are not counted.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> trainer = Trainer(nn.Identity())
        >>> trainer.save_listeners = (FidSlotCountSaverListener(),)
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}

    def begin(self, trainer: Trainer) -> None:
        """Require features with slots."""
        if not _slotted_tables(trainer):
            raise InvalidArgumentError(
                "FidSlotCountSaverListener: no feature of the model has a slot, so there is nothing to count; ckpt.info-<step> "
                "has the rows of each table without it"
            )

    def before_save(self, trainer: Trainer, step: int) -> None:
        """Count."""
        # Updates that wait for the next step are part of the checkpoint.
        trainer.settle()
        counts: Counter[int] = Counter()
        for store, table in _slotted_tables(trainer):
            counts.update(store.slot_counts(table))
        self._counts[step] = dict(counts)

    def after_save(self, trainer: Trainer, step: int) -> None:
        """Write."""
        counts = self._counts.pop(step)
        self._counts.clear()  # of saves that failed
        assert trainer.model_dir is not None
        rows, _ = read_checkpoint_info(trainer.model_dir, step) or ({}, {})
        write_checkpoint_info(trainer.model_dir, step, feature_counts=rows, slot_counts=counts)


def _slotted_tables(trainer: Trainer) -> list[tuple[Store, str]]:
    """Return the tables of features with slots, each once."""
    return [
        (collection.store, table.config.name)
        for collection in embedding_collections(trainer.model)
        for table in collection.declaration.tables
        if any(slot is not None for slot in table.slots)
    ]
