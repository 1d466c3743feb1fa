"""Danger: requests that are predicted together and get each other's rows, errors or columns."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.serve import Client, load
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.batching import MicroBatcher, join_batches
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.model_server import ModelServer
from served_models import sum_replica
from training import batch_of


def test_requests_that_wait_are_joined_and_each_gets_its_own_rows() -> None:
    replica = sum_replica()
    sizes: list[int] = []

    def run(batch: dict[str, torch.Tensor], deadline: float) -> dict[str, torch.Tensor]:
        sizes.append(len(batch["a"]))
        return replica.predict(batch)

    batcher = MicroBatcher(max_rows=6, wait_secs=30.0)  # full after three requests of two rows

    def ask(number: int) -> list[float]:
        batch = {"a": torch.tensor([number, 10.0 * number]), "b": torch.zeros(2)}
        return batcher.predict(replica, batch, 2, time.monotonic() + 30, run)["sum"].tolist()  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, [1, 2, 3])) == [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
    assert sizes == [6]


def test_an_error_stays_with_the_request_that_caused_it() -> None:
    replica = sum_replica()
    started = threading.Barrier(2)

    def run(batch: dict[str, torch.Tensor], deadline: float) -> dict[str, torch.Tensor]:
        if -1.0 in batch["a"]:
            raise InvalidArgumentError("minus one")
        return replica.predict(batch)

    batcher = MicroBatcher(max_rows=2, wait_secs=30.0)

    def ask(number: float) -> object:
        started.wait(20)
        batch = {"a": torch.tensor([number]), "b": torch.zeros(1)}
        try:
            return batcher.predict(replica, batch, 1, time.monotonic() + 30, run)["sum"].tolist()  # type: ignore[arg-type]
        except InvalidArgumentError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, [-1.0, 5.0])) == ["minus one", [5.0]]


def test_requests_with_other_columns_are_not_joined() -> None:
    replica = sum_replica()
    sizes: list[int] = []

    def run(batch: dict[str, torch.Tensor], deadline: float) -> dict[str, torch.Tensor]:
        sizes.append(len(batch["a"]))
        return {"sum": batch["a"].sum(-1) if batch["a"].ndim > 1 else batch["a"]}

    batcher = MicroBatcher(max_rows=2, wait_secs=0.01)
    batches = [{"a": torch.ones(1)}, {"a": torch.ones(1, 2)}, {"a": torch.ones(1, dtype=torch.float64)}]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda batch: batcher.predict(replica, batch, 1, time.monotonic() + 30, run), batches)  # type: ignore[arg-type]
        assert [one["sum"].tolist() for one in found] == [[1.0], [2.0], [1.0]]
    assert sizes == [1, 1, 1]


def test_rows_of_ragged_columns_stay_together() -> None:
    first, second = Ragged.from_lists([[1], []]), Ragged.from_lists([[], [2, 3]])
    joined = join_batches([{"tags": first}, {"tags": second}])["tags"]
    assert isinstance(joined, Ragged)
    assert joined.to_lists() == [[1], [], [], [2, 3]]


def test_a_server_that_joins_requests_answers_like_one_that_does_not(exported: Path) -> None:
    repository = ModelRepository()
    replica = Replica("clicks", load(exported))
    repository.add(replica)
    config = ServingConfig(max_batch_rows=16, batch_wait_ms=20.0)
    try:
        with ModelServer(repository, config) as server, Client(server.http_address, timeout=20.0) as client:

            def ask(number: int) -> np.ndarray:
                batch = batch_of(number, 1 + number % 5)
                wanted = {name: batch[name] for name in ("user", "item", "tags", "age")}
                return client.infer(wanted)["click"]

            with ThreadPoolExecutor(4) as pool:
                for number, found in enumerate(pool.map(ask, range(40))):
                    expected = replica.predict(batch_of(number, 1 + number % 5))["click"]
                    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
            with pytest.raises(InvalidArgumentError, match=r"batch\['item'\]: expected 1 rows"):
                client.infer({"user": [1], "item": [1, 2], "tags": [[1]], "age": np.ones((1, 1), np.float32)})
    finally:
        repository.close()
