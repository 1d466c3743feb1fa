"""Tasks of the original's older interface: a class with parameters, from which a runner makes data and a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import nn

from monolith.config import Config, Positive
from monolith.errors import ConfigError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.original.host_calls import BaseHostCall
from monolith.table import Segment
from monolith.train.estimator import Mode
from monolith.train.hooks.hook import Hook

__all__ = ["BaseTask", "EvalParams", "InputParams", "TaskParams", "TrainParams", "get_params"]

_Count = Annotated[int, Field(ge=1)]
Date = Annotated[str, Field(pattern=r"^\d{8}$")]
"""A day as in 20220901."""


class InputParams(Config):
    """How much data there is."""

    config_group: ClassVar[str] = "run"

    eval_examples: _Count | None = None
    """Examples to evaluate each checkpoint on. None: all that the data has."""
    train_examples: _Count | None = None
    """Examples of the training data, for models that ask."""


class EvalParams(Config):
    """How a task is evaluated."""

    config_group: ClassVar[str] = "run"

    per_replica_batch_size: _Count | None = None
    """Rows of a batch of each process. None: as in training."""
    steps_per_eval: _Count = 10000
    """Training steps between two evaluations, for models that ask. Every checkpoint is evaluated."""
    steps: _Count | None = None
    """Batches to evaluate on. None: what `eval_examples` are divided into."""
    file_pattern: str | tuple[str, ...] | None = None
    """Files to evaluate on."""


class TrainParams(Config):
    """How a task is trained."""

    config_group: ClassVar[str] = "run"

    steps: _Count | None = None
    """Steps to make in this run."""
    max_steps: _Count | None = None
    """Global step to stop at."""
    per_replica_batch_size: _Count | None = None
    """Rows of a batch of each process."""
    file_pattern: str | tuple[str, ...] | None = None
    """Training files. They take precedence over a folder with dates."""
    repeat: bool = False
    """Begin again when the data ends."""
    label_key: str = "label"
    """Column of labels."""
    save_checkpoints_steps: _Count | None = None
    """Steps between two checkpoints. None: as the runner's flag says."""
    save_checkpoints_secs: Positive | None = None
    """Seconds between two checkpoints, if no number of steps is given."""
    dense_only_save_checkpoints_steps: _Count | None = None
    """Steps between two checkpoints without tables."""
    dense_only_save_checkpoints_secs: Positive | None = None
    """Seconds between two checkpoints without tables."""
    file_folder: str | None = None
    """Folder with one folder for each day, as 20220901."""
    date_and_file_name_format: str = "*/*/part*"
    """What follows `file_folder` in the names of training files. Its first part is the day."""
    start_date: Date | None = None
    """First day to train on. None: from the first there is."""
    end_date: Date | None = None
    """Last day to train on. None: until the last there is."""
    vocab_file_folder_prefix: str | None = None
    """What precedes `end_date` in the name of a folder with the file of vocabulary sizes, `part*.csv`."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.steps is not None and self.max_steps is not None:
            raise ValueError("give steps or max_steps, not both")
        return self


class TaskParams(Config):
    """The parameters of a task. Change some with `model_copy(update=...)`.

    Example:
        >>> params = BaseTask.params()
        >>> params.train.label_key, params.accelerator
        ('label', None)
    """

    config_group: ClassVar[str] = "run"

    task: type[Any]
    """The class that `instantiate` makes an object of."""
    accelerator: Literal["tpu", "horovod"] | None = None
    """Set by the runner."""
    input: InputParams = InputParams()
    """How much data there is."""
    eval: EvalParams = EvalParams()
    """How the task is evaluated."""
    train: TrainParams = TrainParams()
    """How the task is trained."""

    def instantiate(self) -> BaseTask:
        """Return a task with these parameters."""
        made: BaseTask = self.task(self)
        return made


class BaseTask:
    """One training task: the data and the model that belong together. Subclass it and say both.

    Example:
        >>> import torch
        >>> class Constant(BaseTask):
        ...     def create_input_fn(self, mode):
        ...         return lambda batch_size: [{"x": torch.ones(batch_size, 1), "label": torch.ones(batch_size)}]
        ...     def create_model_fn(self):
        ...         return lambda: Model()
        >>> Constant.params().instantiate().create_input_fn("train")(3)[0]["label"].tolist()
        [1.0, 1.0, 1.0]
    """

    @classmethod
    def params(cls) -> TaskParams:
        """Return the parameters by default."""
        return TaskParams(task=cls)

    def __init__(self, params: TaskParams) -> None:
        self.p = params
        self.host_call: BaseHostCall | None = None
        """What a model may call `record_summary_tensor` on, while it is trained with host calls."""

    def create_input_fn(self, mode: Mode) -> Callable[[int], Iterable[Batch]]:
        """Return a function from the rows of a batch to the batches for `mode`."""
        raise NotImplementedError(f"{type(self).__name__}.create_input_fn")

    def create_model_fn(self) -> Callable[[], nn.Module]:
        """Return a function that makes the model. See `Estimator` for what a model may have."""
        raise NotImplementedError(f"{type(self).__name__}.create_model_fn")

    def create_feature_and_table_config_dict(self) -> tuple[dict[str, Feature], dict[str, tuple[Segment, ...]]]:
        """Return the features and tables that the task declares, by name. Here none: the model has its own."""
        return {}, {}

    def hooks(self, *, model_dir: str | None, every_n_steps: int) -> list[Hook]:
        """Return hooks for training: the host calls, every `every_n_steps` steps, or none with 0."""
        if not every_n_steps:
            return []
        self.host_call = BaseHostCall(model_dir, every_n_steps=every_n_steps)
        return [self.host_call]


def get_params(name: str) -> TaskParams:
    """Return the parameters of the task `module.Class`, as the original's registry does.

    Example:
        >>> get_params("monolith.original.tasks.BaseTask").task is BaseTask
        True
    """
    module, _, cls = name.rpartition(".")
    try:
        task = getattr(import_module(module), cls)
    except (AttributeError, ImportError, ValueError) as error:
        raise ConfigError(f"--task: {name!r}: {error}; expected module.Class, importable from here") from None
    if not (isinstance(task, type) and issubclass(task, BaseTask)):
        raise ConfigError(f"--task: {name!r} is {task!r}, expected a subclass of BaseTask")
    return task.params()
