"""A model's rows, and with several workers its dense parameters, on servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from monolith.errors import ConfigError
from monolith.nn import embedding_collections
from monolith.ps.client.server_parameters import CachedParameters, ServerOptimizer
from monolith.ps.client.server_store import ServerStore
from monolith.ps.protocol.dense_optimizers import group_optimizers
from monolith.ps.protocol.messages import DeclaredTable
from monolith.train.cached import FetchCachedVariablesHook
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["Placement", "tables_of_model"]


def tables_of_model(model: nn.Module) -> list[DeclaredTable]:
    """The tables that all collections of `model` need; `ConfigError` if two have one of the same name.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> model = nn.Sequential(EmbeddingBagCollection([Feature(name="user", dim=8)]))
        >>> [table.config.name for table in tables_of_model(model)]
        ['user']
    """
    tables: dict[str, DeclaredTable] = {}
    for collection in embedding_collections(model):
        for table in collection.declaration.tables:
            name = table.config.name
            if name in tables:
                raise ConfigError(
                    f"table {name!r}: two collections of the model have it, and would share its rows on servers; name the "
                    "features of one otherwise"
                )
            tables[name] = DeclaredTable(config=table.config, admission=table.admission)
    return list(tables.values())


class Placement:
    """Moves what `trainer` trains onto servers; may be done again with others after a failure."""

    def __init__(self, trainer: Trainer, *, dense: bool) -> None:
        self._trainer = trainer
        self.tables: Sequence[DeclaredTable] = tables_of_model(trainer.model)
        """What the servers have to be told of."""
        self._optimizer = trainer.dense.optimizer if dense else None
        if self._optimizer is not None:
            trainer.dense.declare()
            # What servers do not have is refused before any of them is asked.
            group_optimizers(self._optimizer)

    def use(self, store: ServerStore) -> list[Hook]:
        """Train on `store` from now on; the hooks that this needs."""
        for collection in embedding_collections(self._trainer.model):
            # What a failed step has left would be applied a second time, or never.
            collection.discard_gradients()
            collection.use_store(store)
        if self._optimizer is None:
            return []
        cached = CachedParameters(
            self._trainer.model,
            store,
            self._optimizer,
            declared=self._trainer.dense.declared,
            replace_other=self._trainer.config.clear_nn,
        )
        self._trainer.optimizer = ServerOptimizer(cached)
        return [FetchCachedVariablesHook(cached), _AdoptSettings()]


class _AdoptSettings(Hook):
    """Lets a worker continue with the learning rates that the chief has restored, or that others have reached."""

    def after_start(self, trainer: Trainer) -> None:
        # A scheduler of the trainer knows the rate of every step by itself.
        if trainer.scheduler is None and isinstance(trainer.optimizer, ServerOptimizer):
            trainer.optimizer.adopt_settings()
