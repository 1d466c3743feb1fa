"""`TPURunner`: trains or evaluates a task on the accelerator of this machine, with the original's flags.

`python -m monolith.original.tpu_runner --task=module.Class --model_dir=...` runs it. The device is whatever torch finds, so the
same runner serves TPUs, GPUs and the processor. Tests run it on the processor and on a fake device. It is untested on TPUs and
GPUs.
"""

from __future__ import annotations

import argparse
import logging
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from monolith.config import Config
from monolith.errors import ConfigError, MonolithError
from monolith.features import Feature
from monolith.original.feature_columns import EmbeddingTaskParams
from monolith.original.tasks import BaseTask, TaskParams, get_params
from monolith.table import Segment
from monolith.train import Estimator, RunConfig, RunnerConfig
from monolith.train.evaluation import evaluate_checkpoints
from monolith.train.hooks.hook import Hook

__all__ = ["TPUFlags", "TPURunner", "run_with_flags"]

_log = logging.getLogger(__name__)

CPU_TEST_BATCH_SIZE = 128
"""Rows of a batch with `cpu_test`."""
EVAL_TIMEOUT_SECS = 5 * 60 * 60.0
"""How long an evaluation waits for the next checkpoint."""

TaskFeatures = Mapping[str, Feature] | None
TaskTables = Mapping[str, tuple[Segment, ...]] | None


