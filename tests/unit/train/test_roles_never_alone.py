"""Danger: a job of several processes becomes as many local runs, each on all of the data and all saving into one folder."""

from __future__ import annotations

import json
import logging

import pytest

from monolith import ConfigError
from monolith.cluster import ServiceDiscoveryType
from monolith.train import RunnerConfig

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
RANKS = pytest.mark.parametrize("ranks", [MPIRUN, MPICH, TORCHRUN, SRUN], ids=["mpirun", "mpich", "torchrun", "srun"])


def tf_config(kind: str, index: int | None, **cluster: list[str]) -> dict[str, str]:
    task = {"type": kind} if index is None else {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def mlp(role: str, index: int = 0, **counts: int) -> dict[str, str]:
    return {"MLP_ROLE": role, "MLP_ROLE_INDEX": str(index)} | {
        f"MLP_{n.upper()}_NUM": str(c) for n, c in counts.items()
    }


def role(environ: dict[str, str]) -> tuple[str, int, int, int]:
    runner = RunnerConfig.from_env(environ)
    assert not runner.is_local
    return runner.server_type, runner.index, runner.num_ps, runner.num_workers


WITHOUT_SERVERS = pytest.mark.parametrize(
    ("environ", "index", "workers"),
    [
        (MPIRUN, 1, 4),
        (MPICH, 1, 4),
        (TORCHRUN, 1, 4),
        (SRUN, 1, 4),
        (mlp("worker", 1, worker=3), 1, 3),
        ({**mlp("worker", worker=1), **MPIRUN}, 1, 4),
        (tf_config("worker", 0, chief=["h0:1"], worker=["h1:1"]), 1, 2),
        ({"MONOLITH_NUM_WORKERS": "3"}, 0, 3),
        ({"MONOLITH_NUM_WORKERS": "3", "MONOLITH_INDEX": "2"}, 2, 3),
    ],
)


@WITHOUT_SERVERS
def test_workers_without_servers_are_ranks_of_one_run(environ: dict[str, str], index: int, workers: int) -> None:
    assert role(environ) == ("worker", index, 0, workers)
    assert RunnerConfig.from_env(environ).enable_full_sync_training


@WITHOUT_SERVERS
def test_workers_that_would_train_alone_are_refused(environ: dict[str, str], index: int, workers: int) -> None:
    with pytest.raises(ConfigError, match=f"worker {index} of {workers} has no parameter servers.*MONOLITH_NUM_PS"):
        RunnerConfig.from_env({**environ, "MONOLITH_ENABLE_SYNC_TRAINING": "false"})


@WITHOUT_SERVERS
def test_independent_runs_are_possible_when_asked_for(environ: dict[str, str], index: int, workers: int) -> None:
    assert RunnerConfig.from_env({**environ, "MONOLITH_IS_LOCAL": "true"}).is_local


def test_a_number_without_the_number_of_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected more than 2 workers.* got 1; set .*MONOLITH_NUM_WORKERS"):
        RunnerConfig.from_env({"MONOLITH_INDEX": "2"})


def test_a_job_file_with_workers_and_no_servers_is_a_synchronous_run() -> None:
    runner = RunnerConfig.from_env({}, defaults=RunnerConfig(num_workers=2))
    assert (runner.is_local, runner.enable_full_sync_training) == (False, True)


@pytest.mark.parametrize(
    "environ",
    [
        {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script, which srun did not start
        mlp("worker", worker=1, dispatcher=1),
        tf_config("chief", 0, chief=["h0:1"]),
        tf_config("worker", 0, worker=["h0:1"]),
    ],
)
def test_a_process_that_is_alone_trains_locally(environ: dict[str, str]) -> None:
    assert RunnerConfig.from_env(environ).is_local


def test_a_primus_application_without_roles_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert RunnerConfig.from_env({"PRIMUS_AM_RPC_HOST": "am", "PRIMUS_AM_RPC_PORT": "1"}).is_local
    assert "TF_CONFIG does not say its role: it trains alone" in caplog.text


@RANKS
def test_ranks_of_every_launcher_become_workers_and_servers(ranks: dict[str, str]) -> None:
    environ = {"MONOLITH_NUM_PS": "1", "MONOLITH_DISCOVERY_FOLDER": "job"}
    assert role({**environ, **ranks}) == ("worker", 1, 1, 3)
    last = {name: "3" if value == "1" else value for name, value in ranks.items()}
    assert role({**environ, **last}) == ("ps", 0, 1, 3)


def test_of_two_launchers_the_one_that_counts_all_processes_is_right() -> None:
    environ = {"MONOLITH_NUM_PS": "1", "MONOLITH_DISCOVERY_FOLDER": "job"}
    inner = {"RANK": "5", "WORLD_SIZE": "8"}
    assert role({**environ, **SRUN, **inner}) == ("worker", 5, 1, 7)
    stale = {"RANK": "0", "WORLD_SIZE": "1"}
    assert role({**environ, **MPIRUN, **stale}) == ("worker", 1, 1, 3)


@pytest.mark.parametrize(("name", "value"), [("RANK", ""), ("RANK", "one"), ("WORLD_SIZE", "-4")])
def test_a_rank_that_is_no_number_is_an_error(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected a number"):
        RunnerConfig.from_env({**TORCHRUN, name: value})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (mlp("chief", ps=1, worker=2), "MLP_ROLE: expected one of .*'WORKER'.*, got 'CHIEF'"),
        (mlp("", ps=1, worker=2), "MLP_ROLE: expected one of"),
        (mlp("evaluator", worker=1), "got 'EVALUATOR'"),
        (tf_config("evaluator", 0, ps=["h1:1"], worker=["h2:1"]), "TF_CONFIG: task type: .*, got 'evaluator'"),
        (tf_config("evaluator", 0, worker=["h2:1"]), "got 'evaluator'"),
    ],
)
def test_a_role_that_does_not_exist_does_not_train(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunnerConfig.from_env(environ)
    assert role({**environ, "MONOLITH_SERVER_TYPE": "ps", "MONOLITH_NUM_PS": "1"})[0] == "ps"


@pytest.mark.parametrize("kind", ["ps", "worker"])
def test_a_task_of_several_must_say_which_it_is(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"task.index: expected which of the 2 '{kind}' tasks"):
        RunnerConfig.from_env(tf_config(kind, None, ps=["h1:1", "h2:1"], worker=["h3:1", "h4:1"]))
    assert role(tf_config(kind, None, ps=["h1:1"], worker=["h3:1"]))[:2] == (kind, 0)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (mlp("ps", ps=1), "MLP_WORKER_NUM: expected at least one worker"),
        (mlp("dispatcher", dispatcher=1), "MLP_WORKER_NUM"),
        (tf_config("ps", 0, ps=["h1:1"]), "cluster.worker: expected at least one worker"),
    ],
)
def test_a_job_that_nobody_trains_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunnerConfig.from_env(environ)


