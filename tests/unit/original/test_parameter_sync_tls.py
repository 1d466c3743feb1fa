"""Danger: anybody who reaches a target can change the rows that it serves, as in the original."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from followed_tables import rows_of, table, train, until
from monolith.errors import ConfigError
from monolith.follow import Feed
from monolith.original import ParameterSyncServer
from monolith.original.parameter_sync_hook import ParameterSyncThread
from monolith.transport.server import ListenConfig
from tls import TOKEN, certificate

__all__ = ["certificate"]


class One:
    """A back end that knows one target."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
        return sub_graph, [self.address]


@pytest.mark.parametrize(("token", "code"), [(TOKEN, 0), ("another-token-than-that", None)])
def test_rows_are_pushed_with_tls_and_the_right_token_only(
    certificate: tuple[Path, Path], token: str, code: int | None
) -> None:
    cert, key = certificate
    trained, served = table(), table(mode="serving")
    train(trained, [1, 2, 3])
    with ExitStack() as stack:
        config = ListenConfig(tls_cert=cert, tls_key=key, token=TOKEN)
        target = stack.enter_context(ParameterSyncServer({"item": [served]}, config))
        feed = Feed(lambda: {"item": trained}, every=0.01)
        stack.callback(feed.close)
        backend = One(f"localhost:{target.port}")
        thread = ParameterSyncThread(feed, backend, 0, token=token, tls_root_certs=cert)
        stack.callback(thread.close, flush=False)
        until(lambda: len(thread.last_result.responses) == 1)
        (response,) = thread.last_result.responses
        assert (response.status_code == 0) == (code == 0)
        assert rows_of(served) == (rows_of(trained) if code == 0 else {})


def test_a_public_target_needs_both(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    tables = {"item": [table(mode="serving")]}
    for missing in ({"token": TOKEN}, {"tls_cert": cert, "tls_key": key}):
        with pytest.raises(ConfigError, match="other machines"):
            ParameterSyncServer(tables, ListenConfig(host="0.0.0.0", **missing))
