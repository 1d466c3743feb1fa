"""`BaseEmbeddingTask`: a task of the original's older interface, whose model is made of columns with fixed vocabularies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import fsspec
import torch
from torch import Tensor, nn

from monolith.data.sources.files import files_of
from monolith.data.sources.records import TFRecordSource
from monolith.data.sources.source import Column
from monolith.errors import ConfigError, CorruptFileError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection, Head, embedding_collections
from monolith.original.feature_columns import EmbeddingTaskParams, Env
from monolith.original.host_calls import BaseEmbeddingHostCall
from monolith.original.tasks import BaseTask
from monolith.table import Segment
from monolith.train.estimator import Mode
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["BaseEmbeddingTask", "read_vocab_sizes"]

_log = logging.getLogger(__name__)


def read_vocab_sizes(params: EmbeddingTaskParams) -> dict[int, int]:
    """Return the vocabulary size of each slot: what the file says, with the settings of `params` applied.

    Raises:
        CorruptFileError: a line of the file has not two fields, or the second is no number.
    """
    path = _vocab_file(params)
    sizes: dict[int, int] = {}
    with fsspec.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            fields = line.strip().split("\t")
            if len(fields) != 2:
                raise CorruptFileError(
                    f"{path}:{number}: expected slot and size with a tab between them, got {line!r:.80}"
                )
            if not fields[0].isdecimal():
                continue
            if not fields[1].isdecimal():
                raise CorruptFileError(f"{path}:{number}: expected a vocabulary size, got {fields[1]!r:.80}")
            slot = int(fields[0])
            size = params.custom_vocab_size_mapping.get(slot, int(fields[1]))
            sizes[slot] = (params.vocab_size_per_slot or size) + params.vocab_size_offset
    _log.info("vocabulary sizes by slot: %s", sizes)
    return sizes


def _vocab_file(params: EmbeddingTaskParams) -> str:
    """Return the file of the last day, or that of `vocab_file_path`."""
    prefix, day = params.train.vocab_file_folder_prefix, params.train.end_date
    if prefix is not None and day is not None:
        found = files_of(f"{prefix}{day}/part*.csv")
        if len(found) == 1:
            return found[0]
        _log.warning(
            "%s%s has %d files part*.csv, expected one; vocab_file_path is used instead", prefix, day, len(found)
        )
    if params.vocab_file_path is None:
        raise ConfigError(
            "vocab_file_path: there is no file of vocabulary sizes; give it, or train.vocab_file_folder_prefix and "
            "train.end_date"
        )
    return params.vocab_file_path


class BaseEmbeddingTask(BaseTask):
    """A task whose model is `logits_fn`, over `FeatureColumnV1` and `FeatureColumn3D` of `env`.

    Dense layers are made in `create_layers`. They are part of the model.

    Example:
        >>> import tempfile
        >>> from monolith.original import FeatureColumnV1, FeatureSlot
        >>> class Popularity(BaseEmbeddingTask):
        ...     def logits_fn(self):
        ...         slot = FeatureSlot(self.env, 1, has_bias=True)
        ...         return FeatureColumnV1(slot, "item").get_bias()
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write("1\\t1000\\n")
        ...     file.flush()
        ...     task = Popularity(Popularity.params().model_copy(update={"vocab_file_path": file.name}))
        >>> model = task.create_model_fn()()
        >>> model({"item_0": torch.tensor([3, 4])}).tolist()
        [[0.0], [0.0]]
    """

    p: EmbeddingTaskParams

    @classmethod
    def params(cls) -> EmbeddingTaskParams:
        """Return the parameters by default."""
        return EmbeddingTaskParams(task=cls)

    def __init__(self, params: EmbeddingTaskParams) -> None:
        super().__init__(params)
        self.env = Env(read_vocab_sizes(params), params)
        self.layers = self.create_layers()
        """The dense part of the model."""

    def create_layers(self) -> nn.Module:
        """Return the dense layers that `logits_fn` uses, by default none."""
        return nn.Module()

    def logits_fn(self) -> Tensor | dict[str, Tensor]:
        """Return the logits, of the only head or by head."""
        raise NotImplementedError(f"{type(self).__name__}.logits_fn")

    def heads(self) -> Sequence[Head]:
        """Return what the model predicts, by default one binary head with the label `train.label_key`."""
        return (Head(label=self.p.train.label_key),)

    def columns(self) -> Sequence[Column]:
        """Return the columns of the files: by default every column of ids, the label, and `uid`."""
        labels = dict.fromkeys(name for head in self.heads() for name in sorted(head.label_columns))
        floats = [Column(name=name, dtype="float32", shape=()) for name in labels]
        uid = Column(name="uid", shape=(), default=0)
        return [*(Column(name=name) for name in self.env.columns()), *floats, uid]

    def init_slot_to_env(self) -> None:
        """Find out which slices of which columns `logits_fn` looks up, by calling it for one row of zeros."""
        if self.env.is_finalized:
            return
        was_training = self.layers.training
        self.layers.eval()
        with torch.no_grad():
            self.logits_fn()
        self.layers.train(was_training)
        self.env.finalize()

    def create_feature_and_table_config_dict(self) -> tuple[dict[str, Feature], dict[str, tuple[Segment, ...]]]:
        """Return the features by name, and the segments of the tables by name."""
        self.init_slot_to_env()
        features = {feature.name: feature for feature in self.env.features()}
        return features, {f.table: f.row for f in features.values() if f.table is not None and f.shared_with is None}

    def create_input_fn(self, mode: Mode) -> Callable[[int], Iterable[Batch]]:
        """Return a function from the rows of a batch to the batches of the files for `mode`."""
        self.init_slot_to_env()
        files = self.p.eval.file_pattern if mode == "eval" else self._training_files()
        if files is None:
            raise ConfigError("eval.file_pattern: there are no files to evaluate on; give some")
        paths = [files] if isinstance(files, str) else list(files)
        return lambda batch_size: TFRecordSource(paths, self.columns(), batch_size=batch_size)

    def _training_files(self) -> str | Sequence[str]:
        train = self.p.train
        if train.file_pattern is not None:
            return train.file_pattern
        if train.file_folder is None:
            raise ConfigError("train.file_folder: there are no training files; give it, or train.file_pattern")
        pattern = f"{train.file_folder.rstrip('/')}/{train.date_and_file_name_format}"
        first, last = train.start_date or "00000000", train.end_date or "99999999"
        found, day = files_of(pattern), -len(train.date_and_file_name_format.split("/"))
        chosen = [path for path in found if first <= path.split("/")[day] <= last]
        if not chosen:
            raise ConfigError(
                f"train.file_folder: of {len(found)} files {pattern} none is of a day from {first} to {last}"
            )
        return chosen

    def create_model_fn(self) -> Callable[[], nn.Module]:
        """Return a function that makes the model."""
        self.init_slot_to_env()
        return lambda: _TaskModel(self)

    def hooks(self, *, model_dir: str | None, every_n_steps: int) -> list[Hook]:
        """Return the host calls, and what scales the gradients of embeddings."""
        hooks: list[Hook] = []
        if self.p.gradient_multiplier != 1:
            hooks.append(_ScaleGradients(self.p.gradient_multiplier))
        if every_n_steps:
            self.host_call = BaseEmbeddingHostCall(
                model_dir,
                enable_host_call_scalar_metrics=self.p.enable_host_call_scalar_metrics,
                enable_host_call_norm_metrics=self.p.enable_host_call_norm_metrics,
                enable_caching_with_tpu_var_mode=self.p.enable_caching_with_tpu_var_mode,
                top_k_sampling_num_per_core=self.p.top_k_sampling_num_per_core,
                every_n_steps=every_n_steps,
            )
            hooks.append(self.host_call)
        return hooks


class _TaskModel(nn.Module):
    """The model of a task: looks up what its logits read, and computes them."""

    def __init__(self, task: BaseEmbeddingTask) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(task.env.features())
        self.layers = task.layers
        self.heads = tuple(task.heads())
        self.host_columns = tuple(task.env.columns())
        self._task = task

    def forward(self, batch: Mapping[str, object]) -> Tensor | dict[str, Tensor]:
        env = self._task.env
        env.set_tpu_features({**batch, **self.embeddings(env.ids(batch))})  # type: ignore[dict-item]
        try:
            return self._task.logits_fn()
        finally:
            env.set_tpu_features(None)


class _ScaleGradients(Hook):
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def before_update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor | None) -> None:
        for collection in embedding_collections(trainer.model):
            collection.scale_gradients(self._factor)
