"""Danger: a default changes unnoticed, and every run that relies on it trains, keeps or waits differently.

The values are those of the original, unless a comment says otherwise. docs/differences.md lists where and why they differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from monolith import optim, table
from monolith.cluster import NodeAliveChecker, ZKServiceDiscovery, check_port
from monolith.cluster.liveness import Liveness
from monolith.config import Config
from monolith.dataservice import DataClientConfig
from monolith.original import PartialRecoverySaver, copy_file, copy_recursively
from monolith.ps import ClientConfig, ServerConfig
from monolith.state.retention import CheckpointHistory
from monolith.train import ModelCheckpoints, RunConfig

CALLABLES: dict[Callable[..., Any], dict[str, object]] = {
    optim.Adamom: {"lr": 5e-6, "ada_decay": 0.9999, "mom_decay": 0.99, "epsilon": 1e-6, "weight_decay": 0.0},
    optim.RMSprop: {
        "lr": 5e-6, "beta1": 0.99, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0, "use_v2": False,
    },
    optim.Shampoo: {
        "lr": 0.03, "beta_1": 0.9, "beta_2": 1.0, "warmup": 5000, "tau_1": 200, "tau_2": 20, "eigen_head": 100,
        "eigen_tail": 100, "damping_epsilon": 1e-3,
    },
    PartialRecoverySaver: {"max_to_keep": 5, "keep_checkpoint_every_n_hours": 10000.0},
    CheckpointHistory: {"max_to_keep": 5, "keep_checkpoint_every_n_hours": 10000.0},
    ModelCheckpoints: {"max_to_keep": 10},
    NodeAliveChecker: {"timeout": 1.0, "num_thread": 10},
    check_port: {"timeout": 1.0},
    ZKServiceDiscovery: {"registration_period_secs": 1800.0},
    copy_file: {"max_retries": 5, "overwrite": True, "skip_nonexist": True},
    copy_recursively: {"max_retries": 5, "max_workers": 1, "skip_nonexist": True},
}  # fmt: skip

CONFIGS: dict[type[Config], dict[str, object]] = {
    table.Adadelta: {"learning_rate": 0.01, "averaging_ratio": 0.9, "epsilon": 0.01, "weight_decay": 0.0},
    table.Adam: {
        "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 0.01, "nesterov": False, "weight_decay": 0.0,
    },
    # The original has it for dense parameters only.
    table.Adamom: {
        "learning_rate": 5e-6, "ada_decay": 0.9999, "mom_decay": 0.99, "epsilon": 1e-6, "weight_decay": 0.0,
    },
    table.Amsgrad: {
        "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 0.01, "nesterov": False, "weight_decay": 0.0,
    },
    table.BatchSoftmax: {"learning_rate": 0.1},
    table.Ftrl: {"learning_rate": 0.01, "initial_accumulator_value": 0.1, "beta": 0.0, "l1": 0.0, "l2": 0.0},
    table.GroupFtrl: {"learning_rate": 0.01, "beta": 1.0, "l1": 0.0, "l2": 0.0},
    table.Momentum: {"learning_rate": 0.01, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    table.MovingAverage: {"momentum": 0.9},
    table.RMSprop: {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.0},
    table.RMSpropV2: {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.0},
    table.SGD: {"learning_rate": 0.01},
    # Ours: the original has no leases, and its servers neither listen on one machine nor keep a log.
    Liveness: {
        "heartbeat_secs": 5.0, "lease_secs": 30.0, "hang_secs": 60.0, "restart_window_secs": 3600.0, "backoff_secs": 1.0,
        "max_backoff_secs": 30.0, "jitter": 0.1, "grace_secs": 120.0,
    },
    ServerConfig: {
        "host": "127.0.0.1", "max_message_bytes": 256 * 2**20, "max_streams": 256, "log_flush_secs": 0.0, "take_over": False,
    },
    ClientConfig: {
        "timeout": 30.0, "wire": "float32", "on_restart": "rejoin", "ordered": True, "pool_on_servers": True, "max_streams": 4,
    },
    DataClientConfig: {"timeout": 30.0, "worker_timeout": 5.0},
    RunConfig: {
        "checkpoints_max_to_keep": 10, "keep_checkpoint_every_n_hours": 10000.0, "save_share": 0.1, "tide_start_minute": 0,
        "tide_end_minute": 0, "ignore_save_errors": False, "allow_new_tables": False, "allow_new_segments": False,
        "resume_data": True, "epochs": 1, "clip_norm": 1000.0, "clip_type": "global_norm", "dense_weight_decay": 0.0,
        "embedding_prefetch_capacity": 0, "enable_embedding_postpush": False, "log_step_count_steps": 100,
        "save_summary_steps": 100, "deep_insight_sample_ratio": 0.01, "stop_on_nan": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("called", CALLABLES, ids=lambda called: str(called.__name__))
def test_arguments_of_a_call(called: Callable[..., Any]) -> None:
    parameters = inspect.signature(called).parameters
    assert {name: parameters[name].default for name in CALLABLES[called]} == CALLABLES[called]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.__name__))
def test_fields_of_a_configuration(config: type[Config]) -> None:
    fields = config.model_fields
    assert {name: fields[name].default for name in CONFIGS[config]} == CONFIGS[config]
