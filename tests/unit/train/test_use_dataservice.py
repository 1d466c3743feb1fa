"""Danger: a worker configured for the data service reads its own files, so every worker trains on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith.data import Prefetch
from monolith.dataservice import (
    DataClientConfig,
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
)
from monolith.errors import ConfigError
from monolith.features import Batch
from monolith.original import HandOver, mlp_scheduler
from monolith.ps import ClientConfig
from monolith.train import Estimator, RunnerConfig
from monolith.train.distributed.data_service import service_dispatcher, service_source

DATASET = DatasetConfig(kind="click_stream", fields={"batches": 4, "batch_size": 2, "users": 9}, splits=2)
HERE: list[Batch] = [{"user_id": torch.tensor([1]), "label": torch.ones(1)}]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        return self.weight.expand(len(batch["label"]))

    def input_fn(self, mode: str) -> DatasetConfig:
        return DATASET


@contextmanager
def service() -> Iterator[str]:
    with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)):
        yield dispatcher.address


def runner(**fields: object) -> RunnerConfig:
    return RunnerConfig(is_local=True, use_dataservice=True, **fields)


def test_a_dataset_is_read_through_the_service() -> None:
    with service() as address:
        estimator = Estimator(Model(), runner=runner(data_service_dispatcher=address))
        assert estimator.train(DATASET) == 4


def test_a_dataset_of_the_model_goes_on_where_the_last_call_stopped() -> None:
    with service() as address:
        estimator = Estimator(Model(), runner=runner(data_service_dispatcher=address))
        assert [estimator.train(steps=3), estimator.train()] == [3, 4]


def test_workers_share_the_batches_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with service() as address:
        shares = [service_source(DATASET, runner(), address) for _ in range(2)]
        assert all(isinstance(share, DataServiceSource) for share in shares)
        readers = [iter(share.shard(index, 2)) for index, share in enumerate(shares)]  # type: ignore[attr-defined]
        assert sum(len(list(reader)) for reader in readers) == 4


def test_the_service_is_asked_with_the_token_and_certificates_of_the_run() -> None:
    client = ClientConfig(token="0123456789abcdef", tls_root_certs=Path("ca.pem"))
    source = service_source(DATASET, runner(client=client), "h:1")
    assert isinstance(source, DataServiceSource)
    assert source.config == DataClientConfig(token="0123456789abcdef", tls_root_certs=Path("ca.pem"))


def test_the_dispatcher_is_the_one_that_the_scheduler_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with service() as address:
        found = HandOver(role="WORKER", dispatcher=f"grpc://{address}")
        monkeypatch.setattr(mlp_scheduler, "mlp_pass", lambda *given, **more: found)
        monkeypatch.setenv("MLP_WORKER_NUM", "1")
        assert Estimator(Model(), runner=runner()).train(DATASET) == 4


def test_a_source_that_this_process_would_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="the batches come from a list, which this process would read itself"):
        Estimator(Model(), runner=runner(data_service_dispatcher="127.0.0.1:1")).train(HERE)


def test_a_source_of_the_service_may_be_wrapped() -> None:
    source = Prefetch(DataServiceSource("127.0.0.1:1", DATASET))
    assert service_source(source, runner(), "") is source


def test_a_service_that_nobody_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_service_dispatcher: expected host:port"):
        Estimator(Model(), runner=runner()).train(DATASET)


def test_a_dataset_without_the_service_is_refused() -> None:
    with pytest.raises(ConfigError, match="a DatasetConfig is read through a data service; set use_dataservice"):
        Estimator(Model(), runner=RunnerConfig(is_local=True)).train(DATASET)


def test_data_workers_that_would_never_start_are_refused() -> None:
    config = RunnerConfig(is_local=True, num_extra_dsworker_on_gpu_worker=2)
    with (
        pytest.raises(ConfigError, match="num_extra_dsworker_on_gpu_worker: 2 data workers"),
        service_dispatcher(config),
    ):
        pytest.fail("it trains")