@pytest.mark.parametrize(
    "environ", [mlp("worker", 2, worker=3), tf_config("worker", 1, chief=["h0:1"], worker=["h1:1", "h2:1"])]
)
def test_workers_of_a_scheduler_may_use_servers_it_does_not_know(environ: dict[str, str]) -> None:
    servers = {"MONOLITH_NUM_PS": "2", "MONOLITH_DISCOVERY_FOLDER": "job"}
    assert role({**environ, **servers}) == ("worker", 2, 2, 3)
    assert RunnerConfig.from_env({**environ, **servers}).discovery_type is ServiceDiscoveryType.FILE


@pytest.mark.parametrize("kind", ["dispatcher", "dsworker"])
@pytest.mark.parametrize("servers", [{}, {"ps": 2}], ids=["without servers", "with servers"])
def test_a_process_of_the_data_service_is_no_chief(kind: str, servers: dict[str, int]) -> None:
    environ = mlp(kind, worker=1, dispatcher=1, dsworker=1, **servers)
    for more in ({}, {"MONOLITH_IS_LOCAL": "true"}):
        runner = RunnerConfig.from_env({**environ, **more})
        assert (runner.server_type, runner.index, runner.is_chief) == (kind, 0, False)


def test_a_rank_without_the_number_of_ranks_is_said_to_be_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert RunnerConfig.from_env({"RANK": "1"}).is_local
    assert "RANK is 1, but WORLD_SIZE is not set: this process trains alone" in caplog.text
    caplog.clear()
    assert RunnerConfig.from_env({"RANK": "0"}).is_local
    assert RunnerConfig.from_env({"RANK": "1", "MONOLITH_IS_LOCAL": "true"}).is_local
    assert not caplog.text
