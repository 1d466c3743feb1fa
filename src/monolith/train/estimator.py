"""`Estimator`: train, evaluate, predict and export one model on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch, num_rows
from monolith.train.config import RunConfig
from monolith.train.evaluation import HeadMetrics
from monolith.train.heads import Head, column, logits_by_head
from monolith.train.hooks import Hook, TensorBoardHook
from monolith.train.trainer import DATA_ENDED, Trainer

__all__ = ["Estimator", "Mode"]

Mode = Literal["train", "eval", "predict"]
"""What a model's `input_fn` is asked for data for."""


class Estimator:
    """A model with everything it needs to run.

    `model` is an `nn.Module` from batch to logits. It may also have:

    - `heads`, what it predicts; by default one binary head "output" with the column "label"
    - `input_fn(mode)`, batches to "train", "eval" or "predict" with, for methods that are given no source
    - `configure_optimizer()`, its dense optimizer; by default Adam with learning rate 0.001
    - `extra_loss(batch, logits)`, a scalar added to the loss

    Several estimators in one process share nothing.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingCollection
        >>> from monolith.table import Sgd
        >>> class Popularity(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         item = Feature(name="item", dim=1, optimizer=Sgd(learning_rate=1.0))
        ...         self.embeddings = EmbeddingCollection([item])
        ...     def forward(self, batch):
        ...         return self.embeddings(batch)["item"]
        >>> data = [{"item": torch.tensor([1, 2]), "label": torch.tensor([0.0, 1.0])}] * 8
        >>> estimator = Estimator(Popularity())
        >>> estimator.train(data, steps=5)
        5
        >>> estimator.evaluate(data)["output/auc"]
        1.0
        >>> [list(row) for row in estimator.predict(data[:1])]
        [['output'], ['output']]
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig | None = None,
        *,
        heads: Sequence[Head] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.config = config or RunConfig()
        self.trainer = Trainer(model, optimizer or _optimizer(model), heads=heads, config=self.config)
        self._example: Batch | None = None
        self._train_source: Iterable[Batch] | None = None

    @property
    def heads(self) -> tuple[Head, ...]:
        """What the model predicts."""
        return self.trainer.heads

    @property
    def global_step(self) -> int:
        """Steps made so far, earlier runs in the same model_dir included."""
        self.trainer.restore()
        return self.trainer.step

    def train(
        self,
        source: Iterable[Batch] | None = None,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> int:
        """Train for `steps` more steps, or until the global step is `max_steps`, or the data ends; returns the global step.

        With a model_dir, the run continues from what is saved there and is saved when it ends.
        """
        self.trainer.hooks = (*self._own_hooks(), *hooks)
        if source is None:
            # The same one for every call, so that each goes on where the last stopped.
            if self._train_source is None:
                self._train_source = self.data("train")
            source = self._train_source
        step = self.trainer.fit(source, steps=steps, max_steps=max_steps)
        if self.trainer.stop_reason == DATA_ENDED:
            self._train_source = None
        return step

    def evaluate(self, source: Iterable[Batch] | None = None, *, steps: int | None = None) -> dict[str, float]:
        """The metrics of every head over the data, or its first `steps` batches: `<head>/<metric>` -> value.

        Beside the heads' own metrics there are `<head>/loss`, the mean per example, `<head>/examples`, and `global_step`.
        """
        metrics = HeadMetrics(self.heads)
        for batch, logits in self._forward(self.data("eval", source), steps):
            metrics.update(logits, batch)
        return {**metrics.compute(), "global_step": self.trainer.step}

    def predict(
        self,
        source: Iterable[Batch] | None = None,
        *,
        predict_keys: Sequence[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield predictions by head, one example at a time, or with `yield_single_examples=False` one batch.

        `predict_keys` selects heads; names of dense columns of the batch are passed through beside them.
        """
        for batch, logits in self._forward(self.data("predict", source), None):
            found = {head.name: head.predict(logits[head.name]) for head in self.heads}
            wanted = list(found) if predict_keys is None else predict_keys
            chosen = {name: found[name] if name in found else column(batch, name, "predict_keys") for name in wanted}
            if not yield_single_examples:
                yield chosen
                continue
            for row in range(num_rows(batch)):
                yield {name: tensor[row] for name, tensor in chosen.items()}

    def export_saved_model(self, folder: str | Path | None = None, *, example: Batch | None = None) -> Path:
        """Write a version that `monolith.serve.load` reads without the model's code; returns its folder.

        Args:
            folder: the export gets a numbered folder in it; None means `config.export_dir_base` in the model_dir.
            example: a batch to trace the model with; None takes the last one seen, or one of `input_fn("predict")`.
        """
        from monolith.serve.export import export_model

        self.trainer.restore()
        base = self._export_base() if folder is None else Path(folder)
        return export_model(self.model, self._example_batch(example), base, heads=self.heads, step=self.trainer.step)

    def data(self, mode: Mode, source: Iterable[Batch] | None = None) -> Iterable[Batch]:
        """`source` if there is one, otherwise the model's own batches for `mode`."""
        if source is not None:
            return source
        input_fn: Callable[[Mode], Iterable[Batch]] | None = getattr(self.model, "input_fn", None)
        if input_fn is None:
            raise InvalidArgumentError(f"source: none given, and {type(self.model).__name__} has no input_fn(mode)")
        return input_fn(mode)

    def _export_base(self) -> Path:
        base = Path(self.config.export_dir_base)
        if self.config.model_dir is None and not base.is_absolute():
            raise InvalidArgumentError("export_saved_model: there is no model_dir; say the folder to export to")
        return Path(self.config.model_dir or "") / base

    def _example_batch(self, example: Batch | None) -> Batch:
        seen = example or self._example or self.trainer.last_batch
        if seen is None and hasattr(self.model, "input_fn"):
            seen = next(iter(self.data("predict")), None)
        if seen is None:
            raise InvalidArgumentError("export_saved_model: no batch to trace the model with; give `example`")
        return seen

    def _own_hooks(self) -> tuple[Hook, ...]:
        if self.config.model_dir is None:
            return ()
        return (TensorBoardHook(self.config.model_dir, every_steps=self.config.save_summary_steps),)

    def _forward(self, source: Iterable[Batch], steps: int | None) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        if steps is not None and steps < 0:
            raise InvalidArgumentError(f"steps: expected at least 0, got {steps}")
        self.trainer.restore()
        for batch in itertools.islice(source, steps):
            self._example = batch
            self.model.eval()
            with torch.no_grad():
                logits = logits_by_head(self.model(batch), self.heads)
            yield batch, logits


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    configure: Callable[[], torch.optim.Optimizer | None] | None = getattr(model, "configure_optimizer", None)
    if configure is not None:
        return configure()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(parameters, lr=1e-3) if parameters else None
