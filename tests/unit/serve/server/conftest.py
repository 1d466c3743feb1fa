"""Servers of models, for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monolith.serve import Client, load
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.model_server import ModelServer
from monolith.train import Estimator
from served_models import ServeSums, sum_replica
from training import ClickModel, Stream


@pytest.fixture
def serve_sums() -> Iterator[ServeSums]:
    """Start a server of `SumModel`, and a client of it. Both are closed in the end."""
    opened: list[tuple[ModelServer, Client]] = []

    def start(*replicas: Replica, **options: Any) -> tuple[ModelServer, Client]:  # noqa: ANN401
        repository = ModelRepository()
        for replica in replicas or (sum_replica(),):
            repository.add(replica)
        extra = {
            name: options.pop(name)
            for name in ("observers", "extra_routes", "router", "assigns_ids")
            if name in options
        }
        server = ModelServer(repository, ServingConfig(**options), **extra)
        opened.append((server, Client(server.http_address, model="sums", timeout=20.0)))
        return opened[-1]

    yield start
    for server, client in opened:
        client.close()
        assert server.close(grace=20.0)
        server.handler.repository.close()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a small trained model with ids, ragged ids and a dense column."""
    estimator = Estimator(ClickModel())
    estimator.train(Stream(), steps=5)
    return estimator.export_saved_model(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def clicks(exported: Path) -> Iterator[tuple[ModelServer, Replica]]:
    """A server of the exported model."""
    repository = ModelRepository()
    replica = Replica("clicks", load(exported))
    repository.add(replica)
    with ModelServer(repository) as server:
        yield server, replica
    repository.close()
