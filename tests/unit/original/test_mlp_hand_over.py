"""Danger: a process of the data service, or a server, begins to read the data or to train."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import nn

from monolith.features import Batch
from monolith.original import HandOver, MLPServiceDiscovery, mlp_scheduler
from monolith.original.mlp import MLPEnv
from monolith.train import RunnerConfig, Trainer
from monolith.train.distributed import run as module
from monolith.train.distributed.data_service import service_dispatcher
from monolith.train.distributed.run import distributed_train

ENVIRON = {
    "MLP_ROLE": "dispatcher",
    "MLP_DISPATCHER_NUM": "1",
    "MLP_PS_NUM": "1",
    "MLP_WORKER_NUM": "1",
    "MLP_PS_0_PRIMARY_HOST": "127.0.0.1",
    "MLP_PS_0_PORT": "2222",
}


def data() -> Iterable[Batch]:
    pytest.fail("it reads data")


def test_the_data_service_serves_and_does_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def mlp_pass(env: MLPEnv, servers: object, **given: object) -> HandOver:
        asked.append(given)
        return HandOver(role="DISPATCHER", finished=True)

    monkeypatch.setattr(mlp_scheduler, "mlp_pass", mlp_pass)
    config = RunnerConfig(num_ps=1, model_dir=str(tmp_path), use_dataservice=True, num_extra_dsworker_on_gpu_worker=2)
    monkeypatch.setenv("MLP_DISPATCHER_NUM", "1")
    discovery = MLPServiceDiscovery(MLPEnv(ENVIRON))
    assert distributed_train(Trainer(nn.Identity()), data, config, discovery) == 0
    assert (asked[0]["use_dataservice"], asked[0]["num_extra_dsworkers"]) == (True, 2)


def test_a_server_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    monkeypatch.setattr(module, "serve", lambda config, discovery, **given: served.append(config.index))
    config = RunnerConfig(num_ps=1, model_dir=str(tmp_path))
    discovery = MLPServiceDiscovery(MLPEnv({**ENVIRON, "MLP_ROLE": "ps"}))
    assert distributed_train(Trainer(nn.Identity()), data, config, discovery) == 0
    assert served == [0]


def test_what_a_worker_starts_beside_itself_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Server:
        def close(self) -> None:
            closed.append("closed")

    found = HandOver(role="WORKER", dispatcher="h:1", servers=(Server(),))
    monkeypatch.setattr(mlp_scheduler, "mlp_pass", lambda *given, **more: found)
    monkeypatch.setenv("MLP_WORKER_NUM", "1")
    with service_dispatcher(RunnerConfig(num_ps=1, use_dataservice=True)) as dispatcher:
        assert (dispatcher, closed) == ("h:1", [])
    assert closed == ["closed"]
