"""Danger: a checkpoint of servers that misses rows, mixes moments, or fits only as many servers as have written it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable
from monolith.cli import main
from monolith.errors import (
    CheckpointMismatchError,
    CorruptFileError,
    InvalidArgumentError,
    SaveInterruptedError,
    StorageError,
)
from monolith.original import PartialRecoverySaver, PsMonitor
from monolith.ps import (
    ClientConfig,
    DenseOptimizer,
    ParameterServer,
    ServerConfig,
    ServerParameters,
    ServerStore,
)
from monolith.ps.client.saving import RemoteLog, begin_server_saves, prepare_servers, server_shards
from monolith.ps.client.server_group import ServerGroup
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ps.server.folder import ServerFolder
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.state import inspect_checkpoint, is_complete, read_manifest, read_row, remove_checkpoint, restore_tables
from monolith.state.snapshot import OpenSnapshot
from monolith.table import Adagrad, Bags, Gradient, Segment, SlidingAdmission, TableConfig, bucket_of
from same_port import started_again

ITEM = TableConfig(name="item", segments=(Segment(dim=2, optimizer=Adagrad(learning_rate=0.5)),))
IDS = np.arange(500)


@contextmanager
def servers(
    model_dir: Path,
    count: int,
    *,
    tables: Sequence[TableConfig | DeclaredTable] = (ITEM,),
    first: int = 0,
    flush: float | None = 0.0,
) -> Iterator[ServerStore]:
    """Servers with folders `ps/<first>` and so on, and a store over them."""
    with ExitStack() as stack:
        folders = [model_dir / "ps" / str(number) for number in range(first, first + count)]
        configs = [ServerConfig(folder=folder, log_flush_secs=flush) for folder in folders]
        made = [stack.enter_context(ParameterServer(config)) for config in configs]
        config = ClientConfig(worker="w0", timeout=60.0)
        yield stack.enter_context(ServerStore([server.address for server in made], tables, config=config))


def bags(ids: np.ndarray = IDS) -> Bags:
    return Bags(table="item", ids=ids, offsets=np.arange(len(ids) + 1))


def train(store: ServerStore, times: int = 1) -> None:
    for _ in range(times):
        store.apply([Gradient(bags=bags(), values=torch.ones(len(IDS), 2))])


def values(store: ServerStore) -> list[list[float]]:
    found: list[list[float]] = store.lookup([bags()])[0].tolist()
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_checkpoint_restores_onto_any_number_of_servers_and_training_goes_on_alike(
    tmp_path: Path, count: int
) -> None:
    with servers(tmp_path, 2) as store:
        origin = ServerParameters(
            store, {"a": torch.ones(5), "b": torch.ones(2)}, DenseOptimizer.of(torch.optim.Adam, lr=0.1)
        )
        train(store, 3)
        origin.apply({"a": torch.ones(5), "b": torch.ones(2)})
        store.save(tmp_path / "model.ckpt-3")
        saved = values(store)
        train(store)
        origin.apply({"a": torch.ones(5), "b": torch.ones(2)})
        expected = values(store), origin.read()
    assert len(read_manifest(tmp_path / "model.ckpt-3").parts) == 2
    with servers(tmp_path, count, first=10) as store:
        assert not store.is_initialised()
        store.restore(tmp_path / "model.ckpt-3")
        assert store.is_initialised()
        assert values(store) == saved
        assert store.stats()["item"].rows == len(IDS)
        origin = ServerParameters(
            store, {"a": torch.zeros(5), "b": torch.zeros(2)}, DenseOptimizer.of(torch.optim.Adam, lr=0.1)
        )
        assert not origin.created
        train(store)
        origin.apply({"a": torch.ones(5), "b": torch.ones(2)})
        assert values(store) == expected[0]
        assert all(torch.equal(value, expected[1][name]) for name, value in origin.read().items())
        # What was restored is saved again, with dense parameters that are on one server now.
        store.save(tmp_path / "model.ckpt-4")
    with servers(tmp_path, 2, first=20) as store:
        store.restore(tmp_path / "model.ckpt-4")
        origin = ServerParameters(
            store, {"a": torch.zeros(5), "b": torch.zeros(2)}, DenseOptimizer.of(torch.optim.Adam, lr=0.1)
        )
        assert values(store) == expected[0]
        assert all(torch.equal(value, expected[1][name]) for name, value in origin.read().items())


def test_what_was_restored_survives_the_server_and_goes_on_in_its_log(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as store:
        train(store, 2)
        store.save(tmp_path / "model.ckpt-2")
        saved = values(store)
        train(store, 3)
        store.restore(tmp_path / "model.ckpt-2")
        assert values(store) == saved
    with servers(tmp_path, 2) as store:
        assert store.is_initialised()
        assert [health["restored"] != 0 for health in store.health()] == [True, True]
        assert values(store) == saved
        train(store)
        store.save(tmp_path / "model.ckpt-3")
        expected = values(store)
    with servers(tmp_path, 2) as store:
        assert values(store) == expected


def test_a_server_that_dies_before_a_restore_is_durable_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(folder: ServerFolder) -> OpenSnapshot:
        raise StorageError("as if it had died")

    with servers(tmp_path, 1, flush=None) as store:
        train(store)
        store.save(tmp_path / "model.ckpt-1")
        store.mark_initialised()
        train(store)
        monkeypatch.setattr(ServerFolder, "_write_snapshot", die)
        with pytest.raises(StorageError, match="as if it had died"):
            store.restore(tmp_path / "model.ckpt-1")
        # Nor does a commit, which would hold nothing but what changed since, make it whole.
        train(store)
        with pytest.raises(StorageError, match="as if it had died"):
            RemoteLog(store.links[0]).flush()
        monkeypatch.undo()
    with servers(tmp_path, 1) as store:
        assert not store.is_initialised()
        store.restore(tmp_path / "model.ckpt-1")
    with servers(tmp_path, 1) as store:
        assert store.is_initialised()


def test_only_servers_that_lost_their_state_are_restored(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as store:
        train(store)
        store.mark_initialised()
        store.save(tmp_path / "model.ckpt-1")
        saved = values(store)
        train(store)
        kept = values(store)
        with ParameterServer(ServerConfig(restore_roots=(str(tmp_path),))) as fresh:
            mixed = ServerStore(
                [store.addresses[0], fresh.address], [ITEM], config=ClientConfig(worker="w1", timeout=60.0)
            )
            mixed.prepare_restore(tmp_path / "model.ckpt-1", only_fresh=True)()
            lost = bucket_of(IDS) >= 2048
            assert values(mixed) == [saved[i] if lost[i] else kept[i] for i in range(len(IDS))]
            mixed.close()


def test_the_saver_of_variables_saves_and_recovers_servers(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as store:
        saver = PartialRecoverySaver({"rows": store}, ps_monitor=PsMonitor(server_shards(store.links)))
        train(store)
        saver.setup_ps_initialized_state()
        path = saver.save(tmp_path / "ckpt", global_step=1)
        assert path is not None
        saved = values(store)
        train(store)
        kept = values(store)
        saver.restore(path)
        assert values(store) == kept
    with servers(tmp_path, 3, first=5) as store:
        PartialRecoverySaver({"rows": store}, ps_monitor=PsMonitor(server_shards(store.links))).restore(path)
        assert values(store) == saved


def test_pushes_go_on_while_servers_save_and_each_part_is_of_one_moment(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as store:
        train(store)
        stop = threading.Event()

        def push() -> None:
            while not stop.is_set():
                train(store)

        pushing = threading.Thread(target=push)
        pushing.start()
        try:
            for step in range(1, 4):
                store.save(tmp_path / f"model.ckpt-{step}")
        finally:
            stop.set()
            pushing.join()
    table = EmbeddingTable(ITEM)
    for step in range(1, 4):
        restore_tables(tmp_path / f"model.ckpt-{step}", [table])
        rows = table.lookup(torch.from_numpy(IDS))
        # All rows of a server had the same gradients: whatever the moment of its cut, they are equal up to where they began.
        for part in (0, 1):
            entries = table.lookup_entry(torch.from_numpy(IDS[_of_part(part)]))
            (slots,) = {tuple(slot.flatten().tolist()) for slot in entries.slots.values()} or {()}
            assert len(set(slots)) == 1
        assert len(rows) == len(IDS)


def _of_part(part: int) -> np.ndarray:
    mask: np.ndarray = (bucket_of(IDS) >= 2048) == bool(part)
    return mask


def test_a_server_without_a_folder_cannot_be_saved_and_says_what_to_do(tmp_path: Path) -> None:
    with ParameterServer() as server, ServerStore([server.address], [ITEM]) as store:
        with pytest.raises(InvalidArgumentError, match="start it with --folder"):
            store.save(tmp_path / "model.ckpt-1")
        assert store.stats()["item"].rows == 0
    assert not is_complete(tmp_path / "model.ckpt-1")


def test_a_save_that_a_server_does_not_live_to_finish_is_said_to_be_that_and_can_be_made_again(tmp_path: Path) -> None:
    server = ParameterServer(ServerConfig(folder=tmp_path / "ps"))
    with ServerStore([server.address], [ITEM]) as store:
        train(store)
        saves = begin_server_saves(store.links, tmp_path / "model.ckpt-1", step=1)
        server.close()
        server = started_again(ServerConfig(folder=tmp_path / "ps", port=server.port))
        with pytest.raises(SaveInterruptedError, match=f"started again.*{server.address}"):
            saves.finish()
        store.save(tmp_path / "model.ckpt-2")
    server.close()
    assert is_complete(tmp_path / "model.ckpt-2")


def test_a_server_whose_rows_are_on_their_way_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, 2) as store:
        train(store)
        store.save(tmp_path / "model.ckpt-1")
        train(store)
        now = values(store)
        with monkeypatch.context() as moving:
            moving.setattr(OwnedBuckets, "giving", property(lambda owned: "a piece"))
            with pytest.raises(InvalidArgumentError, match="being moved; try again"):
                store.restore(tmp_path / "model.ckpt-1")
        assert values(store) == now
        store.restore(tmp_path / "model.ckpt-1")
        assert values(store) != now


def test_a_restore_that_one_server_cannot_make_changes_none(tmp_path: Path) -> None:
    other = ITEM.model_copy(update={"name": "other"})
    with servers(tmp_path, 2) as store:
        train(store)
        store.save(tmp_path / "model.ckpt-1")
        train(store)
        now = values(store)
        # The second server alone has a table that was not saved.
        with (
            ServerGroup([store.addresses[1]], [other]),
            pytest.raises(CheckpointMismatchError, match=r"'other'.*not in the checkpoint"),
        ):
            store.restore(tmp_path / "model.ckpt-1")
        assert values(store) == now


def test_removing_a_checkpoint_removes_its_parts_and_a_missing_part_makes_it_incomplete(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as store:
        train(store)
        for step in (1, 2):
            store.save(tmp_path / f"model.ckpt-{step}")
    remove_checkpoint(tmp_path / "model.ckpt-1")
    assert sorted(path.name for path in tmp_path.glob("ps/*/model.ckpt-*")) == sorted(
        Path(entry.name).parent.name for entry in read_manifest(tmp_path / "model.ckpt-2").parts
    )
    assert is_complete(tmp_path / "model.ckpt-2")
    part = tmp_path / read_manifest(tmp_path / "model.ckpt-2").parts[1].name
    assert str(part).startswith(f"{tmp_path}/ps/1/model.ckpt-2.")
    part.write_bytes(part.read_bytes().replace(b'"step":0', b'"step":7'))
    with pytest.raises(CorruptFileError, match="its checksum is wrong"):
        restore_tables(tmp_path / "model.ckpt-2", [EmbeddingTable(ITEM)])
    part.unlink()
    assert not is_complete(tmp_path / "model.ckpt-2")


def test_a_checkpoint_of_servers_can_be_looked_at_and_read_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with servers(tmp_path, 2) as store:
        train(store)
        store.save(tmp_path / "model.ckpt-1")
        expected = values(store)
    found = inspect_checkpoint(tmp_path / "model.ckpt-1")
    assert found.problem is None
    assert found.tables["item"].rows == len(IDS)
    assert [Path(part.path).parent for part in found.parts] == [tmp_path / "ps" / number for number in "01"]
    row = read_row(tmp_path / "model.ckpt-1", "item", 7)
    assert row is not None
    assert row.values[0].tolist() == expected[7]
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    assert [point["parts"] for point in json.loads(capsys.readouterr().out)["restore_points"]] == [2]
    assert main(["inspect", str(tmp_path / "model.ckpt-1"), "--json"]) == 0
    assert [part["path"] for part in json.loads(capsys.readouterr().out)["parts"]] == [p.path for p in found.parts]


def test_counts_of_admission_filters_follow_their_servers(tmp_path: Path) -> None:
    table = DeclaredTable(config=ITEM, admission=SlidingAdmission(default_threshold=2, capacity=30_000))
    with servers(tmp_path, 2, tables=[table]) as store:
        train(store, 2)
        assert store.stats()["item"].rows == 0
        store.save(tmp_path / "model.ckpt-1")
    with servers(tmp_path, 2, tables=[table], first=4) as store:
        store.restore(tmp_path / "model.ckpt-1")
        train(store)
        assert store.stats()["item"].rows > 0.9 * len(IDS)


def test_a_checkpoint_of_other_tables_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as store:
        train(store)
        store.save(tmp_path / "model.ckpt-1")
    wider = ITEM.model_copy(update={"segments": (Segment(dim=3, optimizer=Adagrad(learning_rate=0.5)),)})
    wrong = pytest.raises(CheckpointMismatchError, match="has dim 3, saved with 2")
    with servers(tmp_path, 1, tables=[wider], first=3) as store, wrong:
        store.restore(tmp_path / "model.ckpt-1")


def test_a_filter_of_another_size_is_reset_only_when_asked_for(tmp_path: Path) -> None:
    def filtered(capacity: int) -> list[DeclaredTable]:
        return [DeclaredTable(config=ITEM, admission=SlidingAdmission(capacity=capacity, default_threshold=1))]

    with servers(tmp_path, 1, tables=filtered(1000)) as store:
        train(store, 2)
        store.save(tmp_path / "model.ckpt-1")
        saved = values(store)
    with servers(tmp_path, 1, tables=filtered(2000), first=10) as store:
        with pytest.raises(CheckpointMismatchError, match="reset_admission"):
            store.restore(tmp_path / "model.ckpt-1")
        prepare_servers(store.links, tmp_path / "model.ckpt-1", reset_admission=True)()
        assert values(store) == saved
