"""Export every checkpoint of a run, and remove exports whose checkpoint is gone: the original's `ExportSaverListener`."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format

from monolith.durable import write_durably
from monolith.errors import CorruptFileError, InvalidArgumentError, MonolithError, StorageError
from monolith.features.batch import Batch
from monolith.original.exporters import BaseExporter
from monolith.proto.export_pb2 import ServingEntry, ServingModelState
from monolith.state.index import get_monolith_checkpoint_state, read_checkpoint_state
from monolith.state.paths import base_name, parent_folder
from monolith.train.hooks.hook import CheckpointSaverListener

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = [
    "EXPORT_STATE",
    "ExportSaverListener",
    "append_export_state",
    "get_export_saver_listener_state",
    "get_global_step",
    "overwrite_export_saver_listener_state",
]

EXPORT_STATE = "ExportSaverListenerState"
"""The file beside exports that lists them with their steps."""
LATEST_VERSION = "export_models.latest_version"
"""The metric with the version of the newest export."""

_CHECKPOINT = re.compile(r"model\.ckpt-([0-9]+)")
_log = logging.getLogger(__name__)


def get_global_step(checkpoint_path: str) -> int:
    """Return the step of a checkpoint, whose name must be `model.ckpt-<step>`.

    Example:
        >>> get_global_step("runs/clicks/model.ckpt-30")
        30
    """
    match = _CHECKPOINT.fullmatch(base_name(checkpoint_path))
    if match is None:
        raise InvalidArgumentError(
            f"checkpoint_path: expected a path that ends in model.ckpt-<step>, got {checkpoint_path!r}"
        )
    return int(match[1])


def get_export_saver_listener_state(export_dir_base: str | Path) -> ServingModelState:
    """Read which exports there are. A folder without the file has none.

    Example:
        >>> len(get_export_saver_listener_state("no/such/folder").entries)
        0
    """
    path = Path(export_dir_base, EXPORT_STATE)
    try:
        return text_format.Parse(path.read_text(), ServingModelState(), allow_unknown_field=True)
    except FileNotFoundError:
        return ServingModelState()
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptFileError(
            f"{path}: cannot be parsed: {error}; remove it, exports that it listed then stay"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def overwrite_export_saver_listener_state(export_dir_base: str | Path, state: ServingModelState) -> None:
    """Replace the file, which is at any moment the old one or the new one."""
    path = Path(export_dir_base, EXPORT_STATE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text_format.MessageToString(state).encode())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def append_export_state(export_dir_base: str | Path, export_dir: str | Path, global_step: int) -> ServingModelState:
    """Add an export to the file. Returns all of them.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as base:
        ...     [entry.global_step for entry in append_export_state(base, f"{base}/1700000000", 30).entries]
        [30]
    """
    state = get_export_saver_listener_state(export_dir_base)
    kept = [entry for entry in state.entries if entry.export_dir != str(export_dir)]
    state = ServingModelState(entries=[*kept, ServingEntry(export_dir=str(export_dir), global_step=global_step)])
    overwrite_export_saver_listener_state(export_dir_base, state)
    return state


class ExportSaverListener(CheckpointSaverListener):
    """Exports each checkpoint once it is durable, and removes exports whose checkpoint was removed.

    Steps wait for the export, but other workers do not. An export that fails is logged and does not end the run: the next
    checkpoint is exported again.

    Args:
        save_path: how checkpoints are called without their step, `<model_dir>/model.ckpt`.
        serving_input_receiver_fn: returns a batch to trace the model with.
        exporter: makes the exports.
        exempt_checkpoint_paths: checkpoints whose exports stay, besides those that `monolith_checkpoint` names.
        dense_only: refused, as by `DistributedExporter`.

    Example:
        >>> from monolith.original import StandaloneExporter
        >>> from monolith.train import Estimator
        >>> exporter = StandaloneExporter(lambda config: Estimator(model, config), "runs/clicks")
        >>> listener = ExportSaverListener("runs/clicks/model.ckpt", lambda: example, exporter)
        >>> listener.exporter is exporter
        True
    """

    def __init__(
        self,
        save_path: str,
        serving_input_receiver_fn: Callable[[], Batch],
        exporter: BaseExporter,
        exempt_checkpoint_paths: Iterable[str] = (),
        dense_only: bool = False,
    ) -> None:
        if dense_only:
            raise InvalidArgumentError(
                "dense_only: an export has its rows; for newer dense weights let replicas follow the run, `monolith serve --run`"
            )
        self._save_path, self._example, self.exporter = save_path, serving_input_receiver_fn, exporter
        self._exempt = {get_global_step(path) for path in exempt_checkpoint_paths}

    def after_save(self, trainer: Trainer, step: int) -> None:
        """Export the checkpoint of `step`."""
        try:
            folders = self.exporter.export_saved_model(self._example, f"{self._save_path}-{step}")
            for folder in dict.fromkeys(folders.values()):
                append_export_state(folder.parent, folder, step)
                trainer.on_save_metric(LATEST_VERSION, float(folder.name), {"model_name": folder.parent.name})
                self.collect_garbage(folder.parent)
        except MonolithError as error:
            _log.error("the checkpoint of step %d was not exported: %s", step, error)

    def collect_garbage(self, export_dir_base: Path) -> None:
        """Remove exports whose checkpoint is neither in the index of the run nor exempt. The newest export stays.

        Of several exports of one step the newest counts: the checkpoint was saved again.
        """
        state, kept_steps = get_export_saver_listener_state(export_dir_base), self._kept_steps()
        if not state.entries:
            return
        newest = {entry.global_step: entry.export_dir for entry in state.entries}
        kept_steps.add(state.entries[-1].global_step)
        kept, gone = list[ServingEntry](), list[ServingEntry]()
        for entry in state.entries:
            stays = entry.global_step in kept_steps and entry.export_dir == newest[entry.global_step]
            (kept if stays else gone).append(entry)
        # The list first: a folder that is left over does no harm, a listed one that is half removed would.
        overwrite_export_saver_listener_state(export_dir_base, ServingModelState(entries=kept))
        for entry in gone:
            folder = Path(entry.export_dir)
            if folder.parent != export_dir_base or not folder.name.isdecimal():
                _log.warning("%s is not an export below %s and is not removed", folder, export_dir_base)
                continue
            _log.info("removing %s: the checkpoint of step %d is gone", folder, entry.global_step)
            _remove(folder)

    def _kept_steps(self) -> set[int]:
        folder = parent_folder(self._save_path)
        index, exempt = read_checkpoint_state(folder), get_monolith_checkpoint_state(folder)
        paths = [
            *(() if index is None else index.all_model_checkpoint_paths),
            *(() if exempt is None else exempt.exempt_model_checkpoint_paths),
        ]
        names = (_CHECKPOINT.fullmatch(base_name(path)) for path in paths)
        return {int(match[1]) for match in names if match is not None} | self._exempt


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("%s cannot be removed: %s", folder, error)
