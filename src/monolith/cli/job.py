"""What a command works on: a model by name, its arguments, and how to run it, from a file, `--set` and flags.

A YAML file has the fields of `JobConfig`:

    model: my_package.models:ClickModel     # class or function that returns an nn.Module
    model_args: {dim: 16}
    input: my_package.data:batches          # called with "train", "eval" or "predict"; default: the model's own input_fn
    input_args: {folder: data/}
    max_steps: 10000
    run: {model_dir: runs/clicks}           # the fields of RunConfig
    runner: {num_ps: 2, num_workers: 3}     # the fields of RunnerConfig, where the environment says nothing
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import Field, JsonValue
from torch import nn

from monolith.cli.given_files import named, read_yaml
from monolith.config import Config
from monolith.errors import ConfigError
from monolith.features.batch import Batch
from monolith.train import Estimator, RunConfig, RunnerConfig
from monolith.train.estimator import Mode

__all__ = ["Job", "JobConfig", "load_job"]

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


class JobConfig(Config):
    """A model and how to run it."""

    config_group: ClassVar[str] = "run"

    model: Name
    """`module:name` of a class or function that returns the model."""
    model_args: dict[str, JsonValue] = {}
    """Keyword arguments of `model`."""
    input: Name | None = None
    """`module:name` of a function from "train", "eval" or "predict" to batches; None: the model's own `input_fn`."""
    input_args: dict[str, JsonValue] = {}
    """Further keyword arguments of `input`."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """Steps to make in this run."""
    max_steps: Annotated[int, Field(ge=0)] | None = None
    """Global step to stop at."""
    run: RunConfig = RunConfig()
    """Everything else about the run."""
    runner: RunnerConfig | None = None
    """How the run is spread over processes, where their environment says nothing else."""


class Job:
    """A `JobConfig` brought to life."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        model = _call(config.model, "model_args", config.model_args)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"JobConfig.model: {config.model!r} made a {type(model).__name__}, expected an nn.Module")
        self.estimator = Estimator(model, config.run, runner=RunnerConfig.from_env(defaults=config.runner))

    def require_trained(self, untrained: bool) -> None:
        """Restore the model. A `ConfigError` if there is nothing to restore, unless that is what was asked for."""
        run = self.config.run
        if self.estimator.trainer.restore() or run.warm_start_from is not None or untrained:
            return
        where = f"{run.model_dir!r} has no checkpoint" if run.model_dir else "none is given"
        raise ConfigError(
            f"RunConfig.model_dir: {where}, so the model was never trained; check the path, train it first, or pass --untrained "
            "to use its initial weights"
        )

    def source(self, mode: Mode) -> Iterable[Batch] | None:
        """The batches of `input`; None leaves it to the model."""
        if self.config.input is None:
            return None
        batches: Iterable[Batch] | None = _call(self.config.input, "input_args", self.config.input_args, mode)
        if batches is None:
            raise ConfigError(
                f"JobConfig.input: {self.config.input}({mode!r}) returned None, expected the batches to read"
            )
        return batches


def _call(name: str, field: str, arguments: Mapping[str, JsonValue], *first: str) -> Any:  # noqa: ANN401 - the user's own
    """Call `module:name`. A `ConfigError` if it does not take these arguments."""
    function = named(name)
    try:
        inspect.signature(function).bind(*first, **arguments)
    except TypeError as error:
        takes = list(inspect.signature(function).parameters)[len(first) :]
        raise ConfigError(
            f"JobConfig.{field}: {name}: {error}; it takes {', '.join(takes) or 'no arguments'}"
        ) from None
    except ValueError:
        pass  # written in C without a signature: the call itself will tell
    return function(*first, **arguments)


def load_job(target: str, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> JobConfig:
    """Build the configuration of `target`, a YAML file or `module:Model`.

    `sets` are `key.key=value` with the value in YAML; `flags` are fields of `RunConfig` by name, those with None not given. Sets
    win over the file, flags over both.

    Example:
        >>> load_job("torch.nn:Identity", ["run.clip_norm=10", "steps=3"]).run.clip_norm
        10.0
        >>> load_job("torch.nn:Identity", ["run.clip_nrom=10"])
        Traceback (most recent call last):
        monolith.errors.ConfigError: RunConfig.clip_nrom: unknown field; did you mean 'clip_norm'?
    """
    tree = read_yaml(target) if target.endswith((".yaml", ".yml")) else {"model": target}
    for assignment in sets:
        _assign(tree, assignment)
    run: object = tree.pop("run", {})
    if not isinstance(run, dict):
        raise ConfigError(f"JobConfig.run: expected the fields of RunConfig, got {run!r}")
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    # On its own first, so that an unknown key is compared with the keys of its own level.
    settings = RunConfig.from_json(json.dumps({**run, **given}))
    if (runner := tree.get("runner")) is not None:
        RunnerConfig.from_json(json.dumps(runner))
    return JobConfig.from_json(json.dumps({**tree, "run": settings.model_dump(mode="json")}))


def _assign(tree: dict[str, Any], assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    *parents, last = path.split(".")
    if not equals or not all([*parents, last]):
        raise ConfigError(f"--set: expected key.key=value, got {assignment!r}")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {assignment}: {key!r} is a value, it has no fields")
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment}: the value is not YAML: {error}") from None
