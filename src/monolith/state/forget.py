"""Forgetting rows in the saved state of a run that is not going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from monolith.errors import InvalidArgumentError, StorageError
from monolith.state.index import remove_checkpoint_info, update_save_time, write_checkpoint_info
from monolith.state.manifest import Manifest
from monolith.state.model_dir import ModelDir
from monolith.state.paths import base_name
from monolith.state.restore import restore_tables
from monolith.state.restore_points import BASENAME, RestorePoint, find_restore_point, step_of_name
from monolith.state.retention import CheckpointHistory, drop_checkpoint, remove_unreachable
from monolith.state.save import write_checkpoint
from monolith.state.storage import StrPath
from monolith.state.tables import reading
from monolith.table.admission import AdmissionFilter
from monolith.table.arrays import Ids, id_array
from monolith.table.embedding_table import EmbeddingTable

__all__ = ["SavedForgotten", "drop_saved", "forget_saved"]


@dataclass(frozen=True, kw_only=True)
class SavedForgotten:
    """What `forget_saved` has removed."""

    step: int
    """Of the state."""
    checkpoint: str
    """The new checkpoint."""
    sequence: int
    """Its number in the log. 0 without one."""
    removed: dict[str, int]
    """Rows by table."""


def forget_saved(model_dir: StrPath, ids: Ids, *, tables: Sequence[str] = (), full: bool = False) -> SavedForgotten:
    """Remove the rows of `ids` from the newest state of a run, as a new checkpoint of the same step.

    All rows are read into memory. A run that is going on holds the lock of its log and is refused.

    Args:
        model_dir: Of the run.
        ids: As they are in the tables. Those of features with slots are what `to_fids` makes of the ids in the data.
        tables: Names of tables. Without any, all are meant.
        full: Write a snapshot of all rows, so that the new checkpoint needs nothing that was written before.

    Raises:
        InvalidArgumentError: There is no such table or no saved state, or servers or ranks have saved a part of it.
        StorageError: A run has the log open, or has written to it meanwhile.

    Example:
        >>> import tempfile
        >>> from monolith.testing import sgd_table_config
        >>> table = EmbeddingTable(sgd_table_config(1, name="item"))
        >>> _ = table.reinitialize([7, 8])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_checkpoint(f"{folder}/model.ckpt-1", state={}, step=1, tables=[table])
        ...     forget_saved(folder, [7, 9]).removed
        {'item': 1}
    """
    home = ModelDir(model_dir)
    point = find_restore_point(home)
    made = _tables_at(home, point, tables)
    state, config = point.state(), dict(_newest(home, point).config)
    wanted, path = id_array(ids).reshape(-1), f"{home.path}/{BASENAME}-{point.step}"
    # Before the log is opened, which must know whether the tables had rows when it began.
    restore_tables(point, made)
    with home.open_log(made, parent=point.sequence) if home.keeps_log else nullcontext() as log:
        if find_restore_point(home) != point:
            raise StorageError(f"{home}: a run has continued it meanwhile; end the run, or forget without --offline")
        removed = {name: int(made[name][0].erase(wanted).sum()) for name in tables or made}
        manifest = write_checkpoint(path, state=state, step=point.step, tables=made, log=log, full=full, config=config)
        write_checkpoint_info(home, point.step, feature_counts={name: len(one) for name, (one,) in made.items()})
        _list(home, path, config)
    return SavedForgotten(step=point.step, checkpoint=path, sequence=manifest.sequence, removed=removed)


def drop_saved(model_dir: StrPath, names: Sequence[str]) -> None:
    """Remove checkpoints by name, none of which may be the newest, and the rows that only they needed."""
    home = ModelDir(model_dir)
    for name in names:
        drop_checkpoint(f"{home.path}/{name}", home)
        if (step := step_of_name(name)) is not None:
            remove_checkpoint_info(home, step)
    remove_unreachable(home)


def _tables_at(home: ModelDir, point: RestorePoint, names: Sequence[str]) -> dict[str, list[EmbeddingTable]]:
    """Return empty tables like those of the state."""
    if point.parts:
        raise InvalidArgumentError(
            f"{home}: servers or ranks have saved parts of its newest state, step {point.step}; start the run to forget rows"
        )
    with reading(point) as saved:
        entries = dict(saved.tables)
    if missing := [name for name in names if name not in entries]:
        known = ", ".join(map(repr, entries)) or "none"
        raise InvalidArgumentError(f"table: {home} has no {', '.join(map(repr, missing))}; it has {known}")
    if point.checkpoint is None and any(entry.admission for entry in _newest(home, point).tables.values()):
        raise InvalidArgumentError(
            f"{home}: its newest state, sequence {point.sequence}, is one of the log, which has no admission filters; start the "
            "run to forget rows"
        )
    return {
        name: [
            EmbeddingTable(
                entry.config, admission=None if entry.admission is None else AdmissionFilter(entry.admission)
            )
        ]
        for name, entry in entries.items()
    }


def _newest(home: ModelDir, point: RestorePoint) -> Manifest:
    """Return the manifest of the checkpoint that the state is, or of the newest there is."""
    if point.checkpoint is not None:
        return home.home_of(point.checkpoint).manifest(base_name(point.checkpoint))
    manifests = [home.manifest(name) for name in home.checkpoints()]
    return max(manifests, key=lambda one: one.sequence, default=Manifest(step=0, time=0.0, files=()))


def _list(home: ModelDir, path: str, config: Mapping[str, object]) -> None:
    """List the checkpoint in the index, and remove what has expired by the settings of the run."""
    keeps, hours = config.get("checkpoints_max_to_keep", 10), config.get("keep_checkpoint_every_n_hours", 10000.0)
    history = CheckpointHistory(
        max_to_keep=keeps if isinstance(keeps, int) else None,
        keep_checkpoint_every_n_hours=float(hours) if isinstance(hours, int | float) else 10000.0,
        model_dir=home,
    )
    history.recover_from_index(home)
    saved = home.manifest(base_name(path))
    exempt = update_save_time(home, int(saved.time)).exempt_model_checkpoint_paths
    for removed in history.record(path, home, exempt=exempt):
        if (step := step_of_name(removed)) is not None:
            remove_checkpoint_info(home, step)
    remove_unreachable(home)
