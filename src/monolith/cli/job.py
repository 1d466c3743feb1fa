"""The model that a verb works on, its arguments, and how to run it: from a file, `--set` and flags.

A YAML file has the fields of `JobConfig`:

    model: my_package.models:ClickModel     # class or function that returns an nn.Module
    model_args: {dim: 16}
    input: my_package.data:batches          # called with "train", "eval" or "predict", by default the model's own input_fn
    input_args: {folder: data/}             # or a stream, see StreamInput: input: {stream: runs/events, columns: [...], ...}
    max_steps: 10000
    run: {model_dir: runs/clicks}           # the fields of RunConfig
    runner: {num_ps: 2, num_workers: 3}     # the fields of RunnerConfig, where the environment says nothing
    then: stream:runs/clicks/events         # train the input, and then this stream without an end
    then_from: after-history                # or start, end, a time, or offsets by partition
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from pydantic import Field, JsonValue
from torch import nn

from monolith.cli.options import named, read_yaml, set_field
from monolith.cli.serve_replicas import live_status
from monolith.config import Config
from monolith.data import HistoryThenStream, StreamInput, start_after
from monolith.data.sources.history import file_source_of, transformed_like
from monolith.errors import ConfigError
from monolith.features.batch import Batch
from monolith.train import Estimator, RunConfig, RunnerConfig
from monolith.train.estimator import Mode
from monolith.urls import is_remote

__all__ = ["JobConfig", "ModelJob", "RESTORE_FIELDS", "load_job", "run_flags"]

ObjectName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


RESTORE_FIELDS = (
    "model_dir",
    "warm_start_from",
    "restore_dir",
    "restore_ckpt",
    "restore_to",
    "enable_alias_map_auto_gen",
    "allow_new_tables",
    "allow_new_segments",
    "seed",
)
"""The fields of `RunConfig` that decide what a verb on a trained model restores."""


class JobConfig(Config):
    """A model and how to run it."""

    config_group: ClassVar[str] = "run"

    model: ObjectName
    """`module:name` of a class or function that returns the model."""
    model_args: dict[str, JsonValue] = {}
    """Keyword arguments of `model`."""
    input: ObjectName | StreamInput | None = None
    """`module:name` of a function from "train", "eval" or "predict" to batches, or the fields of `StreamInput` to train on a
    stream as it grows, and to evaluate and predict what it has. None uses the model's own `input_fn`."""
    input_args: dict[str, JsonValue] = {}
    """Further keyword arguments of `input`."""
    then: str | dict[str, JsonValue] | None = None
    """Stream to train when the input ends: its URL, or the fields of `StreamInput`. Columns, batch size and transforms are those
    of the input unless they are given."""
    then_from: int | str | dict[str, int] = "after-history"
    """Where the stream begins: "start", "end", milliseconds since 1970, a time such as 2026-01-31T12:00:00Z, or offsets by
    partition. "after-history": behind what the Parquet files of the input say that they have, see `start_after`."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """Steps to make in this run."""
    max_steps: Annotated[int, Field(ge=0)] | None = None
    """Global step to stop at."""
    run: RunConfig = RunConfig()
    """Everything else about the run."""
    runner: RunnerConfig | None = None
    """How the run is spread over processes, where their environment says nothing else."""


class ModelJob:
    """The model of a `JobConfig` in its `Estimator`."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        model = _call(config.model, "model_args", config.model_args)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"JobConfig.model: {config.model!r} made a {type(model).__name__}, expected an nn.Module")
        self.estimator = Estimator(model, config.run, runner=RunnerConfig.from_env(defaults=config.runner))

    def require_trained(self, untrained: bool) -> None:
        """Restore the model. Raises `ConfigError` if there is nothing to restore, unless `untrained` allows that."""
        run = self.config.run
        if self.estimator.trainer.restore() or run.warm_start_from is not None or untrained:
            return
        live = live_status(Path(run.model_dir)) if run.model_dir and not is_remote(run.model_dir) else None
        if live is not None and "problem" not in live:
            raise ConfigError(
                f"RunConfig.model_dir: the run in {run.model_dir!r} has saved nothing yet; save it with `monolith control save "
                f"{run.model_dir}`, or wait for its first checkpoint"
            )
        where = f"{run.model_dir!r} has no checkpoint" if run.model_dir else "none is given"
        raise ConfigError(
            f"RunConfig.model_dir: {where}, so the model was never trained; check the path, train it first, or pass --untrained "
            "to use its initial weights"
        )

    def source(self, mode: Mode) -> Iterable[Batch] | None:
        """Return the batches of `input`, or None if the model has its own. To train, followed by the stream `then`."""
        if mode == "train" and self.config.then is not None:
            return history_then_stream(self.estimator.data("train", self._input(mode)), self.config)
        return self._input(mode)

    def _input(self, mode: Mode) -> Iterable[Batch] | None:
        if self.config.input is None:
            return None
        if isinstance(self.config.input, StreamInput):
            return self.config.input.transformed(self.config.input.open(until_end=None if mode == "train" else True))
        batches: Iterable[Batch] | None = _call(self.config.input, "input_args", self.config.input_args, mode)
        if batches is None:
            raise ConfigError(
                f"JobConfig.input: {self.config.input}({mode!r}) returned None, expected the batches to read"
            )
        return batches


