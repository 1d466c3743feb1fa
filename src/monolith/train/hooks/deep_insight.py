"""Predictions of single examples while a model trains, for systems that study them: the original's deep-insight metrics."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.features.batch import Batch
from monolith.features.ids import hash_ids
from monolith.features.ragged import Ragged
from monolith.nn.heads import Head, column
from monolith.train.hooks.hook import Hook
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.train.config import RunConfig
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["DeepInsightHook"]


class DeepInsightHook(Hook):
    """Writes sampled examples of each training step as JSON, one object per line.

    A record has `model_name`, `step`, `uid`, `req_time`, `train_time` (seconds since 1970), and by head `labels`, `predictions`
    and `sample_rates`. Predictions are those made before the step: the model had not seen the example. A label that the head's
    mask leaves out, and a number that is not finite, is null.

    Whether an example is sampled depends on its uid and req_time alone, so every run samples the same ones.

    Args:
        target: a text stream, or the path of a file to append to.
        model_name: identifies the model in the records.
        sample_ratio: part of the examples that is written, from 0 to 1.
        heads: names of the heads that are written, all by default.
        uid: column of user ids.
        req_time: column of request times.
        extra_fields: further columns to write, under `extra`.
        clock: seconds since 1970.

    Example:
        >>> import io
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> class Same(nn.Module):
        ...     def forward(self, batch):
        ...         return batch["x"]
        >>> lines = io.StringIO()
        >>> hook = DeepInsightHook(lines, model_name="ctr", sample_ratio=1.0, clock=lambda: 7.0)
        >>> batch = {"x": torch.zeros(1), "label": torch.ones(1), "uid": torch.tensor([5]), "req_time": torch.tensor([3])}
        >>> _ = Trainer(Same(), hooks=[hook]).fit([batch])
        >>> json.loads(lines.getvalue())["predictions"]
        {'output': 0.5}
    """

    def __init__(
        self,
        target: IO[str] | str | os.PathLike[str],
        *,
        model_name: str,
        sample_ratio: float = 0.01,
        heads: Sequence[str] = (),
        uid: str = "uid",
        req_time: str = "req_time",
        extra_fields: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 <= sample_ratio <= 1:
            raise InvalidArgumentError(f"sample_ratio: expected 0 to 1, got {sample_ratio}")
        self._target, self._model_name, self._sample_ratio = target, model_name, sample_ratio
        self._names, self._uid, self._req_time = tuple(heads), uid, req_time
        self._extra_fields, self._clock = tuple(extra_fields), clock
        self._heads: tuple[Head, ...] = ()
        self._stream: IO[str] | None = None

    @classmethod
    def of_run(cls, config: RunConfig, model_name: str) -> list[Hook]:
        """The hook that `config` asks for, if it does. Each process writes a file of its own."""
        if config.deep_insight_dir is None or not config.deep_insight_sample_ratio:
            return []
        if is_remote(config.deep_insight_dir):
            raise ConfigError(
                f"RunConfig.deep_insight_dir: expected a local folder, to which lines can be appended, got "
                f"{config.deep_insight_dir!r}"
            )
        name = config.model_name or model_name
        path = Path(config.deep_insight_dir) / f"{name}-{socket.gethostname()}-{os.getpid()}.jsonl"
        targets = [target.strip() for target in config.deep_insight_target.split(",") if target.strip()]
        return [cls(path, model_name=name, sample_ratio=config.deep_insight_sample_ratio, heads=targets)]

    def begin(self, trainer: Trainer) -> None:
        """Open the file, so that a run that cannot write it fails before it starts."""
        known = {head.name: head for head in trainer.heads}
        if unknown := [name for name in self._names if name not in known]:
            raise InvalidArgumentError(f"deep insight: there is no head {unknown[0]!r}; there are {', '.join(known)}")
        self._heads = tuple(known[name] for name in self._names or known)
        if not isinstance(self._target, str | os.PathLike):
            self._stream = self._target
            return
        try:
            Path(self._target).parent.mkdir(parents=True, exist_ok=True)
            self._stream = Path(self._target).open("a", encoding="utf-8")  # noqa: SIM115 - closed by `end`
        except OSError as error:
            raise StorageError(f"{os.fspath(self._target)}: deep insight cannot be written: {error}") from error

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Write what is sampled of the batch."""
        assert self._stream is not None
        if not result.batch:
            return  # a rank whose data has ended
        uids, times = self._column(result.batch, self._uid), self._column(result.batch, self._req_time)
        rows = self._sampled(uids, times)
        if not len(rows):
            return
        common = {"model_name": self._model_name, "step": result.step, "train_time": self._clock()}
        columns: dict[str, list[Any]] = {"uid": _values(uids, rows), "req_time": _values(times, rows)}
        columns |= self._by_head(result, rows)
        if self._extra_fields:
            extra = {name: _rows_of(result.batch, name, rows) for name in self._extra_fields}
            columns["extra"] = _by_row(extra, len(rows))
        for record in _by_row(columns, len(rows)):
            self._stream.write(json.dumps({**common, **record}, allow_nan=False) + "\n")

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Flush, and close the file. A stream that was given stays open."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.flush()
            if stream is not self._target:
                stream.close()

    def _by_head(self, result: StepResult, rows: Tensor) -> dict[str, list[Any]]:
        batch, count = result.batch, len(rows)
        labels, predictions, rates = {}, {}, {}
        for head in self._heads:
            label = _values(column(batch, head.label, f"head {head.name!r}, label"), rows)
            kept = [True] * count if head.mask is None else _values(column(batch, head.mask, "mask"), rows)
            labels[head.name] = [value if keep else None for value, keep in zip(label, kept, strict=True)]
            predictions[head.name] = _values(head.predict(result.logits[head.name]), rows)
            rates[head.name] = [1.0] * count
            if head.sample_rate is not None:
                rates[head.name] = _values(column(batch, head.sample_rate, "sample_rate"), rows)
        return {
            "labels": _by_row(labels, count),
            "predictions": _by_row(predictions, count),
            "sample_rates": _by_row(rates, count),
        }

    def _column(self, batch: Batch, name: str) -> Tensor:
        found = batch.get(name)
        # A column of ids with one per row.
        values = found.values if isinstance(found, Ragged) else column(batch, name, "deep insight")
        return values.reshape(-1).cpu()

    def _sampled(self, uids: Tensor, times: Tensor) -> Tensor:
        if len(uids) != len(times):
            raise InvalidArgumentError(
                f"deep insight: expected one {self._uid!r} and one {self._req_time!r} per row, got {len(uids)} and {len(times)}"
            )
        # The hash is one to one, so the sum of two hashes mixes both; its lower 32 bits decide.
        mixed = hash_ids(hash_ids(uids.long()) + times.long()) & 0xFFFFFFFF
        return torch.nonzero(mixed < round(self._sample_ratio * 2**32)).reshape(-1)


def _by_row(columns: Mapping[str, Sequence[Any]], rows: int) -> list[dict[str, Any]]:
    return [{name: values[row] for name, values in columns.items()} for row in range(rows)]


def _rows_of(batch: Batch, name: str, rows: Tensor) -> list[Any]:
    found = batch.get(name)
    if isinstance(found, Ragged):
        lists = found.to_lists()
        return [lists[row] for row in rows.tolist()]
    return _values(column(batch, name, "deep insight"), rows)


def _values(tensor: Tensor, rows: Tensor) -> list[Any]:
    """Return `rows` as numbers, or as lists of numbers. None for numbers that JSON cannot express."""
    values = tensor.detach().cpu()[rows]
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return [_finite(value) for value in values.tolist()]


def _finite(value: Any) -> Any:  # noqa: ANN401 - a number, or lists of them
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
