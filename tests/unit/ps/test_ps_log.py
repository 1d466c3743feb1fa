"""Danger: the log of a server cannot be followed from elsewhere, or a request for it reads files that are no segments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith import EmbeddingTable
from monolith.errors import InvalidArgumentError, LogGapError
from monolith.log import LogReader, replay
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ps.client.saving import RemoteLog
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import ReadLog
from monolith.testing import sgd_table_config

COUNT = sgd_table_config(1, name="count")


def test_a_copy_of_the_log_has_the_rows_of_the_server(tmp_path: Path) -> None:
    server = ParameterServer(ServerConfig(folder=tmp_path / "server", log_flush_secs=None))
    with server, ServerStore([server.address], [COUNT]) as store:
        log, copy = RemoteLog(store.links[0], piece=100), EmbeddingTable(COUNT)
        seen = 0
        for number in range(1, 4):
            store.assign_add("count", [number, 100], torch.ones(2, 1))
            assert log.state().changed == 2
            assert log.flush() == number == log.state().sequence
            seen = log.copy(tmp_path / "copy", seen)
            replay(LogReader(tmp_path / "copy").read(seen), {"count": copy})
        assert copy.lookup(torch.tensor([1, 2, 3, 100])).flatten().tolist() == [1, 1, 1, 3]
        assert log.segments(seen) == ()
        assert log.copy(tmp_path / "copy") == seen
        assert log.state().folder == str(tmp_path / "server")


@pytest.mark.parametrize("name", ["../checkpoint", "writer.lock", "/etc/passwd", "00000000000000000001.segment/.."])
def test_only_segments_can_be_read(tmp_path: Path, name: str) -> None:
    with ParameterServer(ServerConfig(folder=tmp_path)) as server, ServerStore([server.address], [COUNT]) as store:
        with pytest.raises(InvalidArgumentError, match="expected that of a segment"):
            store.links[0].call(Call.READ_LOG, ReadLog(name=name).model_dump_json())
        gone = ReadLog(name="00000000000000000099.segment")
        with pytest.raises(LogGapError, match="was removed"):
            store.links[0].call(Call.READ_LOG, gone.model_dump_json())


def test_a_server_without_a_folder_says_so() -> None:
    with ParameterServer() as server, ServerStore([server.address]) as store:
        for ask in (RemoteLog(store.links[0]).state, RemoteLog(store.links[0]).flush):
            with pytest.raises(InvalidArgumentError, match="start it with --folder"):
                ask()
