"""Danger: a process that takes another one's role, or trains alone where it should be one of many."""

from __future__ import annotations

import json

import pytest

from monolith import ConfigError
from monolith.cli.job import load_job
from monolith.cluster import AddressFamily, ClusterSpec, ServiceDiscoveryType, Task, get_discovery
from monolith.ps import ClientConfig
from monolith.train import RunnerConfig
from monolith.transport.tokens import reveal

CLUSTER = ClusterSpec(chief=("h0:1",), ps=("h1:1", "h2:1"), worker=("h3:1", "h4:1"))
MLP = {
    "MLP_ROLE": "ps",
    "MLP_ROLE_INDEX": "1",
    "MLP_PS_NUM": "2",
    "MLP_WORKER_NUM": "3",
}
FILE = {"MONOLITH_DISCOVERY_FOLDER": "job/discovery"}


def role(environ: dict[str, str]) -> tuple[str, int, int, int]:
    runner = RunnerConfig.from_env(environ)
    assert not runner.is_local
    return runner.server_type, runner.index, runner.num_ps, runner.num_workers


def mpirun(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


def test_defaults_are_those_of_the_original() -> None:
    runner = RunnerConfig()
    assert (runner.server_type, runner.index, runner.num_ps, runner.num_workers) == ("worker", 0, 0, 1)
    assert (runner.num_extra_ps, runner.num_redundant_ps, runner.model_dir, runner.uuid) == (0, 0, "", "")
    assert (runner.operation_timeout_in_ms, runner.session_creation_timeout_secs) == (-1, 7200)
    assert (runner.max_retry_times, runner.retry_wait_in_secs, runner.partial_recovery) == (0, 30, None)
    assert (runner.chief_timeout_secs, runner.max_slow_start_wait_minute, runner.slow_start_steps) == (1800, 10, 0)
    assert (runner.max_pending_seconds_for_barrier, runner.benchmark_secs) == (30, 120)
    assert runner.discovery_type is ServiceDiscoveryType.CONSUL
    assert runner.zk_watch_address_family is AddressFamily.IPV4


def test_time_limits_come_as_json_and_must_be_consistent() -> None:
    environ = {**FILE, "MONOLITH_LIVENESS": '{"heartbeat_secs": 1, "lease_secs": 5}'}
    assert RunnerConfig.from_env(environ).liveness.lease_secs == 5.0
    with pytest.raises(ConfigError, match="lease_secs must be at least 3"):
        RunnerConfig.from_env({**FILE, "MONOLITH_LIVENESS": '{"lease_secs": 5}'})


def test_every_field_is_documented() -> None:
    assert [name for name, field in RunnerConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("server_type", "chief", "'ps', 'worker', 'dispatcher' or 'dsworker'"),
        ("zk_watch_address_family", "ipv5", "'ipv4' or 'ipv6'"),
        ("discovery_type", "dns", "'primus'"),
        ("index", -1, "greater than or equal to 0"),
    ],
)
def test_wrong_values_are_named(field: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"RunnerConfig.{field}: .*{said}"):
        RunnerConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_ps": 0, "model_dir": "m"}, "num_ps: expected at least one"),
        ({"num_ps": 1}, "model_dir: expected a folder"),
        ({"num_ps": 1, "model_dir": "m", "num_workers": 2, "index": 2}, "index: expected less than 2"),
        ({"num_ps": 2, "num_extra_ps": 1, "model_dir": "m", "server_type": "ps", "index": 3}, "less than 3"),
    ],
)
def test_what_a_spread_run_needs(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunnerConfig(**fields).require_spread()


def test_servers_in_reserve_have_numbers_too() -> None:
    RunnerConfig(
        num_ps=2, num_extra_ps=1, num_redundant_ps=1, model_dir="m", server_type="ps", index=3
    ).require_spread()


@pytest.mark.parametrize(
    ("fields", "retries"),
    [
        ({}, 0),
        ({"max_retry_times": 3}, 3),
        ({"partial_recovery": True}, 6),
        ({"partial_recovery": True, "max_retry_times": 2}, 2),
        ({"enable_realtime_training": True}, 6),
        ({"enable_realtime_training": True, "partial_recovery": False}, 0),
    ],
)
def test_how_often_a_loss_is_accepted(fields: dict[str, object], retries: int) -> None:
    assert RunnerConfig(**fields).max_losses == retries


@pytest.mark.parametrize("environ", [{}, {"MONOLITH_MODEL_DIR": "runs"}, mpirun(0, 1), {"MONOLITH_METRIC_PREFIX": "x"}])
def test_without_servers_a_run_is_local(environ: dict[str, str]) -> None:
    runner = RunnerConfig.from_env(environ)
    assert runner.is_local
    assert get_discovery(runner) is None


def test_fields_come_from_variables() -> None:
    runner = RunnerConfig.from_env(
        {
            **FILE,
            "MONOLITH_SERVER_TYPE": "ps",
            "MONOLITH_INDEX": "1",
            "MONOLITH_NUM_PS": "2",
            "MONOLITH_PARTIAL_RECOVERY": "true",
            "MONOLITH_UUID": "17",
            "MONOLITH_CLIENT": '{"wire": "bfloat16", "max_streams": 8}',
        }
    )
    assert (runner.server_type, runner.index, runner.num_ps, runner.uuid) == ("ps", 1, 2, "17")
    assert (runner.partial_recovery, runner.discovery_type) == (True, ServiceDiscoveryType.FILE)
    assert runner.client == ClientConfig(wire="bfloat16", max_streams=8)


@pytest.mark.parametrize(
    ("name", "value"), [("MONOLITH_NUM_PS", "two"), ("MONOLITH_CLIENT", "wire=bf16"), ("MONOLITH_CLIENT", "[1]")]
)
def test_a_variable_that_does_not_fit_is_an_error(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        RunnerConfig.from_env({name: value})


def test_the_token_is_for_both_sides_and_not_shown() -> None:
    runner = RunnerConfig.from_env({"MONOLITH_PS_TOKEN": "0123456789abcdef", "MONOLITH_NUM_PS": "1"})
    assert (reveal(runner.client.token), reveal(runner.server.token)) == ("0123456789abcdef", "0123456789abcdef")
    assert "0123456789abcdef" not in repr(runner)


@pytest.mark.parametrize(
    ("task", "expected"), [(("chief", 0), ("worker", 0)), (("worker", 1), ("worker", 2)), (("ps", 1), ("ps", 1))]
)
def test_tf_config_says_which_process_this_is(task: tuple[str, int], expected: tuple[str, int]) -> None:
    text = CLUSTER.tf_config(Task(type=task[0], index=task[1]))
    assert role({"TF_CONFIG": text}) == (*expected, 2, 3)
    assert RunnerConfig.from_env({"TF_CONFIG": text}).discovery_type is ServiceDiscoveryType.PRIMUS


def test_a_tf_config_without_servers_is_a_local_run() -> None:
    alone = ClusterSpec(worker=("h0:1",)).tf_config(Task(type="worker"))
    assert RunnerConfig.from_env({"TF_CONFIG": alone}).is_local


def test_the_mlp_scheduler_says_which_process_this_is() -> None:
    assert role(MLP) == ("ps", 1, 2, 3)
    assert role({**MLP, "MLP_ROLE": "worker"}) == ("worker", 1, 2, 3)
    assert RunnerConfig.from_env(MLP).discovery_type is ServiceDiscoveryType.MLP


def test_the_last_processes_of_mpirun_are_servers() -> None:
    environ = {**FILE, "MONOLITH_NUM_PS": "1", "MONOLITH_NUM_REDUNDANT_PS": "1"}
    roles = [role({**environ, **mpirun(rank, 4)}) for rank in range(4)]
    assert roles == [("worker", 0, 1, 2), ("worker", 1, 1, 2), ("ps", 0, 1, 2), ("ps", 1, 1, 2)]


def test_mpirun_may_start_workers_alone() -> None:
    environ = {**FILE, "MONOLITH_NUM_PS": "2", "MONOLITH_SERVER_TYPE": "worker"}
    assert [role({**environ, **mpirun(rank, 2)}) for rank in range(2)] == [("worker", 0, 2, 2), ("worker", 1, 2, 2)]


def test_mpirun_with_too_few_processes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="more processes than the 2 servers"):
        RunnerConfig.from_env({**FILE, "MONOLITH_NUM_PS": "2", **mpirun(0, 2)})


def test_variables_win_over_schedulers_and_both_over_defaults() -> None:
    defaults = RunnerConfig(num_workers=9, uuid="u")
    runner = RunnerConfig.from_env({**MLP, "MONOLITH_INDEX": "0"}, defaults=defaults)
    assert (runner.index, runner.num_ps, runner.num_workers, runner.uuid) == (0, 2, 3, "u")


def test_a_job_file_has_a_runner() -> None:
    job = load_job("torch.nn:Identity", ["runner.num_ps=2", "runner.discovery_type=zk", "runner.client.wire=float16"])
    assert job.runner is not None
    assert (job.runner.num_ps, job.runner.discovery_type, job.runner.client.wire) == (
        2,
        ServiceDiscoveryType.ZK,
        "float16",
    )
    with pytest.raises(ConfigError, match=r"RunnerConfig.num_pss: unknown field; did you mean 'num_ps'"):
        load_job("torch.nn:Identity", ["runner.num_pss=2"])


def test_it_goes_through_json() -> None:
    runner = RunnerConfig(num_ps=2, discovery_type=ServiceDiscoveryType.ZK, client=ClientConfig(wire="float16"))
    assert RunnerConfig.from_json(json.dumps(runner.model_dump(mode="json"))) == runner
