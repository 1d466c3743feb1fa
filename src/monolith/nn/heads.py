"""`Head`: one prediction of a model, with its label, its loss, and how a logit becomes a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from monolith.config import Config, Positive
from monolith.errors import InvalidArgumentError
from monolith.features.batch import nearest_column
from monolith.nn.layers.mlp import correct_logits

__all__ = ["Head", "column", "heads_of", "logits_by_head", "sums_over_examples", "total_loss"]

MetricName = Literal["auc", "calibration", "gauc", "log_loss", "mae", "mse", "ne"]

_SUITED: dict[str, tuple[MetricName, ...]] = {
    "binary": ("auc", "calibration", "gauc", "log_loss", "ne"),
    "multiclass": (),
    "regression": ("mae", "mse"),
}


class Head(Config):
    """One task of a model.

    With logits z and labels y, the loss and the prediction of an example are, by `kind`:

    - "binary": CE(y, sigmoid(z)) and sigmoid(z), with z [rows] or [rows, 1]
    - "multiclass": CE(y, softmax(z)) and softmax(z), with z [rows, classes] and y the class
    - "regression": (z - y)^2 and z

    Where negatives were kept with probability r, column `sample_rate`, training uses z - ln r and predictions use z. They
    are then predictions for the whole stream. With `sample_bias` training uses ln(sigmoid(z)) for z first.

    Example:
        >>> head = Head(name="click", label="clicked")
        >>> head.predict(torch.tensor([0.0, 2.0])).tolist()
        [0.5, 0.8807970285415649]
        >>> head.loss(torch.tensor([0.0, 0.0]), {"clicked": torch.tensor([0.0, 1.0])}).item()
        1.3862943649291992
    """

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]*$")] = "output"
    """Names the head in the model's output, in metrics and in exports."""
    label: Annotated[str, Field(min_length=1)] = "label"
    """Column of labels, [rows] or [rows, 1]."""
    kind: Literal["binary", "multiclass", "regression"] = "binary"
    """The loss and how predictions are made of logits."""
    weight: Positive = 1.0
    """Factor of this head's loss in the sum of all heads."""
    reduction: Literal["sum", "mean"] = "sum"
    """How losses of examples are combined. With "sum" the step of an id does not depend on how many others share its batch."""
    sample_weight: str | None = None
    """Column of factors per example."""
    sample_rate: str | None = None
    """Column with the probability in (0, 1] at which negatives were kept, also on positive rows. For binary heads only."""
    sample_bias: bool = False
    """Whether every positive example was a negative one before, as in a stream that a joiner wrote with `emit: fast`. For
    binary heads only. Evaluate on examples of another kind: among these each positive is counted as a negative, too."""
    mask: str | None = None
    """Column of booleans: examples that have no label for this head are left out where it is false."""
    group: str | None = None
    """Column of ids within which `gauc` compares, usually the user."""
    metrics: tuple[MetricName, ...] | None = None
    """What `evaluate` reports besides the loss. None means all that suit the kind and the columns named here."""

    @model_validator(mode="after")
    def _fits(self) -> Head:
        if self.kind != "binary" and self.sample_rate is not None:
            raise ValueError(f"sample_rate corrects the logit of a binary head; this one is {self.kind}")
        if self.kind != "binary" and self.sample_bias:
            raise ValueError(f"sample_bias corrects the logit of a binary head; this one is {self.kind}")
        unfit = [name for name in self.metrics or () if name not in _SUITED[self.kind]]
        if unfit:
            suited = ", ".join(_SUITED[self.kind]) or "none"
            raise ValueError(f"metrics: {unfit[0]} is not for a {self.kind} head; there is {suited}")
        if self.group is None and "gauc" in (self.metrics or ()):
            raise ValueError("gauc needs `group`, the column of ids to compare within")
        return self

    @property
    def metric_names(self) -> tuple[MetricName, ...]:
        """The metrics in effect."""
        if self.metrics is not None:
            return self.metrics
        return tuple(name for name in _SUITED[self.kind] if name != "gauc" or self.group is not None)

    @property
    def label_columns(self) -> frozenset[str]:
        """Columns that exist only while training and evaluating."""
        named = (self.label, self.sample_weight, self.sample_rate, self.mask)
        return frozenset(name for name in named if name is not None)

    def predict(self, logits: Tensor) -> Tensor:
        """Return predictions: [rows], or [rows, classes] of a multiclass head."""
        if self.kind == "multiclass":
            return logits.softmax(dim=1)
        flat = logits.reshape(logits.shape[0])
        return flat.sigmoid() if self.kind == "binary" else flat

    def labels(self, batch: Mapping[str, object]) -> Tensor:
        """Return the checked labels, [rows]: float, or int64 classes."""
        labels = column(batch, self.label, f"head {self.name!r}, label").reshape(-1)
        wrong, expected = ~labels.isfinite(), "finite numbers"
        if self.kind == "binary":
            wrong, expected = wrong | (labels < 0) | (labels > 1), "numbers in [0, 1]"
        elif self.kind == "multiclass":
            wrong, expected = wrong | (labels < 0), "classes from 0"
        if bool(wrong.any()):
            raise InvalidArgumentError(
                f"head {self.name!r}: column {self.label!r} must hold {expected}, got {labels[wrong][0].item()}; "
                "filter such examples out, or name a `mask` column that is false for them"
            )
        return labels.long() if self.kind == "multiclass" else labels.float()

    def example_weights(self, batch: Mapping[str, object]) -> Tensor | None:
        """Return the factor of each example, [rows], or None for all ones."""
        if self.sample_weight is None:
            return None
        return column(batch, self.sample_weight, f"head {self.name!r}, sample_weight").reshape(-1).float()

    def importance(self, batch: Mapping[str, object]) -> Tensor | None:
        """Return how many examples of the whole stream each one stands for, [rows], or None if each stands for one.

        That is its weight, divided by the sample rate for the negative part of its label.
        """
        weights = self.example_weights(batch)
        if self.sample_rate is None:
            return weights
        labels = self.labels(batch)
        sampled = labels + (1 - labels) / self._rates(batch)
        return sampled if weights is None else weights * sampled

    def select(self, batch: Mapping[str, object], logits: Tensor) -> tuple[Mapping[str, object], Tensor]:
        """Return the rows that have a label for this head, of the columns it reads and of its logits."""
        if self.mask is None:
            return batch, logits
        keep = column(batch, self.mask, f"head {self.name!r}, mask").reshape(-1).bool()
        read = self.label_columns | ({self.group} if self.group else set())
        columns = {name: column(batch, name, f"head {self.name!r}") for name in read}
        # Groups may be a column of ids, which stays in main memory when the others are on a device.
        return {name: values[keep.to(values.device)] for name, values in columns.items()}, logits[keep]

    def loss(self, logits: Tensor, batch: Mapping[str, object]) -> Tensor:
        """Return the loss of a batch, a scalar, before `weight`."""
        batch, logits = self.select(batch, logits)
        labels = self.labels(batch)
        self._check_rows(logits, labels)
        losses = self._losses(logits, labels, batch)
        weights = self.example_weights(batch)
        if weights is not None:
            losses = losses * weights
        if self.reduction == "sum":
            return losses.sum()
        # A batch without any label for this head has a loss of 0, not NaN.
        return losses.sum() / max(len(losses), 1)

    def _losses(self, logits: Tensor, labels: Tensor, batch: Mapping[str, object]) -> Tensor:
        if self.kind == "multiclass":
            if len(labels) and int(labels.max()) >= logits.shape[1]:
                raise InvalidArgumentError(
                    f"head {self.name!r}: column {self.label!r} has class {int(labels.max())}, but the model gives "
                    f"{logits.shape[1]} logits; classes are counted from 0"
                )
            return functional.cross_entropy(logits, labels, reduction="none")
        flat = logits.reshape(logits.shape[0])
        if self.kind == "regression":
            return (flat - labels).square()
        if self.sample_rate is not None or self.sample_bias:
            rates = None if self.sample_rate is None else self._rates(batch)
            flat = correct_logits(flat, rates, sample_bias=self.sample_bias)
        return functional.binary_cross_entropy_with_logits(flat, labels, reduction="none")

    def _rates(self, batch: Mapping[str, object]) -> Tensor:
        rates = column(batch, self.sample_rate or "", f"head {self.name!r}, sample_rate").reshape(-1).float()
        if not bool(((rates > 0) & (rates <= 1)).all()):
            raise InvalidArgumentError(
                f"head {self.name!r}: column {self.sample_rate!r} must be in (0, 1], "
                f"got values from {rates.min().item()} to {rates.max().item()}"
            )
        return rates

    def _check_rows(self, logits: Tensor, labels: Tensor) -> None:
        rows = len(labels)
        fits = logits.ndim == 2 if self.kind == "multiclass" else logits.numel() == rows
        if not fits or logits.ndim == 0 or logits.shape[0] != rows:
            wanted = f"[{rows}, classes]" if self.kind == "multiclass" else f"[{rows}] or [{rows}, 1]"
            raise InvalidArgumentError(
                f"head {self.name!r}: expected logits {wanted} for {rows} labels, got {list(logits.shape)}"
            )