class TPUFlags(Config):
    """The flags of the runner.

    Example:
        >>> TPUFlags().iterations_per_loop, TPUFlags().host_call_every_n_steps
        (10000, 500)
    """

    config_group: ClassVar[str] = "run"

    task: str | None = None
    """`module.Class` of the task to run."""
    mode: Literal["train", "eval", "train_and_eval"] = "train"
    """What to do. train_and_eval is refused, as in the original: run train and eval as two processes."""
    model_dir: str | None = None
    """Folder of checkpoints and summaries."""
    device: str = "auto"
    """Device of the dense part, see `RunConfig.device`. Not a flag of the original, which knows TPUs only."""
    tpu: str | None = None
    """A remote TPU cannot be used: torch runs on the machine that has it. Refused if it is given."""
    gcp_project: str | None = None
    """Of a remote TPU. Ignored with a log line."""
    tpu_zone: str | None = None
    """Of a remote TPU. Ignored with a log line."""
    tf_version: str = "nightly"
    """Version of TensorFlow on a remote TPU. Ignored."""
    enable_tpu_version_config: bool = True
    """Set the version of a remote TPU. Ignored."""
    save_checkpoints_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between two checkpoints, unless the task says so. None: only at the end."""
    iterations_per_loop: Annotated[int, Field(ge=1)] = 10000
    """Steps between two moments at which the host saves, logs and writes summaries. `save_checkpoints_steps` is rounded up to a
    multiple of it."""
    pipeline_execution: bool = False
    """Update embeddings while the next step computes, whose lookups then miss the last update."""
    host_call_every_n_steps: Annotated[int, Field(ge=0)] = 500
    """Steps between two host calls. 0: none."""
    enable_stopping_signals: bool = False
    """Kept for its name: the end of the data always ends a run, and its last step is always saved."""
    cpu_test: bool = False
    """Train on the processor with batches of 128 rows and save nothing. For mode train only."""
    partition_strategy: Literal["mod", "div"] = "mod"
    """How a TPU divides its tables. Without effect: rows are divided by their hash, or not at all."""
    overwrite_end_date: str = ""
    """Last day of the training data, instead of that of the task."""


class TPURunner:
    """Runs one task as the flags say.

    Example:
        >>> import torch
        >>> class Constant(BaseTask):
        ...     def create_input_fn(self, mode):
        ...         batch = {"x": torch.ones(2, 1), "label": torch.ones(2)}
        ...         return lambda batch_size: [batch] * 3
        ...     def create_model_fn(self):
        ...         return lambda: Line()
        >>> class Line(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(1, 1)
        ...     def forward(self, batch):
        ...         return self.layer(batch["x"])
        >>> TPURunner(Constant.params(), TPUFlags(cpu_test=True)).run()
        3
    """

    def __init__(self, task_param: TaskParams, flags: TPUFlags | None = None) -> None:
        self.flags = flags or TPUFlags()
        train = task_param.train
        self.save_checkpoints_steps = train.save_checkpoints_steps or self.flags.save_checkpoints_steps
        whose = "task" if train.save_checkpoints_steps else "flag"
        _log.info("save_checkpoints_steps of the %s: %s", whose, self.save_checkpoints_steps)
        if self.flags.overwrite_end_date:
            _log.info("train.end_date: %s of the flag instead of %s", self.flags.overwrite_end_date, train.end_date)
            train = type(train)(**{**dict(train), "end_date": self.flags.overwrite_end_date})
        self.task_param = task_param.model_copy(update={"accelerator": "tpu", "train": train})
        """The parameters of the task, with what the flags override."""
        self.task: BaseTask | None = None

    def run(self) -> int:
        """Train, or evaluate every checkpoint. Returns the global step of the end, or of the last checkpoint evaluated."""
        flags = self.flags
        self._require_local()
        if flags.mode == "train_and_eval":
            raise TypeError("train_and_eval is not supported; run mode train and mode eval as two processes")
        if flags.cpu_test and flags.mode != "train":
            raise ConfigError(f"TPUFlags.cpu_test: expected mode train, got {flags.mode}")
        return self._evaluate() if flags.mode == "eval" else self._train()

    def _train(self) -> int:
        task, features, tables = self._new_task()
        batches = task.create_input_fn("train")
        create = self.create_tpu_estimator_on_cpu if self.flags.cpu_test else self.create_tpu_estimator
        estimator, replicas = create(task.create_model_fn(), features, tables)
        train, size = self.task_param.train, estimator.config.static_rows
        assert size is not None
        _log.info("step %d, %d replicas, global batch of %d rows", estimator.global_step, replicas, size * replicas)
        hooks: list[Hook] = task.hooks(
            model_dir=estimator.config.model_dir, every_n_steps=self.flags.host_call_every_n_steps
        )
        try:
            return estimator.train(batches(size), steps=train.steps, max_steps=train.max_steps, hooks=hooks)
        finally:
            estimator.close()

    def _evaluate(self) -> int:
        if self.flags.model_dir is None:
            raise ConfigError("TPUFlags.model_dir: there is none, whose checkpoints could be evaluated")
        size = self._batch_size("eval")
        task, _, _ = self._new_task()
        batches = task.create_input_fn("eval")
        examples = self.task_param.input.eval_examples
        steps = self.task_param.eval.steps or (None if examples is None else max(examples // size, 1))
        _log.info("evaluating on %s examples in batches of %d rows: %s steps", examples, size, steps)

        def made(config: RunConfig) -> Estimator:
            # A task of its own: tasks own their layers, which hold the weights of one checkpoint.
            own, features, tables = self._new_task()
            return self.create_tpu_estimator(own.create_model_fn(), features, tables, config)[0]

        step = 0
        for metrics in evaluate_checkpoints(
            made,
            self._run_config(size),
            lambda: batches(size),
            steps=steps,
            max_steps=self.task_param.train.max_steps,
            timeout_secs=EVAL_TIMEOUT_SECS,
        ):
            step = int(metrics["global_step"])
            _log.info("step %d: %s", step, metrics)
        return step

    def _new_task(self) -> tuple[BaseTask, TaskFeatures, TaskTables]:
        self.task = self.task_param.instantiate()
        return (self.task, *self.task.create_feature_and_table_config_dict())

    def create_tpu_estimator(
        self,
        model_fn: Callable[[], nn.Module],
        feature_config: TaskFeatures,
        table_config: TaskTables,
        config: RunConfig | None = None,
    ) -> tuple[Estimator, int]:
        """Return an estimator on the accelerator, and the number of replicas: the workers that the environment says.

        `feature_config` and `table_config` are logged. The model has the same.
        """
        if feature_config is not None and table_config is not None:
            _log.info("%d features in %d tables", len(feature_config), len(table_config))
        estimator = Estimator(model_fn(), config or self._run_config(self._batch_size("train")))
        return estimator, max(estimator.runner.num_workers, 1)

    def create_tpu_estimator_on_cpu(
        self, model_fn: Callable[[], nn.Module], feature_config: TaskFeatures, table_config: TaskTables
    ) -> tuple[Estimator, int]:
        """Return an estimator on the processor that saves nothing, and 1 replica."""
        config = self._run_config(CPU_TEST_BATCH_SIZE).model_copy(update={"device": "cpu", "model_dir": None})
        return Estimator(model_fn(), config, runner=RunnerConfig(is_local=True)), 1

    def _batch_size(self, mode: Literal["train", "eval"]) -> int:
        train, own = self.task_param.train.per_replica_batch_size, self.task_param.eval.per_replica_batch_size
        size = train if mode == "train" else own or train
        if size is None:
            raise ConfigError(
                f"{mode}.per_replica_batch_size: the task does not say how many rows a batch has; give it"
            )
        return size

    def _run_config(self, batch_size: int) -> RunConfig:
        flags, train = self.flags, self.task_param.train
        loop = flags.iterations_per_loop
        saves: dict[str, Any] = {"save_checkpoints_secs": train.save_checkpoints_secs or 0.0}
        if self.save_checkpoints_steps is not None:
            saves = {"save_checkpoints_steps": math.ceil(self.save_checkpoints_steps / loop) * loop}
        params = self.task_param
        insight = isinstance(params, EmbeddingTaskParams) and params.enable_deepinsight and flags.model_dir
        return RunConfig(
            model_dir=flags.model_dir,
            device=flags.device,
            static_rows=batch_size,
            clip_norm=None,
            epochs=None if train.repeat else 1,
            enable_embedding_postpush=flags.pipeline_execution,
            log_step_count_steps=loop,
            save_summary_steps=loop,
            dense_only_save_checkpoints_steps=train.dense_only_save_checkpoints_steps,
            dense_only_save_checkpoints_secs=train.dense_only_save_checkpoints_secs,
            deep_insight_dir=f"{flags.model_dir}/deep_insight" if insight else None,
            **saves,
        )

    def _require_local(self) -> None:
        flags = self.flags
        if flags.tpu:
            raise ConfigError(
                f"TPUFlags.tpu: {flags.tpu!r} is a remote TPU, which torch cannot use; run this on the machine that has the "
                "TPU, with --device=tpu"
            )
        for name in ("gcp_project", "tpu_zone", "tf_version", "enable_tpu_version_config", "partition_strategy"):
            if getattr(flags, name) != TPUFlags.model_fields[name].default:
                _log.warning("--%s=%s is ignored: it is about a remote TPU and its tables", name, getattr(flags, name))


def _flag_kinds() -> dict[str, type]:
    """Return the type of every flag."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(TPUFlags).items():
        if name not in TPUFlags.model_fields:
            continue
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = next((kind for kind in (bool, int) if kind in parts), str)
    return kinds


def _bool(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return known[text.lower()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tpu_runner", description="Train or evaluate a task on an accelerator.")
    for name, kind in _flag_kinds().items():
        field = TPUFlags.model_fields[name]
        shown = f"{field.description or ''} Default: {field.default}".replace("%", "%%").strip()
        if kind is bool:
            parser.add_argument(f"--{name}", nargs="?", const=True, type=_bool, default=argparse.SUPPRESS, help=shown)
            parser.add_argument(
                f"--no{name}", dest=name, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        else:
            parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=shown)
    return parser


def run_with_flags(arguments: Sequence[str] | None = None) -> int:
    """Run the task that the flags name. Returns 0."""
    flags = TPUFlags(**vars(_parser().parse_args(arguments)))
    if flags.task is None:
        raise ConfigError("--task: expected module.Class of the task to run")
    for name, value in flags:
        _log.info("%s: %s", name, value)
    params = get_params(flags.task)
    _log.info("task_param: %s", params)
    TPURunner(params, flags).run()
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        raise SystemExit(run_with_flags())
    except MonolithError as error:
        raise SystemExit(f"tpu_runner: {error}") from None
