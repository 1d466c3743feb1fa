"""Forgetting: removing the rows of some ids from a run, wherever they are, and making that durable."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from monolith.errors import InvalidArgumentError, StorageError
from monolith.features.ids import to_fids
from monolith.nn import embedding_collections
from monolith.table.arrays import Ids, id_array

if TYPE_CHECKING:
    from torch import nn

    from monolith.table.store import Store
    from monolith.train.trainer import Trainer

__all__ = ["Forgotten", "ForgottenTable", "forget_rows"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ForgottenTable:
    """What was removed from one table."""

    features: tuple[str, ...]
    """The features whose ids were looked for."""
    ids: tuple[int, ...]
    """The ids as they are in the table. Those of features with slots differ from those in a batch."""
    removed: int
    """Rows that there were."""


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """What was removed from a run that goes on."""

    step: int
    """The global step after which it was done."""
    checkpoint: str | None
    """The checkpoint that was written right after. It and all later ones are without the rows. None without a model_dir."""
    sequence: int
    """The number of the run's change log from which on the rows are absent. 0 without a log."""
    tables: dict[str, ForgottenTable]
    """By the name that the table has in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    store: Store
    table: str
    """Its name in the store."""
    features: tuple[str, ...]
    ids: np.ndarray


def forget_rows(
    trainer: Trainer, ids: Ids, *, tables: Sequence[str] = (), features: Sequence[str] = (), renew: bool = False
) -> Forgotten:
    """Remove the rows of `ids` between two steps, then save a checkpoint, so that they stay removed after a crash.

    What the model has learnt from these ids elsewhere, in dense weights and in the rows of other ids, stays. An id that comes
    again in the data gets a new row. An admission filter keeps what it has counted: an id that was admitted once is so at once.

    Args:
        trainer: Of the chief.
        ids: As they are in a batch.
        tables: Names of tables.
        features: Names of features. Without both, all features of the model are meant.
        renew: Write a snapshot of all rows with the checkpoint, which then needs nothing that was written before.

    Raises:
        InvalidArgumentError: The model has no such table or feature, or `renew` is given and other processes hold the rows.
        StorageError: The rows are removed, and the checkpoint could not be written.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.train import Trainer
        >>> model = EmbeddingBagCollection([Feature(name="user", dim=2)])
        >>> _ = model.store.reinitialize("user", [7, 8])
        >>> forget_rows(Trainer(model), [7, 99]).tables["user"].removed
        1
    """
    wanted = _wanted(trainer.model, id_array(ids).reshape(-1), tables, features)
    if renew and trainer.remote_stores:
        raise InvalidArgumentError(
            "purge: parameter servers or ranks hold the rows and decide themselves when they write a snapshot; leave it out"
        )
    # Updates that wait for the next step would bring rows back.
    trainer.settle()
    stores = trainer.stores
    found: dict[str, ForgottenTable] = {}
    for one in wanted:
        removed = one.store.erase(one.table, one.ids)
        number = next(n for n, store in enumerate(stores) if store is one.store)
        name = one.table if len(stores) == 1 or one.store.remote else f"{number}/{one.table}"
        found[name] = ForgottenTable(features=one.features, ids=tuple(map(int, one.ids)), removed=removed)
    count = sum(table.removed for table in found.values())
    _log.warning("%d rows were forgotten after step %d because an operator asked for it", count, trainer.step)
    path = _saved(trainer, count, renew=renew)
    log = trainer.change_log
    return Forgotten(
        step=trainer.step, checkpoint=path, sequence=0 if log is None or path is None else log.sequence, tables=found
    )


def _saved(trainer: Trainer, count: int, *, renew: bool) -> str | None:
    trainer.note_change()
    try:
        if renew:
            trainer.renew_snapshot()
        return trainer.save()
    except OSError as error:
        raise StorageError(
            f"forget: {count} rows are removed from training and are absent from the next checkpoint, but none could be written "
            f"now, so a crash would bring them back; forget them again when the disk can be written: {error}"
        ) from error


def _wanted(model: nn.Module, ids: np.ndarray, tables: Sequence[str], features: Sequence[str]) -> list[_Wanted]:
    """Return the ids to remove from each table."""
    collections = embedding_collections(model)
    _require(tables, {name for c in collections for name in c.declaration.assignment.values()}, "table")
    _require(features, {name for c in collections for name in c.declaration.assignment}, "feature")
    chosen: dict[tuple[int, str], tuple[Store, list[str], list[np.ndarray]]] = {}
    for collection in collections:
        for table in collection.declaration.tables:
            name = table.config.name
            for feature, slot in zip(table.features, table.slots, strict=True):
                if (tables or features) and name not in tables and feature.name not in features:
                    continue
                _, names, keys = chosen.setdefault((id(collection.store), name), (collection.store, [], []))
                names.append(feature.name)
                keys.append(ids if slot is None else to_fids(ids, slot).numpy())
    return [
        _Wanted(store=store, table=name, features=tuple(dict.fromkeys(names)), ids=np.unique(np.concatenate(keys)))
        for (_, name), (store, names, keys) in chosen.items()
    ]


def _require(names: Iterable[str], known: set[str], what: str) -> None:
    if missing := [name for name in names if name not in known]:
        has = ", ".join(map(repr, sorted(known))) or "none"
        raise InvalidArgumentError(f"{what}: the model has no {', '.join(map(repr, missing))}; it has {has}")
