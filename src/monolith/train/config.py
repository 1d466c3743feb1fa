"""`RunConfig`: how a model is trained, as far as it is not part of the model."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from monolith.config import Config, NonNegative, Positive
from monolith.nn.clip import ClipType
from monolith.state.restore_points import Moment
from monolith.urls import Location

__all__ = ["METRIC_PREFIX", "RunConfig", "get_metric_prefix", "other_runs", "set_metric_prefix"]

_Count = Annotated[int, Field(ge=0)]
_Hour = Annotated[int, Field(ge=0, le=23)]
_Minute = Annotated[int, Field(ge=0, le=59)]

METRIC_PREFIX = "MONOLITH_METRIC_PREFIX"
"""The environment variable with what names of metrics begin with."""
REALTIME_DENSE_SECS = 1800.0
"""Seconds between two checkpoints without tables of a run that feeds a service, unless the configuration says otherwise."""
SAVE_SECS = 600.0
"""Seconds between two checkpoints unless the configuration says otherwise."""


class RunConfig(Config):
    """How to run a model. Every field is also a key of a configuration file and of `--set` on the command line.

    Example:
        >>> RunConfig(model_dir="runs/ctr", clip_norm=10.0).log_step_count_steps
        100
        >>> RunConfig(model_dirs="runs/ctr")
        Traceback (most recent call last):
        monolith.errors.ConfigError: RunConfig.model_dirs: unknown field; did you mean 'model_dir'?
    """

    config_group: ClassVar[str] = "run"

    model_dir: Location | None = None
    """Folder of the checkpoints, a path or URL. A run continues from what it finds there, and saves there at intervals and when
    it ends. None saves nothing."""
    warm_start_from: Location | None = None
    """The model_dir of another run of the same model. A run that finds nothing in its own model_dir starts with the weights and
    rows of that run. The global step, the dense optimizer and the position in the data start from the beginning."""
    save_checkpoints_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between two checkpoints. Give this or `save_checkpoints_secs`."""
    save_checkpoints_secs: NonNegative | None = None
    """Seconds between two checkpoints. 0 saves only at the end. Without this and `save_checkpoints_steps`: 600."""
    dense_only_save_checkpoints_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between two checkpoints without tables, in the folder `dense_only` of model_dir. None by default."""
    dense_only_save_checkpoints_secs: Positive | None = None
    """Seconds between two checkpoints without tables."""
    checkpoints_max_to_keep: _Count | None = 10
    """Checkpoints to keep. None or 0 keeps all. Those that `monolith_checkpoint` names as exempt do not count."""
    keep_checkpoint_every_n_hours: Positive = 10000.0
    """Hours between two checkpoints that are kept for good, of those that would be removed."""
    log_flush_secs: Positive | None = None
    """Seconds between two entries of the change log, from each of which a run can continue. A crash loses at most what was
    trained since the last one. None writes entries with checkpoints only."""
    feed_secs: Positive = 0.1
    """Seconds between two publications of changed rows to replicas that follow the run. Nothing is done while none does."""
    feed_dense_secs: Positive = 1.0
    """Seconds between two publications of the dense weights to them."""
    enable_realtime_training: bool = False
    """The run feeds a service without an end. Unless they are set: checkpoints without tables every 1800 s, `ignore_save_errors`,
    and of `RunnerConfig` `partial_recovery`. Servers stay when the chief ends, unless `force_shutdown_ps` is set. Replicas can
    follow any run, also without it. `RunnerConfig.enable_realtime_training` means the same."""
    enable_parameter_sync: bool = False
    """The original's name of `enable_realtime_training`: either sets the other."""
    save_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of one processor that writing changed rows may use during training, which it slows down. 1 writes as fast as
    possible. With less than 1, up to 256 MiB of rows are read into memory first."""
    ignore_save_errors: bool = False
    """Continue training when two attempts to write a checkpoint have failed. The next checkpoint has what this one lacks."""
    tide_start_hour: _Hour | None = None
    """Start (UTC) of the daily window in which the machines are safe. Outside of it, checkpoints are written every
    `tide_save_secs`."""
    tide_start_minute: _Minute = 0
    """Minute of `tide_start_hour`."""
    tide_end_hour: _Hour | None = None
    """End of the window."""
    tide_end_minute: _Minute = 0
    """Minute of `tide_end_hour`."""
    tide_save_secs: Positive | None = None
    """Seconds between two checkpoints outside the window."""
    restore_dir: Location | None = None
    """The model_dir of another run. A run that has no checkpoint of its own continues from that run's newest, or from its
    `restore_ckpt`, with step, optimizer and position in the data. The other run's files are read where they are. A
    restore_dir without a checkpoint is logged, and the run starts without one."""
    restore_ckpt: str | None = None
    """Name of a checkpoint to go back to, such as model.ckpt-3000. Training goes back once and records that in the file
    `restore_ckpt` of model_dir. Another name is ignored with a log line until that file is removed. Evaluation and prediction
    always go back."""
    restore_to: Moment | None = None
    """State to go back to: step=N, time=UNIX_SECONDS or sequence=N stands for the newest checkpoint or entry of the change log
    that is not later. Training goes back once for each value, evaluation and prediction always."""
    clear_nn: bool = False
    """Once, restore tables only and let dense parameters and optimizer start from the beginning. The file `clear_nn` in model_dir
    marks that it has been done."""
    continue_training: bool = False
    """With `clear_nn`, keep the global step instead of starting at 0."""
    reload_alias_map: dict[str, str] = {}
    """Names of dense parameters that have changed: new name to the name in the checkpoint."""
    table_alias_map: dict[str, str] = {}
    """Names of tables that have changed: new name to the name in the checkpoint."""
    enable_alias_map_auto_gen: bool = True
    """Without `reload_alias_map`, find the old names of parameters by rules."""
    allow_new_tables: bool = False
    """Let a table that the checkpoint does not have start empty, instead of refusing the checkpoint."""
    allow_new_segments: bool = False
    """Let tables to which segments were added, or from which some were removed, keep what is left of their rows. What is new
    in a row is initialised."""
    resume_data: bool = True
    """Continue in the data where the saved run stopped. Set it to False when the next run reads other data."""
    epochs: Annotated[int, Field(ge=1)] | None = 1
    """Passes over the data. A run that has made them all is finished and makes no further step. None repeats the data until the
    steps are made. A stream is read once, with 1 and with None, and a later run continues with what has come since."""
    device: str | None = None
    """Device of the dense part of the model: cpu, cuda:1, tpu, or auto, the accelerator that torch finds on this machine. Tables
    stay in main memory. None leaves the model where it is."""
    static_rows: Annotated[int, Field(ge=1)] | None = None
    """Pad every batch to this number of rows, for devices that compile the model again for each new shape. Nothing is trained on
    the padding."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of torch and of the tables in this process. By default as many as torch has, but no more than the processors that
    this process and its container may use."""
    clip_norm: Positive | None = 1000.0
    """Largest joint norm of all gradients, dense and sparse together, or what `clip_type` says. None does not clip."""
    clip_type: ClipType = "global_norm"
    """What `clip_norm` limits, see `monolith.nn.clip_grads_`."""
    sparse_clip_norm: Positive | None = None
    """Limit of the norm of the sparse gradients alone."""
    sparse_norm_warmup_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps over which the limit of the sparse gradients rises linearly to its full value. Only for `clip_type` global_norm."""
    dense_weight_decay: NonNegative = 0.0
    """Weight decay of dense parameters, added to their gradients after clipping."""
    embedding_prefetch_capacity: _Count = 0
    """Batches that a background thread prefetches. 0 reads in the step loop."""
    enable_embedding_postpush: bool = False
    """Apply sparse gradients while the next step computes. It is faster, but each lookup misses the update of the previous
    step."""
    event_time: str | None = None
    """Column of event times, seconds since 1970. The newest of a batch becomes the time of the rows it updates."""
    kafka_topics: str | None = None
    """Train on these topics, separated by commas, instead of the record files that the input reads: with their columns, message
    format, batch size and transforms."""
    kafka_servers: str | None = None
    """`host:port` of Kafka's brokers, separated by commas."""
    kafka_group_id: str | None = None
    """The consumer group under which the position is reported to tools that monitor Kafka. The run has its own position."""
    save_checkpoints_event_secs: Annotated[int, Field(ge=1)] | None = None
    """Seconds of event time between two checkpoints, besides those of the other settings. A stream that is replayed has them at
    the same places as live."""
    evict_event_secs: Annotated[int, Field(ge=1)] | None = None
    """Seconds of event time between two removals of expired rows. What has expired is decided by the newest event time trained,
    never by the clock, so that replaying old data expires what it did live. None removes none: call `evict`."""
    hold_schedules_at: _Count | None = None
    """Global step from which on learning rates, dense and of rows, stay what their schedules say for it. None follows the
    schedules without an end, also on a stream."""
    log_step_count_steps: Annotated[int, Field(ge=1)] = 100
    """Steps between two lines of progress, counted over all workers. `monolith train` prints the lines, `Estimator.train` logs
    them at INFO."""
    save_summary_steps: Annotated[int, Field(ge=1)] = 100
    """Steps between two TensorBoard points, which are written only with a model_dir."""
    model_name: str = ""
    """Name of the model in reports, by default the name of its class."""
    deep_insight_dir: str | None = None
    """Folder to which each process of the run appends predictions of sampled examples, see `DeepInsightHook`. The data then needs
    the columns `uid` and `req_time`. None writes nothing."""
    deep_insight_target: str = ""
    """Heads whose predictions are written, separated by commas, by default all."""
    deep_insight_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the examples that is written to `deep_insight_dir`. 0 writes nothing."""
    stop_on_nan: bool = True
    """Raise `DivergedError` for a loss or gradient that is NaN or infinite, before it reaches any weight."""
    seed: int | None = None
    """Seed of torch's generators at the start of a run. None leaves them alone."""
    export_dir_base: str = "exported_models"
    """Folder of exports, inside model_dir unless it is absolute."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for prefix in ("", "dense_only_"):
            steps, secs = f"{prefix}save_checkpoints_steps", f"{prefix}save_checkpoints_secs"
            if getattr(self, steps) is not None and getattr(self, secs) is not None:
                raise ValueError(f"give {steps} or {secs}, not both")
        if self.clear_nn and self.reload_alias_map:
            raise ValueError("clear_nn restores no dense parameter: reload_alias_map has nothing to rename")
        if self.sparse_norm_warmup_steps is not None and (self.clip_norm is None or self.clip_type != "global_norm"):
            raise ValueError(
                "sparse_norm_warmup_steps: needs a clip_norm and clip_type global_norm, whose limit it raises"
            )
        if (self.kafka_topics is None) != (self.kafka_servers is None):
            raise ValueError("kafka_topics and kafka_servers: give both, or none of them")
        for name in ("save_checkpoints_event_secs", "evict_event_secs"):
            if getattr(self, name) is not None and self.event_time is None:
                raise ValueError(f"{name}: needs event_time, the column with the times")
        if self.restore_to is not None and self.restore_ckpt is not None:
            raise ValueError("give restore_to or restore_ckpt, not both")
        return self

    def schedule_step(self, step: int) -> int:
        """Return the global step whose learning rates `step` has.

        Example:
            >>> RunConfig(hold_schedules_at=100).schedule_step(250), RunConfig().schedule_step(250)
            (100, 250)
        """
        return step if self.hold_schedules_at is None else min(step, self.hold_schedules_at)

    @property
    def save_every(self) -> dict[str, Any]:
        """The period of checkpoints, as `NoFirstSaveCheckpointSaverHook` takes it.

        Example:
            >>> RunConfig().save_every, RunConfig(save_checkpoints_secs=0).save_every
            ({'save_secs': 600.0}, {})
        """
        if self.save_checkpoints_steps is not None:
            return {"save_steps": self.save_checkpoints_steps}
        secs = SAVE_SECS if self.save_checkpoints_secs is None else self.save_checkpoints_secs
        return {"save_secs": secs} if secs else {}

    @property
    def dense_only_save_every(self) -> dict[str, Any]:
        """The interval of checkpoints without tables. Empty if there are none."""
        periods = {
            "save_steps": self.dense_only_save_checkpoints_steps,
            "save_secs": self.dense_only_save_checkpoints_secs,
        }
        return {name: value for name, value in periods.items() if value is not None}

    def for_service(self) -> Self:
        """Return the configuration of a run that feeds a service: what was not set gets the values that such a run needs.

        Example:
            >>> config = RunConfig(enable_realtime_training=True, ignore_save_errors=False).for_service()
            >>> config.dense_only_save_checkpoints_secs, config.ignore_save_errors
            (1800.0, False)
        """
        implied: dict[str, Any] = {"enable_realtime_training": True, "enable_parameter_sync": True}
        if "ignore_save_errors" not in self.model_fields_set:
            implied["ignore_save_errors"] = True
        if not self.dense_only_save_every:
            implied["dense_only_save_checkpoints_secs"] = REALTIME_DENSE_SECS
        return self.model_copy(update=implied)

    @property
    def tide(self) -> dict[str, Any]:
        """The settings of the tide window."""
        names = ("tide_start_hour", "tide_start_minute", "tide_end_hour", "tide_end_minute")
        return {**{name: getattr(self, name) for name in names}, "tide_every_secs": self.tide_save_secs}


def other_runs(config: RunConfig) -> tuple[str, ...]:
    """The model_dirs of other runs that this one may start from.

    Example:
        >>> other_runs(RunConfig(restore_dir="runs/a")), other_runs(RunConfig())
        (('runs/a',), ())
    """
    return tuple(folder for folder in (config.restore_dir, config.warm_start_from) if folder is not None)


def get_metric_prefix() -> str:
    """What names of metrics begin with in systems that collect those of many processes.

    Example:
        >>> get_metric_prefix()
        'monolith.training'
    """
    return os.environ.get(METRIC_PREFIX, "monolith.training")


def set_metric_prefix(prefix: str) -> None:
    """Set the prefix for this process and those it starts, by the environment variable MONOLITH_METRIC_PREFIX."""
    os.environ[METRIC_PREFIX] = prefix
