"""Danger: the same script, started as a server or a worker, does not take its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_job import BATCHES
from cluster_processes import environments, exit_codes, processes
from monolith.cluster import ClusterSpec, Task
from monolith.state import restore_points
from monolith.testing.servers import free_ports
from real_servers import until


def saved_step(folder: Path) -> int:
    return restore_points(folder / "model")[-1].step


def test_a_normal_run_ends_everywhere_and_is_saved(tmp_path: Path) -> None:
    with processes(environments(tmp_path, num_ps=2, num_workers=2)) as started:
        assert exit_codes(started) == [0, 0, 0, 0]
    assert saved_step(tmp_path) == BATCHES


def test_a_run_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    for run in (1, 2):
        with processes(environments(tmp_path, num_ps=1, num_workers=1), epochs=run) as started:
            assert exit_codes(started) == [0, 0]
        assert saved_step(tmp_path) == run * BATCHES


def test_the_chief_ends_though_a_server_never_does(tmp_path: Path) -> None:
    with processes(environments(tmp_path, num_ps=1, num_workers=1), case="deaf") as (server, chief):
        assert exit_codes([chief]) == [0]
        assert server.exitcode is None
    assert saved_step(tmp_path) == BATCHES


def test_a_deadline_exceeded_at_the_first_step_is_tried_again(tmp_path: Path) -> None:
    with processes(environments(tmp_path, num_ps=1, num_workers=1), case="slow") as started:
        assert exit_codes(started) == [0, 0]
    assert saved_step(tmp_path) == BATCHES


def test_a_new_chief_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    told = environments(tmp_path, num_ps=1, num_workers=2)
    with processes(told, case="hang") as (server, chief, worker):
        until((tmp_path / "model" / "waits").exists)
        chief.kill()
        chief.join()
        (tmp_path / "model" / "go").touch()
        with processes(told[1:2]) as (successor,):
            assert exit_codes([successor, worker, server]) == [0, 0, 0]
    assert saved_step(tmp_path) == BATCHES


def test_the_step_is_exact_after_the_death_of_all_processes(tmp_path: Path) -> None:
    told = environments(tmp_path, num_ps=2, num_workers=2, server='{"log_flush_secs": 0}')
    with processes(told, case="hang"):
        until((tmp_path / "model" / "waits").exists)
    assert not restore_points(tmp_path / "model")
    (tmp_path / "model" / "go").touch()
    with processes(told) as started:
        assert exit_codes(started) == [0, 0, 0, 0]
    assert saved_step(tmp_path) == BATCHES


def test_tf_config_says_who_is_who(tmp_path: Path) -> None:
    ports = iter(free_ports(4))
    cluster = ClusterSpec(
        chief=(f"127.0.0.1:{next(ports)}",),
        ps=(f"127.0.0.1:{next(ports)}", f"127.0.0.1:{next(ports)}"),
        worker=(f"127.0.0.1:{next(ports)}",),
    )
    tasks = [Task(type="ps"), Task(type="ps", index=1), Task(type="chief"), Task(type="worker")]
    common = {"MONOLITH_MODEL_DIR": str(tmp_path / "model")}
    with processes([{**common, "TF_CONFIG": cluster.tf_config(task)} for task in tasks]) as started:
        assert exit_codes(started) == [0, 0, 0, 0]
    assert saved_step(tmp_path) == BATCHES


@pytest.mark.parametrize("one_table", [False, True])
@pytest.mark.parametrize("stack", [False, True])
def test_the_mlp_scheduler_says_who_is_who(tmp_path: Path, stack: bool, one_table: bool) -> None:
    roles = [("PS", 0), ("PS", 1), ("WORKER", 0), ("WORKER", 1)]
    ports = dict(zip(roles, free_ports(4), strict=True))
    common = {"MLP_PS_NUM": "2", "MLP_WORKER_NUM": "2", "MONOLITH_MODEL_DIR": str(tmp_path / "model")}
    for (role, index), port in ports.items():
        common |= {f"MLP_{role}_{index}_PRIMARY_HOST": "127.0.0.1", f"MLP_{role}_{index}_PORT": str(port)}
    common["MONOLITH_CHIEF_TIMEOUT_SECS"] = "20"
    told = [
        {**common, "MLP_ROLE": role, "MLP_ROLE_INDEX": str(index), "MLP_PORT": str(port)}
        for (role, index), port in ports.items()
    ]
    with processes(told, stack=stack, one_table=one_table) as started:
        assert exit_codes(started) == [0, 0, 0, 0]
    assert saved_step(tmp_path) == BATCHES
