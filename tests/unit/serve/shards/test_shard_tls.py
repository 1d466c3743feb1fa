"""Danger: rows travel in the clear between machines, a shard answers strangers, or a front end trusts any certificate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import UnavailableError
from monolith.serve import load
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.serve.shards.shard_server import ShardConfig, ShardServer
from monolith.serve.shards.shard_store import open_shard_stores
from monolith.table import Bags
from serving_shards import export_rows
from tls import TOKEN, certificate, make_certificate

__all__ = ["certificate"]

USERS = Bags(table="user", ids=np.arange(500), offsets=np.arange(501))


def client(certs: Path | None, token: str | None = TOKEN) -> ShardClientConfig:
    return ShardClientConfig(timeout=20.0, start_secs=0.0, tls_root_certs=certs, token=token)


def test_rows_travel_encrypted_and_only_to_who_has_the_token(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    export = export_rows(tmp_path / "exports")
    (local,) = load(export).stores.values()
    cert, key = certificate
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other")
    # The address can be reached from other machines, which needs both.
    config = ShardConfig(export=export, host="0.0.0.0", tls_cert=cert, tls_key=key, token=TOKEN)
    with ShardServer(config) as server:
        address = f"localhost:{server.port}"
        with open_shard_stores(address, config=client(cert)) as stores:
            assert torch.equal(stores["embeddings"].lookup([USERS])[0], local.lookup([USERS])[0])
        for wrong in (client(cert, None), client(cert, "another-token-of-16"), client(other), client(None)):
            with pytest.raises(UnavailableError, match=address):
                open_shard_stores(address, config=wrong)
