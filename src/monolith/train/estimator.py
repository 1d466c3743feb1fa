"""`Estimator`: train, evaluate, predict and export one model on this machine."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.cluster.discovery.config import monolith_discovery
from monolith.cluster.scheduler import DATA_ROLES
from monolith.console import log_to_stderr
from monolith.data.sources.history import kafka_like
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch, as_batch, num_rows
from monolith.follow.run_service import run_identity
from monolith.metrics.auc import AUC
from monolith.metrics.gauc import GAUC
from monolith.metrics.losses import MAE, MSE, Calibration, LogLoss, NormalizedEntropy
from monolith.metrics.metric import Metric
from monolith.nn.heads import Head, column, sums_over_examples, total_loss
from monolith.train.config import RunConfig
from monolith.train.control_server import controlled
from monolith.train.device import find_device
from monolith.train.distributed.barrier import LocalBarrier
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.data_service import serve_data, service_dispatcher, service_source
from monolith.train.hooks import LoggingHook, ProgressHook, TensorBoardHook
from monolith.train.hooks.hook import Hook, hooks_running
from monolith.train.hooks.inspection import can_write_curves, write_evaluation
from monolith.train.processors import StarvationHook
from monolith.train.trainer import DATA_ENDED, StepResult, Trainer
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.train.distributed.data_service import TrainingData
    from monolith.train.distributed.ranks import RankSession
    from monolith.train.distributed.server import LocalServers

__all__ = ["Estimator", "HeadMetrics", "Mode", "forward_passes"]

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_METRICS: dict[str, Callable[[], Metric]] = {
    "auc": AUC,
    "calibration": Calibration,
    "gauc": GAUC,
    "log_loss": LogLoss,
    "mae": MAE,
    "mse": MSE,
    "ne": NormalizedEntropy,
}


class HeadMetrics:
    """The metrics that `heads` name and their mean loss per labelled example, kept up to date in bounded memory.

    Example:
        >>> import torch
        >>> metrics = HeadMetrics([Head(name="ctr", label="click", metrics=("auc",))])
        >>> metrics.update({"ctr": torch.tensor([-1.0, 1.0])}, {"click": torch.tensor([0.0, 1.0])})
        >>> metrics.compute()["ctr/auc"]
        1.0
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = tuple(heads)
        self._metrics = {head.name: {name: _METRICS[name]() for name in head.metric_names} for head in heads}
        self._losses = {head.name: 0.0 for head in heads}
        self._examples = {head.name: 0 for head in heads}

    def update(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Take in one batch: its logits by head, and the columns with the labels."""
        for head in self.heads:
            rows, z = head.select(batch, logits[head.name].detach())
            if not len(z):
                continue
            # Metrics speak of the stream as it is served, where a negative kept at rate r stands for 1/r of its kind.
            predictions, labels, weights = head.predict(z), head.labels(rows), head.importance(rows)
            loss = head.loss(logits[head.name].detach(), batch).item()
            self._losses[head.name] += loss * (len(z) if head.reduction == "mean" else 1)
            self._examples[head.name] += len(z)
            groups = None if head.group is None else column(rows, head.group, f"head {head.name!r}, group")
            for metric in self._metrics[head.name].values():
                metric.update(predictions, labels, weights, groups)

    def compute(self) -> dict[str, float]:
        """`<head>/<metric>` to its value, NaN where there was nothing to measure."""
        results: dict[str, float] = {}
        for head in self.heads:
            for name, metric in self._metrics[head.name].items():
                results[f"{head.name}/{name}"] = metric.compute()
            examples = self._examples[head.name]
            results[f"{head.name}/loss"] = self._losses[head.name] / examples if examples else math.nan
            results[f"{head.name}/examples"] = examples
        return results


def forward_passes(
    trainer: Trainer, source: Iterable[Batch], *, steps: int | None, hooks: Sequence[Hook] = (), labelled: bool
) -> Generator[tuple[Batch, dict[str, Tensor]]]:
    """Yield each batch, or the first `steps`, with the logits that the trainer's model has for it. Nothing is trained.

    All moments of the hooks but `before_update` are called, and `trainer.step` stays the same. Their `StepResult` has the loss if
    the batches are `labelled`, otherwise NaN. A stop that they request ends this pass only.

    Example:
        >>> from torch import nn
        >>> class Half(nn.Module):
        ...     def forward(self, batch):
        ...         return batch["x"] / 2
        >>> passes = forward_passes(Trainer(Half()), [{"x": torch.tensor([4.0])}], steps=None, labelled=False)
        >>> [logits for _, logits in passes]
        [{'output': tensor([2.])}]
    """
    if steps is not None and steps < 0:
        raise InvalidArgumentError(f"steps: expected at least 0, got {steps}")
    with hooks_running(hooks, trainer, start=trainer.restore):
        batches = iter(source)
        for _ in itertools.count() if steps is None else range(steps):
            if _asked_to_stop(trainer, hooks, lambda hook: hook.before_step(trainer)):
                return
            batch = next(batches, None)
            if batch is None:
                return
            batch = as_batch(batch)
            trainer.model.eval()
            with torch.no_grad():
                batch, logits = trainer.forward(batch)
            stop = bool(hooks) and _seen(trainer, hooks, batch, logits, labelled)
            yield batch, logits
            if stop:
                return


def _seen(trainer: Trainer, hooks: Sequence[Hook], batch: Batch, logits: dict[str, Tensor], labelled: bool) -> bool:
    result = StepResult(
        step=trainer.step,
        loss=total_loss(logits, batch, trainer.heads) if labelled else torch.tensor(math.nan),
        grad_norm=None,
        logits=logits,
        batch=batch,
        examples=num_rows(batch),
        loss_is_sum=sums_over_examples(trainer.heads),
    )
    return _asked_to_stop(trainer, hooks, lambda hook: hook.after_step(trainer, result))


def _asked_to_stop(trainer: Trainer, hooks: Sequence[Hook], moment: Callable[[Hook], None]) -> bool:
    # A hook of a training run may evaluate: its own stop reason must survive the evaluation.
    outer, trainer.stop_reason = trainer.stop_reason, None
    try:
        for hook in hooks:
            moment(hook)
        return trainer.stop_reason is not None
    finally:
        trainer.stop_reason = outer


Mode = Literal["train", "eval", "predict"]
"""What a model's `input_fn` is asked for data for."""


class Estimator:
    """A model with everything it needs to run.

    `model` is an `nn.Module` from batch to logits. It may also have:

    - `heads`, what it predicts, by default one binary head "output" with the column "label"
    - `input_fn(mode)`, batches to "train", "eval" or "predict" with, for methods that are given no source
    - `configure_optimizer()`, its dense optimizer, or a pair of that and a learning-rate scheduler, by default Adam with learning
      rate 0.001
    - `extra_loss(batch, logits)`, a scalar added to the loss

    Several estimators in one process share nothing.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.table import SGD
        >>> class Popularity(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         item = Feature(name="item", dim=1, optimizer=SGD(learning_rate=1.0))
        ...         self.embeddings = EmbeddingBagCollection([item])
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
        runner: RunnerConfig | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.config, self.runner = _for_service(*_with_one_folder(config or RunConfig(), runner))
        """How the run is spread over processes, by default what the environment says."""
        if self.config.device is not None and optimizer is None:
            model.to(find_device(self.config.device))
        made, scheduler = _configured(model) if optimizer is None else (optimizer, None)
        self.trainer = Trainer(model, made, scheduler=scheduler, heads=heads, config=self._own_config())
        self._example: Batch | None = None
        self._train_source: TrainingData | None = None
        self._on_kafka: tuple[TrainingData, TrainingData] | None = None
        self._local_servers = self._started_servers()
        self._session: RankSession | None = None

    @property
    def heads(self) -> tuple[Head, ...]:
        """What the model predicts."""
        return self.trainer.heads

    @property
    def global_step(self) -> int:
        """Steps made so far, earlier runs in the same model_dir included."""
        self._serve_data_service()
        return self._by_chief(self._restored_step)

    def train(
        self,
        source: TrainingData | None = None,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> int:
        """Train for `steps` more steps, or until the global step is `max_steps` or the data ends. Returns the global step.

        With a model_dir, the run continues from what is saved there and is saved now and then and when it ends.

        Where `runner` says that this process is one of several, it does its part of a run over servers and returns when that is
        over, see `distributed_train`. A server serves. Afterwards the rows are lost with the servers. Where it says that the run
        is local and has servers, those are in this process, until `close`. Several workers without servers are the ranks of a
        synchronous run, see `distributed_sync_train`. Their rows stay in the processes until `close`.

        With `runner.use_dataservice`, `source` or what `input_fn` returns is a `DatasetConfig`, which is read through the data
        service of the job, or a `DataServiceSource`. A dispatcher or data worker of that service serves instead of training,
        in every method, and then ends the process.
        """
        self._serve_data_service()
        all_hooks = (*self._own_hooks(hooks), *hooks)
        if self.runner.enable_full_sync_training:
            step = self._ranks().train(
                lambda: self._training_data(source), steps=steps, max_steps=max_steps, hooks=all_hooks
            )
        elif self.runner.is_local:
            with controlled(self.trainer, self.runner.controller, token=self.runner.client.token) as controller:
                if (servers := self._local_servers) is not None:
                    controller.attach(LocalBarrier(1), servers=lambda: servers.store.addresses)
                self.trainer.hooks = (*all_hooks, controller)
                step = self._train_here(source, steps, max_steps)
        else:
            step = self._train_spread(source, steps, max_steps, all_hooks)
        if self.trainer.stop_reason == DATA_ENDED:
            self._train_source = None
        return step

    def evaluate(
        self, source: Iterable[Batch] | None = None, *, steps: int | None = None, hooks: Sequence[Hook] = ()
    ) -> dict[str, float]:
        """Return the metrics of every head over the data, or its first `steps` batches: `<head>/<metric>` -> value.

        Apart from the heads' own metrics there are `<head>/loss`, the mean per example, `<head>/examples`, and `global_step`.
        Hooks see every batch. The global step does not grow.
        """
        return self._by_chief(lambda: self._evaluated(source, steps, hooks))

    def _evaluated(self, source: Iterable[Batch] | None, steps: int | None, hooks: Sequence[Hook]) -> dict[str, float]:
        metrics, seen = HeadMetrics(self.heads), 0
        data = self.data("eval", source)
        with closing(forward_passes(self.trainer, data, steps=steps, hooks=hooks, labelled=True)) as passes:
            for batch, logits in passes:
                self._example = batch
                seen += num_rows(batch)
                metrics.update(logits, batch)
        if not seen and steps != 0:
            raise InvalidArgumentError("source: the data to evaluate on has no rows; check its paths and filters")
        found = metrics.compute()
        if self.trainer.config.model_dir is not None and self.trainer.step and can_write_curves():
            write_evaluation(f"{self.trainer.config.model_dir}/eval", found, self.trainer.step)
        return {**found, "global_step": self.trainer.step}

    def predict(
        self,
        source: Iterable[Batch] | None = None,
        *,
        predict_keys: Sequence[str] | None = None,
        yield_single_examples: bool = True,
        hooks: Sequence[Hook] = (),
    ) -> Iterator[dict[str, Tensor]]:
        """Yield predictions by head, one example at a time, or with `yield_single_examples=False` one batch.

        Of the ranks of a synchronous run only the chief yields anything, and the others serve it until it has taken the last.
        `predict_keys` selects heads. Names of dense columns of the batch are passed through with them. Hooks see every
        batch before its predictions come, with a loss of NaN, and end when the last is taken or the iterator is closed.
        """
        with self._ranks().chief_alone() if self.runner.enable_full_sync_training else nullcontext(True) as does_it:
            if not does_it:
                return
            data = self.data("predict", source)
            with closing(forward_passes(self.trainer, data, steps=None, hooks=hooks, labelled=False)) as passes:
                for batch, logits in passes:
                    self._example = batch
                    chosen = self._chosen(predict_keys, batch, logits)
                    if not yield_single_examples:
                        yield chosen
                        continue
                    for row in range(num_rows(batch)):
                        yield {name: tensor[row] for name, tensor in chosen.items()}

    def export_saved_model(
        self, folder: str | Path | None = None, *, example: Batch | None = None, onnx: bool = False
    ) -> Path:
        """Write a version that `monolith.serve.load` reads without the model's code. Returns its folder.

        Of the processes of a run over several, the chief writes it. Ranks get its folder from the chief. Other workers of servers
        do not wait for the chief: they return the folder that it exports to.

        Args:
            folder: the export gets a numbered folder in it. None means `config.export_dir_base` in the model_dir.
            example: a batch to trace the model with. None takes the last one seen, or one of `input_fn("predict")`.
            onnx: also write the dense part as `program.onnx`, see `monolith.serve.export_model`.
        """
        self._serve_data_service()
        if not (self.runner.is_local or self.runner.is_chief or self.runner.enable_full_sync_training):
            base = self._export_base() if folder is None else Path(folder)
            _log.info("%s %d exports nothing: the chief does, to %s", self.runner.server_type, self.runner.index, base)
            return base
        return Path(self._by_chief(lambda: str(self._exported(folder, example, onnx=onnx))))

    def _exported(self, folder: str | Path | None, example: Batch | None, *, onnx: bool) -> Path:
        from monolith.serve.export import export_model
        from monolith.serve.manifest import RunOrigin

        self.trainer.restore()
        base = self._export_base() if folder is None else Path(folder)
        home = self.trainer.model_dir
        origin = None
        # A run that was never saved has no folder, and no identity.
        if home is not None and (is_remote(home.path) or Path(home.path).is_dir()):
            sequence = home.log.newest if home.keeps_log else 0
            path = home.path if is_remote(home.path) else str(Path(home.path).absolute())
            origin = RunOrigin(identity=run_identity(home.path), model_dir=path, sequence=sequence)
        example = self._example_batch(example)
        return export_model(self.model, example, base, heads=self.heads, step=self.trainer.step, run=origin, onnx=onnx)

    def close(self) -> None:
        """Stop the servers in this process, if it has started some. What they hold is in the model_dir, or lost."""
        if self._local_servers is not None:
            self._local_servers.close()
        if self._session is not None:
            self._session.close()
            self._session = None

    def data(self, mode: Mode, source: Iterable[Batch] | None = None) -> Iterable[Batch]:
        """`source` if there is one, otherwise the model's own batches for `mode`."""
        self._serve_data_service()
        if source is not None:
            return source
        input_fn: Callable[[Mode], Iterable[Batch]] | None = getattr(self.model, "input_fn", None)
        if input_fn is None:
            raise InvalidArgumentError(
                f"source: none given, and {type(self.model).__name__} has no input_fn(mode); define it, pass a source, or on the "
                "command line name a function: --set input=module:function"
            )
        return input_fn(mode)

    def _training_data(self, source: TrainingData | None) -> TrainingData:
        topics, servers = self.config.kafka_topics, self.config.kafka_servers
        data = self._own_training_data(source)
        if topics is None or servers is None:
            return data
        # The same one for the same data, so that each call continues where the last stopped.
        if self._on_kafka is None or self._on_kafka[0] is not data:
            stream = kafka_like(data, servers=servers, topics=topics, group=self.config.kafka_group_id)  # type: ignore[arg-type]
            self._on_kafka = data, stream
        return self._on_kafka[1]

    def _own_training_data(self, source: TrainingData | None) -> TrainingData:
        if source is not None:
            return source
        # The same one for every call, so that each continues where the last stopped.
        if self._train_source is None:
            self._train_source = self.data("train")
        return self._train_source

    def _train_here(self, source: TrainingData | None, steps: int | None, max_steps: int | None) -> int:
        with service_dispatcher(self.runner) as dispatcher:
            data = service_source(self._training_data(source), self.runner, dispatcher)
            if source is None and self._on_kafka is None:
                self._train_source = data
            return self.trainer.fit(data, steps=steps, max_steps=max_steps)

    def _serve_data_service(self) -> None:
        """In a process of the data service: serve until worker 0 has ended, then end the process. It has no model to train."""
        if self.runner.server_type in DATA_ROLES:
            serve_data(self.runner)
            raise SystemExit(0)

    def _train_spread(
        self, source: TrainingData | None, steps: int | None, max_steps: int | None, hooks: Sequence[Hook]
    ) -> int:
        from monolith.train.distributed.run import distributed_train

        with monolith_discovery(self.runner) as discovery:
            assert discovery is not None  # only a local run has none
            return distributed_train(
                self.trainer,
                lambda: self._training_data(source),
                self.runner,
                discovery,
                steps=steps,
                max_steps=max_steps,
                hooks=hooks,
            )

    def _restored_step(self) -> int:
        self.trainer.restore()
        return self.trainer.step

    def _by_chief(self, work: Callable[[], Result]) -> Result:
        """Do something with all rows. Of the ranks of a synchronous run the chief does it, and all get the result."""
        return self._ranks().by_chief(work) if self.runner.enable_full_sync_training else work()

    def _ranks(self) -> RankSession:
        """Return this process as a rank of the run. The first call waits for the others."""
        if self._session is None:
            from monolith.train.distributed.ranks import RankSession

            self._session = RankSession(self.trainer, self.runner)
            weakref.finalize(self, self._session.close)
        return self._session

    def _started_servers(self) -> LocalServers | None:
        if not self.runner.is_local or not self.runner.num_ps or self.runner.server_type != "worker":
            return None
        from monolith.train.distributed.server import LocalServers

        servers = LocalServers(self.trainer, self.runner)
        weakref.finalize(self, servers.close)
        return servers

    def _own_config(self) -> RunConfig:
        """Return the configuration for this process. In a run over several processes only the chief saves and restores."""
        if self.runner.is_local or self.runner.is_chief:
            return self.config
        chiefs = ("model_dir", "warm_start_from", "evict_event_secs", "save_checkpoints_event_secs")
        return self.config.model_copy(update=dict.fromkeys(chiefs))

    def _chosen(self, keys: Sequence[str] | None, batch: Batch, logits: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {head.name: head.predict(logits[head.name]) for head in self.heads}
        wanted = list(found) if keys is None else keys
        known = {**batch, **found}
        return {name: column(known, name, "predict_keys") for name in wanted}

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
        return as_batch(seen)

    def _own_hooks(self, given: Sequence[Hook]) -> tuple[Hook, ...]:
        # The global step grows by one for each worker while this one makes one.
        synchronous = self.runner.is_synchronous
        workers, folder = 1 if synchronous else self.runner.num_workers, self.trainer.config.model_dir
        hooks: list[Hook] = [StarvationHook()]
        if synchronous and not self.runner.is_chief:
            # The chief logs the loss of the global batch.
            return tuple(hooks)
        if not any(isinstance(hook, LoggingHook | ProgressHook) for hook in given):
            hooks.append(LoggingHook(every_steps=self.config.log_step_count_steps * workers))
        if folder is not None and can_write_curves():
            hooks.append(TensorBoardHook(folder, every_steps=self.config.save_summary_steps * workers))
        return tuple(hooks)


def _configured(model: nn.Module) -> tuple[torch.optim.Optimizer | None, LRScheduler | None]:
    """The optimizer and scheduler of a model."""
    configure = getattr(model, "configure_optimizer", None)
    if configure is not None:
        made = configure()
        return made if isinstance(made, tuple) else (made, None)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (torch.optim.Adam(parameters, lr=1e-3) if parameters else None), None


def _for_service(config: RunConfig, runner: RunnerConfig) -> tuple[RunConfig, RunnerConfig]:
    """Return both with what a run that feeds a service needs, if either of them says that it is one."""
    if not (config.enable_realtime_training or config.enable_parameter_sync or runner.enable_realtime_training):
        return config, runner
    return config.for_service(), runner.model_copy(update={"enable_realtime_training": True})


def _with_one_folder(config: RunConfig, given: RunnerConfig | None) -> tuple[RunConfig, RunnerConfig]:
    """Return both with the folder of the run, which may be set in either of them. `given`: what the script says, if anything.

    The environment goes before the script, so that `monolith launch --model-dir` makes another run of the same script.
    """
    runner = RunnerConfig.from_env() if given is None else given
    if runner.is_local:
        return config, runner
    named = [folder for folder in (config.model_dir, runner.model_dir) if folder]
    if len({folder if is_remote(folder) else str(Path(folder).resolve()) for folder in named}) > 1:
        if given is not None:
            raise ConfigError(
                f"RunnerConfig.model_dir: it is {runner.model_dir!r}, RunConfig.model_dir is {config.model_dir!r}; say it in one "
                "place"
            )
        log_to_stderr()
        _log.info("model_dir is %s, as the environment says, and not %s, as the script says", *reversed(named))
    if not named:
        return config, runner
    # That of the environment before that of the script: it is the same for servers, whose folders are in it.
    return config.model_copy(update={"model_dir": named[-1]}), runner.model_copy(update={"model_dir": named[-1]})
