"""Host calls: every some steps, small results of a step are brought from the device to the host and summarised there.

Training does not wait for them: what belongs to one step is joined into one tensor per dtype on the device, and a thread copies,
takes apart and summarises it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.metrics.auc import AUC
from monolith.nn.heads import column
from monolith.process_bound import WorkerThreads
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.inspection import write_evaluation

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["BaseEmbeddingHostCall", "BaseHostCall"]

_log = logging.getLogger(__name__)

LABELS, PREDICTIONS = "labels_for_auc_calculation", "y_pred_for_auc_calculation"
REQ_TIME, SAMPLE_RATE, UID, UID_BUCKET = "req_time", "sample_rate", "uid", "uid_bucket"
RATIO_N = 1000
"""Buckets that users are divided into."""
UID_SAMPLE_RATE = 0.01
"""Share of the buckets whose users count in the AUC."""

_IN_FLIGHT = 2

Summary = Callable[[int, Mapping[str, float]], None]


class BaseHostCall(Hook):
    """Collects tensors of a step by name, and every `every_n_steps` steps summarises them on the host.

    The name of a tensor says how: its mean if it contains `_avg`, its largest element for `_max`, its sum for `_sum`, otherwise
    its first element. Summaries are points of TensorBoard in the folder `host_call` of `output_dir`.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> class Halves(nn.Module):
        ...     def forward(self, batch):
        ...         calls.record_summary_tensor("x_max", batch["x"])
        ...         return batch["x"] / 2
        >>> calls = BaseHostCall(None, every_n_steps=2, write=lambda step, values: print(step, dict(values)))
        >>> data = [{"x": torch.tensor([4.0, n]), "label": torch.ones(2)} for n in (5.0, 6.0, 7.0)]
        >>> Trainer(Halves(), hooks=[calls]).fit(data)
        2 {'x_max': 6.0}
        3
    """

    def __init__(
        self,
        output_dir: str | None,
        *,
        enable_host_call: bool = True,
        every_n_steps: int = 500,
        write: Summary | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise InvalidArgumentError(f"every_n_steps: expected at least 1, got {every_n_steps}")
        self._folder = None if output_dir is None else f"{output_dir}/host_call"
        self._write = write or self._write_summaries
        self._enabled, self.every_n_steps = enable_host_call, every_n_steps
        self.is_due = False
        """Whether the results of the present step are wanted. Nothing is recorded in others."""
        self._tensors: dict[str, Tensor] = {}
        self._threads: WorkerThreads | None = None
        self._running: deque[Future[None]] = deque()

    def record_summary_tensor(self, name: str, tensor: Tensor) -> None:
        """Keep `tensor`, [] or [n], of the present step, if it is due."""
        if not (self._enabled and self.is_due):
            return
        if tensor.ndim > 1:
            raise InvalidArgumentError(f"{name}: expected a tensor of shape [] or [n], got {list(tensor.shape)}")
        if name in self._tensors:
            raise InvalidArgumentError(f"{name}: recorded before in this step; give every tensor a name of its own")
        self._tensors[name] = tensor.detach().reshape(-1)

    def compress_tensors(self) -> tuple[list[list[tuple[str, int]]], list[Tensor]]:
        """Remove what is recorded. Returns it as one tensor [1, total] per dtype, and the names and sizes in each."""
        by_type: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            by_type.setdefault(tensor.dtype, {})[name] = tensor
        self._tensors = {}
        sizes = [[(name, len(tensor)) for name, tensor in tensors.items()] for tensors in by_type.values()]
        return sizes, [torch.cat(list(tensors.values())).unsqueeze(0) for tensors in by_type.values()]

    @staticmethod
    def decompress_tensors(sizes: Sequence[Sequence[tuple[str, int]]], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what `compress_tensors` joined, by name.

        Example:
            >>> BaseHostCall.decompress_tensors([[("a", 1), ("b", 2)]], [torch.tensor([[5, 6, 7]])])
            {'a': tensor([5]), 'b': tensor([6, 7])}
        """
        found: dict[str, Tensor] = {}
        for parts, tensor in zip(sizes, tensors, strict=True):
            pieces = torch.split(tensor, [size for _, size in parts], dim=1)
            found |= {name: piece.reshape(-1) for (name, _), piece in zip(parts, pieces, strict=True)}
        return found

    def summarise(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the numbers to write for the tensors of one step, which are on the host. Called in the thread."""
        return {name: _reduced(name, tensor) for name, tensor in tensors.items() if len(tensor)}

    def before_step(self, trainer: Trainer) -> None:
        """Record the next step if it is due, and raise what went wrong with an earlier one."""
        self._finish(all_calls=False)
        self.is_due = self._enabled and (trainer.step + 1) % self.every_n_steps == 0

    def record_step(self, trainer: Trainer, result: StepResult) -> None:
        """Record what every model has. Called after each step that is due."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Hand what is recorded to the thread."""
        if not self.is_due:
            return
        self.record_step(trainer, result)
        self.is_due = False
        sizes, tensors = self.compress_tensors()
        if tensors:
            self._threads = self._threads or WorkerThreads(1, thread_name_prefix="monolith-host-call")
            self._running.append(self._threads.submit(self._call, result.step, sizes, tensors))

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Wait for the calls that are still running."""
        self._tensors, self.is_due = {}, False
        try:
            self._finish(all_calls=True)
        finally:
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None

    def _call(self, step: int, sizes: Sequence[Sequence[tuple[str, int]]], tensors: Sequence[Tensor]) -> None:
        host = [tensor.cpu() for tensor in tensors]
        self._write(step, self.summarise(self.decompress_tensors(sizes, host)))

    def _finish(self, *, all_calls: bool) -> None:
        while self._running and (all_calls or len(self._running) >= _IN_FLIGHT or self._running[0].done()):
            self._running.popleft().result()

    def _write_summaries(self, step: int, values: Mapping[str, float]) -> None:
        if self._folder is None:
            _log.info("step %d: host call: %s", step, dict(values))
        else:
            write_evaluation(self._folder, values, step)


def _reduced(name: str, tensor: Tensor) -> float:
    for ending, reduce in (("_avg", torch.mean), ("_max", torch.max), ("_sum", torch.sum)):
        if ending in name:
            return float(reduce(tensor.double()))
    return float(tensor[0])


class BaseEmbeddingHostCall(BaseHostCall):
    """Host calls of `BaseEmbeddingTask`: the AUC over a sample of users, and scalars if `enable_host_call_scalar_metrics`.

    The batch needs the column `uid`. Of each step those `top_k_sampling_num_per_core` rows are taken whose users have the
    smallest buckets, `uid % 1000`, so that their number is always the same. The AUC is that of the whole run so far, over those
    of them with a bucket below 10. With `enable_caching_with_tpu_var_mode` rows of all steps are taken, which stay on the device
    until the next host call, and otherwise only those of the steps that are due.

    Example:
        >>> calls = BaseEmbeddingHostCall(None, every_n_steps=2, enable_caching_with_tpu_var_mode=True)
        >>> calls.top_k_sampling_num_per_core
        6
    """

    def __init__(
        self,
        output_dir: str | None,
        *,
        enable_host_call: bool = True,
        enable_host_call_scalar_metrics: bool = False,
        enable_host_call_norm_metrics: bool = False,
        enable_caching_with_tpu_var_mode: bool = False,
        top_k_sampling_num_per_core: int = 6,
        every_n_steps: int = 500,
        write: Summary | None = None,
    ) -> None:
        super().__init__(output_dir, enable_host_call=enable_host_call, every_n_steps=every_n_steps, write=write)
        if enable_caching_with_tpu_var_mode and every_n_steps < 2:
            raise ConfigError(
                "enable_caching_with_tpu_var_mode: it keeps rows between two host calls, so host_call_every_n_steps must be "
                f"more than 1, got {every_n_steps}"
            )
        if top_k_sampling_num_per_core < 1:
            raise ConfigError(f"top_k_sampling_num_per_core: expected at least 1, got {top_k_sampling_num_per_core}")
        self._scalars, self._norms = enable_host_call_scalar_metrics, enable_host_call_norm_metrics
        self._caches, self.top_k_sampling_num_per_core = enable_caching_with_tpu_var_mode, top_k_sampling_num_per_core
        self._cached: list[dict[str, Tensor]] = []
        self._aucs: dict[str, AUC] = {}

    def record_summary_tensor(self, name: str, tensor: Tensor) -> None:
        """Keep `tensor`, if scalars are wanted."""
        if self._scalars:
            super().record_summary_tensor(name, tensor)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Take the sample of this step, and hand what is recorded to the thread if it is time."""
        if self._enabled and (self._caches or self.is_due):
            self._cached.append(self._sample(trainer, result))
        super().after_step(trainer, result)

    def record_step(self, trainer: Trainer, result: StepResult) -> None:
        """Record the rows taken, and the scalars of every model."""
        joined = {name: torch.cat([taken[name] for taken in self._cached]) for name in self._cached[0]}
        self._cached = []
        for name, tensor in joined.items():
            super().record_summary_tensor(name, tensor)
        self.record_summary_tensor("loss_avg", result.loss / max(result.examples if result.loss_is_sum else 1, 1))
        for head in trainer.heads:
            rows, _ = head.select(result.batch, result.logits[head.name])
            self.record_summary_tensor(f"{head.name}/label_avg", head.labels(rows))
        if self._norms and result.grad_norm is not None:
            self.record_summary_tensor("gradient_norm_max", result.grad_norm)
        if trainer.optimizer is not None:
            rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
            self.record_summary_tensor("learning_rate_max", torch.tensor(rates, device=trainer.device))

    def summarise(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the AUC of each head so far, means of what was sampled, and the scalars."""
        sampled = {name for name in tensors if name.rpartition("/")[2] in (LABELS, PREDICTIONS, UID_BUCKET)}
        found = super().summarise({name: tensor for name, tensor in tensors.items() if name not in sampled})
        for name in sampled:
            head, _, kind = name.rpartition("/")
            if kind != UID_BUCKET:
                continue
            chosen = tensors[name] < int(UID_SAMPLE_RATE * RATIO_N)
            if not bool(chosen.any()):
                continue
            labels, predictions = tensors[f"{head}/{LABELS}"][chosen], tensors[f"{head}/{PREDICTIONS}"][chosen]
            auc = self._aucs.setdefault(head, AUC())
            auc.update(predictions, labels)
            found[f"{head}/auc"] = auc.compute()
            found[f"{head}/sampled_labels_avg"] = float(labels.double().mean())
            found[f"{head}/sampled_preds_avg"] = float(predictions.double().mean())
        return found

    def _sample(self, trainer: Trainer, result: StepResult) -> dict[str, Tensor]:
        """Return the rows of the users with the smallest buckets, by name."""
        batch: Batch = result.batch
        uids = batch.get(UID)
        if not isinstance(uids, Tensor):
            raise InvalidArgumentError(
                f"host call: the batch has no column {UID!r}, by which users are sampled; add it, or set "
                "host_call_every_n_steps to 0"
            )
        buckets = (uids.reshape(-1).to(trainer.device) % RATIO_N).to(torch.int32)
        count = min(self.top_k_sampling_num_per_core, len(buckets))
        taken: dict[str, Tensor] = {}
        for head in trainer.heads:
            if head.kind != "binary":
                continue
            own = buckets
            if head.mask is not None:
                # Beyond all buckets, so that a row without a label does not count.
                own = torch.where(column(batch, head.mask, "mask").reshape(-1).bool(), buckets, RATIO_N)
            smallest, rows = torch.topk(own, count, largest=False)
            labels = column(batch, head.label, f"head {head.name!r}, label").reshape(-1).float()
            predictions = head.predict(result.logits[head.name])
            taken |= {f"{head.name}/{UID_BUCKET}": smallest, f"{head.name}/{LABELS}": labels[rows]}
            taken[f"{head.name}/{PREDICTIONS}"] = predictions[rows]
        for name in (REQ_TIME, SAMPLE_RATE):
            values = batch.get(name)
            if isinstance(values, Tensor):
                taken[f"{name}s_avg"] = values.reshape(-1).to(trainer.device)
        return taken