def column(batch: Mapping[str, object], name: str, wanted_by: str) -> Tensor:
    """Return a dense column of a batch. The error for a missing one begins with `wanted_by` and suggests a column.

    Example:
        >>> column({"label": torch.ones(2)}, "lable", "head 'ctr', label")
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: head 'ctr', label: the batch has no column 'lable'; did you mean 'label'?
    """
    if name not in batch:
        raise InvalidArgumentError(f"{wanted_by}: the batch has no column {name!r}; {nearest_column(batch, name)}")
    value = batch[name]
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(f"{wanted_by}: column {name!r} must be a tensor, got {type(value).__name__}")
    return value


def heads_of(model: nn.Module, heads: Sequence[Head] | None = None) -> tuple[Head, ...]:
    """Return `heads`, or the model's attribute `heads`, or one head with all defaults.

    Example:
        >>> [head.name for head in heads_of(nn.Linear(2, 1))]
        ['output']
    """
    own = getattr(model, "heads", None)
    # A model may use that name for its last layers.
    if heads is None and isinstance(own, list | tuple) and all(isinstance(head, Head) for head in own):
        heads = own
    found = (Head(),) if heads is None else tuple(heads)
    names = [head.name for head in found]
    if not names or len(set(names)) < len(names):
        raise InvalidArgumentError(f"heads: expected at least one head and no name twice, got {names}")
    return found