def history_then_stream(history: Iterable[Batch], config: JobConfig) -> HistoryThenStream:
    """Return `history` followed by the stream that `config.then` says."""
    given: dict[str, JsonValue] = {"stream": config.then} if isinstance(config.then, str) else dict(config.then or {})
    files = file_source_of(history)
    if files is not None:
        columns = getattr(files, "columns", None)
        if columns is not None:
            given.setdefault("columns", [column.model_dump(mode="json") for column in columns])
        given.setdefault("batch_size", files.batch_size)
    if "start" in given:
        raise ConfigError("JobConfig.then.start: say it as then_from (--then-from)")
    if missing := [name for name in ("stream", "columns", "batch_size") if name not in given]:
        raise ConfigError(
            f"JobConfig.then.{missing[0]}: missing, and the input, a {type(history).__name__}, does not say it; give then: "
            "{stream: ..., columns: [...], batch_size: ...}"
        )
    then = StreamInput.from_json(json.dumps(given))
    live = then.open()
    start = start_after(history, live) if config.then_from == "after-history" else config.then_from
    live = live.starting_at(start)
    stream = transformed_like(live, history) if then.transforms is None else then.transformed(live)
    return HistoryThenStream(history, stream, epochs=config.run.epochs or 1)


def _call(name: str, field: str, arguments: Mapping[str, JsonValue], *first: str) -> Any:  # noqa: ANN401 - the user's own
    """Call `module:name`. Raises `ConfigError` if it does not take these arguments."""
    try:
        function = named(name)
    except ConfigError as error:
        raise ConfigError(f"JobConfig.{field.removesuffix('_args')}: {error}") from None
    try:
        inspect.signature(function).bind(*first, **arguments)
    except TypeError as error:
        takes = list(inspect.signature(function).parameters)[len(first) :]
        raise ConfigError(
            f"JobConfig.{field}: {name}: {error}; it takes {', '.join(takes) or 'no arguments'}"
        ) from None
    except ValueError:
        pass  # written in C without a signature, so only the call can tell
    return function(*first, **arguments)


def load_job(target: str, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> JobConfig:
    """Build the configuration of `target`, a YAML file or `module:Model`.

    `sets` are `key.key=value` with the value in YAML. `flags` are fields of `RunConfig` by name, with None for those not given.
    Sets override the file, and flags override both.

    Example:
        >>> load_job("torch.nn:Identity", ["run.clip_norm=10", "steps=3"]).run.clip_norm
        10.0
        >>> load_job("torch.nn:Identity", ["run.clip_nrom=10"])
        Traceback (most recent call last):
        monolith.errors.ConfigError: RunConfig.clip_nrom: unknown field; did you mean 'clip_norm'?
    """
    tree = read_yaml(target) if target.endswith((".yaml", ".yml")) else {"model": target}
    for assignment in sets:
        set_field(tree, assignment)
    run: object = tree.pop("run", {})
    if not isinstance(run, dict):
        raise ConfigError(f"JobConfig.run: expected the fields of RunConfig, got {run!r}")
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    # Checked on its own first, so that the error for an unknown key suggests keys of the same level.
    settings = RunConfig.from_json(json.dumps({**run, **given}))
    if isinstance(stream := tree.get("input"), dict):
        StreamInput.from_json(json.dumps(stream))
    if (runner := tree.get("runner")) is not None:
        RunnerConfig.from_json(json.dumps(runner))
    return JobConfig.from_json(json.dumps({**tree, "run": settings.model_dump(mode="json")}))


def run_flags(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb, which takes a dict `flags`, one flag for each of these fields of `RunConfig`, by default for all."""
    # Mappings can be given in files and by `--set` only.
    single = [name for name, field in RunConfig.model_fields.items() if typing.get_origin(field.annotation) is not dict]
    return functools.partial(_with_flags, fields or single)


def _with_flags(names: Sequence[str], verb: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(verb)
    def with_flags(**arguments: Any) -> None:  # noqa: ANN401 - typer passes what the signature below says
        flags = {name: arguments.pop(name) for name in names}
        verb(**arguments, flags=flags)

    own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "flags"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_flag(name)) for name in names
    ]
    with_flags.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {}
    return with_flags


def _flag(name: str) -> object:
    field = RunConfig.model_fields[name]
    default = "" if field.default is None else f" [default: {field.default}]"
    option = typer.Option(help=f"{field.description}{default}", show_default=False)
    return Annotated[_plain(field.annotation) | None, option]


def _plain(annotation: Any) -> Any:  # noqa: ANN401 - type forms have no common type
    """Return the type without bounds and None: `float` for `Annotated[float, ...] | None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
