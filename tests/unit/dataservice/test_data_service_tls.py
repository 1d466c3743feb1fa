"""Danger: a data service that other machines can reach, and that sends batches or tokens in the clear."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.dataservice import (
    DataClientConfig,
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
    DispatcherConfig,
)
from monolith.errors import ServerError
from tls import TOKEN

DATASET = DatasetConfig(kind="click_stream", fields={"batches": 4, "batch_size": 2, "users": 9}, splits=2)


def test_with_both_locks_it_serves_publicly_and_only_those_who_have_the_keys(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    locks = {"host": "0.0.0.0", "token": TOKEN, "tls_cert": cert, "tls_key": key, "roots": ("*",)}
    client = DataClientConfig(token=TOKEN, tls_root_certs=cert)
    with DataDispatcher(DispatcherConfig(**locks)) as dispatcher:
        address = f"localhost:{dispatcher.port}"
        worker = DataWorkerConfig(**{**locks, "host": "127.0.0.1"}, dispatcher=address, client=client)
        with DataWorker(worker):
            assert len(list(DataServiceSource(address, DATASET, config=client))) == 4
            for wrong in (
                DataClientConfig(tls_root_certs=cert, timeout=1),
                DataClientConfig(token=TOKEN, timeout=1),
                DataClientConfig(timeout=1),
            ):
                with pytest.raises(ServerError):
                    list(DataServiceSource(address, DATASET, config=wrong))