def logits_by_head(outputs: object, heads: Sequence[Head]) -> dict[str, Tensor]:
    """Return what a model's forward returned as one tensor per head.

    Example:
        >>> logits_by_head(torch.zeros(2), [Head(name="ctr")])
        {'ctr': tensor([0., 0.])}
    """
    if isinstance(outputs, torch.Tensor) and len(heads) == 1:
        return {heads[0].name: outputs}
    if not isinstance(outputs, Mapping):
        raise InvalidArgumentError(
            f"model output: expected a mapping with the logits of {', '.join(repr(h.name) for h in heads)}, "
            f"got {type(outputs).__name__}"
        )
    missing = [head.name for head in heads if head.name not in outputs]
    if missing:
        raise InvalidArgumentError(
            f"model output: no logits for head {missing[0]!r}; the model returned {', '.join(map(repr, sorted(outputs)))}"
        )
    return {head.name: outputs[head.name] for head in heads}


def total_loss(logits: Mapping[str, Tensor], batch: Mapping[str, object], heads: Sequence[Head]) -> Tensor:
    """Return the weighted sum of the losses of all heads, a scalar.

    Example:
        >>> heads = [Head(name="a", label="y"), Head(name="b", label="y", kind="regression", weight=0.5)]
        >>> batch = {"y": torch.tensor([1.0])}
        >>> total_loss({"a": torch.tensor([100.0]), "b": torch.tensor([3.0])}, batch, heads).item()
        2.0
    """
    losses = [head.weight * head.loss(logits[head.name], batch) for head in heads]
    return torch.stack(losses).sum()


def sums_over_examples(heads: Sequence[Head]) -> bool:
    """Return whether the loss of `heads` grows with the number of examples.

    Example:
        >>> sums_over_examples([Head()]), sums_over_examples([Head(reduction="mean")])
        (True, False)
    """
    return any(head.reduction == "sum" for head in heads)
