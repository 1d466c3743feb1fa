"""Danger: a server restarted on its folder has lost rows, dense parameters or the record of what was pushed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    FencedError,
    MemoryLimitError,
    ServerRestartedError,
    ServerRestoredError,
    StalePushError,
    StorageError,
)
from monolith.log import LogReader
from monolith.ps import ClientConfig, DenseOptimizer, ParameterServer, ServerConfig, ServerParameters, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import DeclaredTable, HeldPosition, Join, Push, TableWrite
from monolith.ps.server.folder import ServerFolder
from monolith.ps.server.state import ServerState
from monolith.state import restore_tables
from monolith.table import Adagrad, Bags, Gradient, Segment, SlidingAdmission, TableConfig
from monolith.table.store import Position
from monolith.testing import sgd_table_config
from monolith.transport.errors import decode_error
from monolith.transport.frames import decode, encode
from same_port import started_again

ITEM = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad(learning_rate=0.5)),))
COUNT = sgd_table_config(1, name="count")
W0 = ClientConfig(worker="w0", epoch=1, timeout=20.0)


@contextmanager
def server(folder: Path | None, flush: float | None = 0, **options: object) -> Iterator[ParameterServer]:
    with started_again(ServerConfig(folder=folder, log_flush_secs=flush, **options)) as made:  # type: ignore[arg-type]
        yield made


def rows(store: ServerStore, table: str, ids: list[int]) -> list[list[float]]:
    bags = Bags(table=table, ids=np.array(ids), offsets=np.arange(len(ids) + 1))
    found: list[list[float]] = store.lookup([bags])[0].tolist()
    return found


def add(store: ServerStore, number: int, count: int = 1) -> None:
    for _ in range(count):
        store.assign_add("count", [number], torch.ones(1, 1))


def fill(store: ServerStore) -> None:
    for first in range(0, 1_000_000, 1000):
        store.assign("count", np.arange(first, first + 1000), torch.ones(1000, 1))


def killed(made: ParameterServer) -> None:
    """What a crash leaves: nothing is committed any more, and the lock of the folder is free."""
    folder = made._dispatcher._folder
    assert folder is not None
    folder._flush_secs = None
    made.close(grace=0)


def test_a_server_says_what_it_has_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="monolith")
    with server(tmp_path) as made, ServerStore([made.address], [COUNT], config=W0) as store:
        add(store, 7, 3)
        assert "restored" not in caplog.text
    with server(tmp_path):
        assert f"restored 1 rows of 1 tables from {tmp_path}" in caplog.messages


@pytest.mark.parametrize("flush", [0, 3600.0])
def test_tables_dense_and_optimizers_go_on_where_they_were(tmp_path: Path, flush: float) -> None:
    def train(origin: ServerParameters, store: ServerStore, times: int) -> None:
        for step in range(times):
            store.assign_add("item", [step, 7], torch.ones(2, 2))
            origin.apply({"w": torch.tensor([1.0, -1.0])})

    def run(folder: Path, stops: int) -> tuple[object, object]:
        for life in range(stops + 1):
            with server(folder, flush) as made, ServerStore([made.address], [ITEM]) as store:
                assert store.health()[0]["restored"] == 0 or life > 0
                origin = ServerParameters(store, {"w": torch.ones(2)}, DenseOptimizer.of(torch.optim.Adam, lr=0.1))
                assert origin.created == (life == 0)
                train(origin, store, 6 // (stops + 1))
                found = rows(store, "item", [0, 1, 2, 7]), origin.read()["w"].tolist()
        return found

    stopped, whole = run(tmp_path / "a", 2), run(tmp_path / "b", 0)
    assert stopped[1] == whole[1]
    assert stopped[0][3] == whole[0][3]


def test_acknowledged_pushes_survive_a_crash_and_those_sent_again_count_once(tmp_path: Path) -> None:
    with server(tmp_path) as first, ServerStore([first.address], [COUNT], config=W0) as store:
        store.mark_initialised()
        add(store, 1, 3)
        existed = store.reinitialize("count", [1, 2]).tolist()
        killed(first)
    with server(tmp_path) as second, ServerStore([second.address], config=ClientConfig(worker="reader")) as reader:
        assert second._dispatcher._state.initialised
        assert rows(reader, "count", [1, 2]) == [[0.0], [0.0]]
        # The very requests again, by a client that never heard the answers.
        (link,) = reader.links
        joined = json.loads(link.call(Call.JOIN, Join(worker="w0", epoch=1, nonce=store._nonce).model_dump_json()).text)
        assert joined["restored"] == reader.health()[0]["restored"] > 0
        for sequence in (1, 2, 3):
            again = TableWrite(push=Push(worker="w0", epoch=1, sequence=sequence), table="count")
            link.call(Call.ASSIGN_ADD, again.model_dump_json(), [np.array([1]), np.ones((1, 1), np.float32)])
        again = TableWrite(push=Push(worker="w0", epoch=1, sequence=4), table="count")
        assert link.call(Call.REINITIALIZE, again.model_dump_json(), [np.array([1, 2])]).arrays[0].tolist() == existed
        assert rows(reader, "count", [1]) == [[0.0]]
        with pytest.raises(ConfigError, match="another process has joined"):
            ServerStore([second.address], config=W0)
        ServerStore([second.address], config=ClientConfig(worker="w0", epoch=2)).close()
        with pytest.raises(StalePushError):
            link.call(Call.ASSIGN_ADD, again.model_dump_json(), [np.array([1]), np.ones((1, 1), np.float32)])


def test_with_an_interval_a_crash_costs_what_came_after_the_last_commit(tmp_path: Path) -> None:
    with server(tmp_path, 3600.0) as first, ServerStore([first.address], [COUNT], config=W0) as store:
        add(store, 1, 3)
        first._dispatcher.commit()
        add(store, 1, 4)
        killed(first)
    with server(tmp_path, 3600.0) as second, ServerStore([second.address]) as store:
        assert rows(store, "count", [1]) == [[3.0]]
        add(store, 1)
    # An orderly end commits.
    with server(tmp_path, None) as third, ServerStore([third.address]) as store:
        assert rows(store, "count", [1]) == [[4.0]]


def test_the_background_commits_by_itself(tmp_path: Path) -> None:
    with server(tmp_path, 0.01) as made, ServerStore([made.address], [COUNT]) as store:
        add(store, 1)
        folder = made._dispatcher._folder
        assert folder is not None
        with folder._moved:
            assert folder._moved.wait_for(lambda: folder._durable >= made._dispatcher._state.gate.changes, timeout=30)
        killed(made)
    with server(tmp_path) as made, ServerStore([made.address]) as store:
        assert rows(store, "count", [1]) == [[1.0]]


def test_requests_for_an_earlier_life_are_told_whether_the_server_has_restored_itself(tmp_path: Path) -> None:
    for folder, error in ((None, ServerRestartedError), (tmp_path, ServerRestoredError)):
        with server(folder) as first:
            config = W0.model_copy(update={"on_restart": "raise"})
            store = ServerStore([first.address], [COUNT], config=config)
            port, instance = first.port, first.instance
            add(store, 1)
        with server(folder, port=port) as second:
            assert second.instance != instance
            store.links[0].instance = instance
            with store, pytest.raises(error):
                store.stats()


def test_a_worker_goes_on_with_a_server_that_has_restored_itself(tmp_path: Path) -> None:
    with server(tmp_path) as first:
        store = ServerStore([first.address], [COUNT], config=W0)
        add(store, 1, 2)
    with store, server(tmp_path, port=first.port):
        add(store, 1)
        assert rows(store, "count", [1]) == [[3.0]]


def test_a_fenced_server_acknowledges_nothing_and_ends(tmp_path: Path) -> None:
    for flush in (0, 3600.0):
        folder = tmp_path / str(flush)
        with server(folder, flush) as stale, ServerStore([stale.address], [COUNT], config=W0) as store:
            add(store, 1, 2)
            stale._dispatcher.commit()
            with pytest.raises(StorageError, match="another writer has this log open"):
                ParameterServer(ServerConfig(folder=folder))
            with server(folder, flush, take_over=True) as successor, ServerStore([successor.address]) as reader:
                write = TableWrite(push=store.next_push(), table="count", map=1).model_dump_json()
                arrays = [np.array([1]), np.ones((1, 1), np.float32)]
                answer = decode(
                    stale._dispatcher.answer(encode(call=Call.ASSIGN_ADD, request=1, text=write, arrays=arrays))
                )
                assert isinstance(decode_error(answer.text, "stale"), FencedError)
                assert stale.wait(timeout=10)
                add(reader, 1)
                assert rows(reader, "count", [1]) == [[3.0]]
        with server(folder, flush) as last, ServerStore([last.address]) as reader:
            assert rows(reader, "count", [1]) == [[3.0]]


def test_tables_declared_later_and_their_filters_are_there_again(tmp_path: Path) -> None:
    filtered = DeclaredTable(
        config=sgd_table_config(1, name="rare"), admission=SlidingAdmission(slot_thresholds={0: 2})
    )
    with server(tmp_path) as made, ServerStore([made.address], [COUNT]) as store:
        add(store, 1)
        store.declare([ITEM, filtered])
        store.assign_add("item", [5], torch.ones(1, 2))
        before = rows(store, "item", [5])
    with server(tmp_path) as made, ServerStore([made.address], [COUNT, ITEM, filtered]) as store:
        assert list(store.configs()) == ["count", "item", "rare"]
        assert rows(store, "item", [5]) == before
        assert rows(store, "count", [1]) == [[1.0]]


def test_thousands_of_commits_become_a_snapshot_and_the_log_stays_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monolith.ps.server.folder._LOOK_EVERY", 1)
    monkeypatch.setattr(
        "monolith.state.ModelDir.needs_snapshot", lambda folder, log: len(LogReader(log.folder).sequences()) > 10
    )
    log = LogReader(tmp_path / "log")
    added = 60
    with server(tmp_path) as made, ServerStore([made.address], [COUNT]) as store:
        add(store, 1, added)
        # A snapshot is written while updates continue. How many of them come meanwhile depends on the disk.
        while len(log.sequences()) >= 40 and added < 4000:
            add(store, 1)
            added += 1
    assert len(log.sequences()) < 40
    with server(tmp_path) as made, ServerStore([made.address]) as store:
        assert rows(store, "count", [1]) == [[float(added)]]


def test_a_server_that_is_killed_again_and_again_has_a_short_log_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "monolith.state.ModelDir.needs_snapshot", lambda folder, log: len(LogReader(log.folder).sequences()) > 10
    )
    for life in range(12):
        with server(tmp_path) as made, ServerStore([made.address], [COUNT]) as store:
            add(store, 1, 3)
            assert rows(store, "count", [1]) == [[3.0 * (life + 1)]]
            if life % 2:
                killed(made)
    assert len(LogReader(tmp_path / "log").sequences()) < 40


def test_a_damaged_folder_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    with server(tmp_path) as made, ServerStore([made.address], [COUNT]) as store:
        add(store, 1)
    newest = max((tmp_path / "log").glob("*.segment"))
    newest.write_bytes(newest.read_bytes()[:-9])
    with pytest.raises(CorruptFileError, match="the file is damaged"):
        ParameterServer(ServerConfig(folder=tmp_path))


def test_beyond_its_memory_limit_a_server_can_be_read_and_written_to_disk(tmp_path: Path) -> None:
    with server(tmp_path, None, memory_limit=400_000) as made, ServerStore([made.address], [COUNT]) as store:
        add(store, 1)
        with pytest.raises(MemoryLimitError, match="raise --memory-limit"):
            fill(store)
        held = store.stats()["count"].rows
        assert rows(store, "count", [1]) == [[1.0]]
        made._dispatcher.commit()
    with server(tmp_path, None) as made, ServerStore([made.address]) as store:
        assert store.stats()["count"].rows == held


def test_a_batch_that_an_earlier_life_of_a_worker_pushed_is_not_applied_again(tmp_path: Path) -> None:
    def push(store: ServerStore, batches: int) -> None:
        bags = Bags(table="count", ids=np.array([1]), offsets=np.array([0, 1]))
        position = Position(batches=batches, state=json.dumps({"at": batches}))
        store.apply([Gradient(bags=bags, values=torch.ones(1, 1))], position=position)

    with server(tmp_path) as made, ServerStore([made.address], [COUNT], config=W0) as store:
        for batch in (1, 2, 3):
            push(store, batch)
        before = rows(store, "count", [1])
    with (
        server(tmp_path) as made,
        ServerStore([made.address], [COUNT], config=ClientConfig(worker="w0", epoch=2)) as store,
    ):
        assert store.positions() == ([HeldPosition(batches=3, state='{"at": 3}', epoch=1)], [])
        for batch in (2, 3):
            push(store, batch)
        assert rows(store, "count", [1]) == before
        push(store, 4)
        assert rows(store, "count", [1]) != before


def test_rows_that_a_server_holds_and_does_not_own_any_more_are_there_after_a_save_and_a_crash(tmp_path: Path) -> None:
    def opened() -> tuple[ServerState, ServerFolder]:
        state = ServerState()
        state.ranges = lambda: [range(2048)]
        return state, ServerFolder(tmp_path, state)

    state, folder = opened()
    state.tables.declare([DeclaredTable(config=COUNT)])
    (table,) = state.tables.all()
    table.assign(np.arange(100), np.ones((100, 1), np.float32))
    folder.begin_save("model.ckpt-1", step=1)[2].result()
    folder.close()
    state, folder = opened()
    folder.close()
    assert folder.restored == 1
    assert len(state.tables.all()[0]) == 100
    # Somebody else gets what it owned, and nothing more.
    copy = EmbeddingTable(COUNT)
    restore_tables(tmp_path / "model.ckpt-1", [copy])
    assert 0 < len(copy) < 100
