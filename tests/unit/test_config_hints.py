"""Danger: a wrong field is answered with a hint that, once followed, does something else than was meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monolith.cli.job import JobConfig
from monolith.config import Config, nearest_name
from monolith.errors import ConfigError
from monolith.features import Feature
from monolith.table import Segment, TableConfig
from monolith.train import RunConfig, RunnerConfig


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        (lambda: RunnerConfig(restore_dir="x"), "RunnerConfig.restore_dir: unknown field; it is a field of RunConfig"),
        (lambda: RunConfig(num_ps=2), "RunConfig.num_ps: unknown field; it is a field of RunnerConfig"),
        (lambda: RunConfig(model_args={}), "RunConfig.model_args: unknown field; it is a field of JobConfig"),
        (lambda: TableConfig(dim=8), "TableConfig.dim: unknown field; it is a field of Feature and of Segment"),
        (lambda: JobConfig(model="m:f", epochs=2), "it is a field of RunConfig: write run.epochs"),
        (lambda: RunConfig(restore_to="yesterday"), "expected step=N, sequence=N or time=SECONDS since 1970"),
        (lambda: RunnerConfig(restore_dirs="x"), "did you mean 'restore_dir' of RunConfig?"),
        (lambda: RunConfig(clip_nrom=1.0), "RunConfig.clip_nrom: unknown field; did you mean 'clip_norm'?"),
    ],
)
def test_the_hint_says_where_a_field_belongs(build: Callable[[], object], hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build()
    assert hint in str(raised.value)


def test_a_field_of_a_nested_configuration_is_compared_with_its_own() -> None:
    with pytest.raises(ConfigError, match=r"RunnerConfig\.client\.timeuot: unknown field; did you mean 'timeout'\?"):
        RunnerConfig(client={"timeuot": 3})
    job = {"model": "m:f", "runner": {"restore_dir": "x"}}
    with pytest.raises(ConfigError, match=r"JobConfig\.runner\.restore_dir: unknown field; it is a field of RunConfig"):
        JobConfig(**job)
    with pytest.raises(ConfigError, match=r"learning_rte: unknown field; did you mean 'learning_rate'\?"):
        Segment(dim=1, optimizer={"kind": "adagrad", "learning_rte": 1.0})


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("restore_dir", ["model_dir", "restore_ckpt", "log_dir"]),
        ("save_checkpoints_hours", ["save_checkpoints_secs", "save_checkpoints_steps"]),
        ("disable_alias", ["enable_alias"]),
        ("tide_start_day", ["tide_start_hour"]),
        ("max_steps", ["max_slots"]),
        ("", ["a"]),
        ("a", ["b"]),
        ("ps", ["py"]),
        ("clik", ["clicked"]),
        ("model", ["model_dir"]),
    ],
)
def test_another_word_is_no_misspelling(name: str, known: list[str]) -> None:
    assert nearest_name(name, known) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lable", "label"),
        ("cvs", "csv"),
        ("clip_nrom", "clip_norm"),
        ("lerning_rtae", "learning_rate"),
        ("weight_decay_factor", "weight_decay"),
        ("num_pss", "num_ps"),
        ("modeldir", "model_dir"),
        ("save_checkpoint_secs", "save_checkpoints_secs"),
    ],
)
def test_a_misspelling_is_recognised(name: str, meant: str) -> None:
    assert nearest_name(name, ["unrelated", meant, "other"]) == meant


def test_without_a_hint_the_known_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"Feature\.zzz: unknown field; known fields: name, slot, dim"):
        Feature(name="user", dim=8, zzz=1)


def test_configurations_of_no_group_are_not_searched() -> None:
    class Alone(Config):
        x: int = 0

    with pytest.raises(ConfigError, match="known fields: x"):
        Alone(num_ps=1)
