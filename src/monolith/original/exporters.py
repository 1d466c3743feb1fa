"""The original's exporters: `StandaloneExporter`, `DistributedExporter`, `create_exporter`, over `Estimator.export_saved_model`.

There is one format. An export holds the dense program and all rows, and every process that serves it loads what it needs: a model
server everything, an embedding shard the rows of its buckets, a front end the program. So an export of mode DISTRIBUTED is the
same folder for `entry` and for every `ps_<i>`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from monolith.config import Config
from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.state.index import read_checkpoint_state
from monolith.state.paths import base_name, parent_folder
from monolith.state.restore_points import step_of_name
from monolith.train.config import RunConfig
from monolith.train.estimator import Estimator

__all__ = [
    "BaseExporter",
    "DistributedExporter",
    "ExportContext",
    "ExportMode",
    "ServingParams",
    "StandaloneExporter",
    "create_exporter",
    "enter_export_mode",
    "get_current_export_ctx",
    "is_exporting",
    "is_exporting_distributed",
    "is_exporting_standalone",
]


class ExportMode(IntEnum):
    """How a model is served."""

    NONE = 0
    STANDALONE = 1
    """By one process, with all tables."""
    DISTRIBUTED = 2
    """By front ends (`entry`) and embedding shards (`ps_<i>`)."""


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """An export that is being made."""

    mode: ExportMode


_current: ContextVar[ExportContext | None] = ContextVar("export_context", default=None)


@contextmanager
def enter_export_mode(mode: ExportMode) -> Iterator[ExportContext]:
    """Let `is_exporting` and its like say in the block, and in this thread only, that a model is exported.

    Raises:
        InvalidArgumentError: an export is being made already.

    Example:
        >>> with enter_export_mode(ExportMode.STANDALONE):
        ...     is_exporting(), is_exporting_distributed()
        (True, False)
        >>> is_exporting()
        False
    """
    if _current.get() is not None:
        raise InvalidArgumentError("export: one is being made already in this thread; they cannot be nested")
    context = ExportContext(mode=mode)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def get_current_export_ctx() -> ExportContext | None:
    """Return the export that is being made in this thread. None if there is none."""
    return _current.get()


def is_exporting() -> bool:
    """Return whether this thread exports a model. A model can ask while it is traced."""
    return _mode() is not ExportMode.NONE


def is_exporting_standalone() -> bool:
    """Return whether this thread exports a model for one process."""
    return _mode() is ExportMode.STANDALONE


def is_exporting_distributed() -> bool:
    """Return whether this thread exports a model for front ends and shards."""
    return _mode() is ExportMode.DISTRIBUTED


def _mode() -> ExportMode:
    context = _current.get()
    return ExportMode.NONE if context is None else context.mode


class BaseExporter:
    """Exports checkpoints of a run.

    Args:
        model_fn: returns a new estimator for a configuration that names the checkpoint. It restores that checkpoint, so the
            process holds the rows a second time during the export. In a run over several processes give it
            `RunnerConfig(is_local=True)`.
        model_dir: that of the run.
        export_dir_base: where versions are written, inside the model_dir unless it is absolute.
        export_context_list: context managers to enter during an export.
    """

    mode = ExportMode.NONE

    def __init__(
        self,
        model_fn: Callable[[RunConfig], Estimator],
        model_dir: str,
        export_dir_base: str = "exported_models",
        *,
        export_context_list: Sequence[Callable[[], AbstractContextManager[object]]] = (),
    ) -> None:
        self._model_fn, self.model_dir = model_fn, model_dir
        self.export_dir_base = Path(model_dir) / export_dir_base
        self._contexts = tuple(export_context_list)

    def export_saved_model(
        self, serving_input_receiver_fn: Callable[[], Batch], checkpoint_path: str | None = None
    ) -> dict[str, Path]:
        """Export a checkpoint, by default the newest of the run.

        Args:
            serving_input_receiver_fn: returns a batch to trace the model with.
            checkpoint_path: such as `<model_dir>/model.ckpt-30`.

        Returns:
            The folder of every sub-model.
        """
        checkpoint = self._checkpoint(checkpoint_path)
        with ExitStack() as stack:
            stack.enter_context(enter_export_mode(self.mode))
            for context in self._contexts:
                stack.enter_context(context())
            config = RunConfig(model_dir=parent_folder(checkpoint), restore_ckpt=base_name(checkpoint))
            estimator = self._model_fn(config)
            stack.callback(estimator.close)
            folder = estimator.export_saved_model(self.export_dir_base, example=serving_input_receiver_fn())
            wanted = step_of_name(checkpoint)
            if wanted is not None and estimator.global_step != wanted:
                shutil.rmtree(folder)
                raise CheckpointMismatchError(
                    f"{checkpoint}: expected step {wanted} in the export, got {estimator.global_step}; let model_fn use the "
                    "configuration that it is given"
                )
        return dict.fromkeys(self.sub_models, folder)

    @property
    def sub_models(self) -> tuple[str, ...]:
        """The names of what is served."""
        raise NotImplementedError

    def _checkpoint(self, path: str | None) -> str:
        if path is not None:
            return path
        state = read_checkpoint_state(self.model_dir)
        if state is None:
            raise InvalidArgumentError(f"{self.model_dir}: there is no checkpoint to export; train first")
        return state.model_checkpoint_path


class StandaloneExporter(BaseExporter):
    """Exports a model for processes that each hold all rows: `monolith serve <export_dir_base>`.

    Example:
        >>> exporter = StandaloneExporter(lambda config: Estimator(model, config), "runs/clicks")
        >>> exporter.sub_models
        ('entry',)
    """

    mode = ExportMode.STANDALONE

    @property
    def sub_models(self) -> tuple[str, ...]:
        """One, which answers."""
        return ("entry",)


class DistributedExporter(BaseExporter):
    """Exports a model for front ends and `num_ps` shards: `monolith serve <export_dir_base> --shards ...`.

    Args:
        num_ps: shards. Each loads the rows of its buckets.
        dense_only: refused. Dense weights reach replicas every second if they follow the run (`monolith serve --run`).

    Example:
        >>> DistributedExporter(lambda config: Estimator(model, config), "runs/clicks", num_ps=2).sub_models
        ('entry', 'ps_0', 'ps_1')
    """

    mode = ExportMode.DISTRIBUTED

    def __init__(
        self,
        model_fn: Callable[[RunConfig], Estimator],
        model_dir: str,
        export_dir_base: str = "exported_models",
        *,
        num_ps: int = 1,
        dense_only: bool = False,
        export_context_list: Sequence[Callable[[], AbstractContextManager[object]]] = (),
    ) -> None:
        if num_ps < 1:
            raise InvalidArgumentError(f"num_ps: expected at least one shard, got {num_ps}")
        if dense_only:
            raise InvalidArgumentError(
                "dense_only: an export has its rows; for newer dense weights let replicas follow the run, `monolith serve --run`"
            )
        super().__init__(model_fn, model_dir, export_dir_base, export_context_list=export_context_list)
        self.num_ps = num_ps

    @property
    def sub_models(self) -> tuple[str, ...]:
        """The front end and the shards."""
        return ("entry", *(f"ps_{number}" for number in range(self.num_ps)))


class ServingParams(Config):
    """How a model is exported, the original's `params.serving`.

    Example:
        >>> ServingParams().export_mode.name
        'DISTRIBUTED'
    """

    export_mode: ExportMode = ExportMode.DISTRIBUTED
    export_when_saving: bool = False
    """Export every checkpoint with an `ExportSaverListener`."""
    export_dir_base: str = "exported_models"
    """Where versions are written, inside the model_dir unless it is absolute."""
    num_ps: Annotated[int, Field(ge=1)] = 1
    """Shards of mode DISTRIBUTED."""


def create_exporter(
    model_fn: Callable[[RunConfig], Estimator], model_dir: str, params: ServingParams | None = None
) -> BaseExporter:
    """Return the exporter that `params` asks for.

    Example:
        >>> params = ServingParams(export_mode=ExportMode.STANDALONE)
        >>> type(create_exporter(lambda config: Estimator(model, config), "runs/clicks", params)).__name__
        'StandaloneExporter'
    """
    params = params or ServingParams()
    if params.export_mode is ExportMode.STANDALONE:
        return StandaloneExporter(model_fn, model_dir, params.export_dir_base)
    if params.export_mode is ExportMode.DISTRIBUTED:
        return DistributedExporter(model_fn, model_dir, params.export_dir_base, num_ps=params.num_ps)
    raise InvalidArgumentError("export_mode: expected STANDALONE or DISTRIBUTED, got NONE")
