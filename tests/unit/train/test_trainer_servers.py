"""Danger: a run over servers cannot be saved, restores rows of another step than its dense layers, or counts a batch twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from counting_model import COUNTED, Counts
from monolith import EmbeddingBagCollection, Feature, RunConfig, Trainer
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import MemoryLimitError, ServerError
from monolith.ps import (
    CachedParameters,
    ClientConfig,
    ParameterServer,
    ServerConfig,
    ServerOptimizer,
    ServerStore,
    tables_of,
)
from monolith.ps.client.saving import begin_server_saves
from monolith.ps.protocol.calls import Call
from monolith.state import is_complete, read_manifest
from monolith.table import Adagrad, Bags
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.worker import client_config
from monolith.train.hooks import Hook
from monolith.transport.calls import Answer
from monolith.transport.frames import Frame

FEATURES = [Feature(name=name, dim=4, optimizer=Adagrad(learning_rate=0.1)) for name in ("user_id", "item_id")]


ROW = Bags(table="user_id", ids=np.arange(50), offsets=np.arange(51))


class Clicks(nn.Module):
    def __init__(self, store: ServerStore | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = EmbeddingBagCollection(FEATURES, store)
        self.top = nn.Linear(8, 1)

    def forward(self, batch: dict) -> torch.Tensor:
        return self.top(torch.cat([*self.embeddings(batch).values()], dim=1)).squeeze(1)


@contextmanager
def cluster(
    model_dir: Path, count: int = 2, *, first: int = 0, flush: float | None = 3600.0, limit: int | None = None
) -> Iterator[list[ParameterServer]]:
    with ExitStack() as stack:
        numbers = range(first, first + count)
        configs = [
            ServerConfig(folder=model_dir / "ps" / str(n), log_flush_secs=flush, memory_limit=limit) for n in numbers
        ]
        yield [stack.enter_context(ParameterServer(config)) for config in configs]


@contextmanager
def worker(servers: list[ParameterServer], epoch: int, name: str = "w0") -> Iterator[ServerStore]:
    config = ClientConfig(worker=name, epoch=epoch, timeout=60.0)
    with ServerStore([server.address for server in servers], tables_of(FEATURES), config=config) as store:
        yield store


def trainer(store: ServerStore | None, model_dir: Path | None, *hooks: Hook, **options: object) -> Trainer:
    model = Clicks(store)
    config = RunConfig(model_dir=None if model_dir is None else str(model_dir), **options)  # type: ignore[arg-type]
    return Trainer(model, torch.optim.Adam(model.top.parameters(), 0.01), config=config, hooks=hooks)


def clicks(batches: int = 12) -> ClickStream:
    return ClickStream(ClickStreamConfig(users=50, batches=batches, batch_size=32))


def learned(run: Trainer) -> list[float]:
    run.model.eval()
    with torch.no_grad():
        return [round(value, 6) for batch in clicks(2) for value in run.model(batch).tolist()]


@pytest.mark.parametrize("postpush", [False, True])
def test_a_run_over_servers_stops_and_goes_on_as_one_in_this_process(tmp_path: Path, postpush: bool) -> None:
    whole = trainer(None, None, enable_embedding_postpush=postpush)
    if postpush:  # where it stops, late updates are applied
        whole.fit(clicks(), steps=5)
    whole.fit(clicks() if not postpush else _from(5))
    with cluster(tmp_path) as servers, worker(servers, 1) as store:
        trainer(store, tmp_path, enable_embedding_postpush=postpush).fit(clicks(), steps=5)
        assert is_complete(tmp_path / "model.ckpt-5")
        assert len(read_manifest(tmp_path / "model.ckpt-5").parts) == 2
    # All have ended; the servers restore themselves.
    with cluster(tmp_path) as servers, worker(servers, 2) as store:
        again = trainer(store, tmp_path, enable_embedding_postpush=postpush)
        assert again.fit(clicks()) == 12
        assert learned(again) == learned(whole)


def _from(batch: int) -> ClickStream:
    stream = clicks()
    iterator = iter(stream)
    for _ in range(batch):
        next(iterator)
    rest = clicks()
    rest.load_state_dict(stream.state_dict())
    return rest


def test_a_checkpoint_goes_onto_other_servers_and_old_ones_are_removed_with_their_parts(tmp_path: Path) -> None:
    whole = trainer(None, None)
    whole.fit(clicks())
    with cluster(tmp_path) as servers, worker(servers, 1) as store:
        trainer(store, tmp_path, save_checkpoints_steps=1, checkpoints_max_to_keep=2).fit(clicks(), steps=6)
    folders = (tmp_path, tmp_path / "ps" / "0", tmp_path / "ps" / "1")
    kept, *parts = (sorted(path.name for path in folder.glob("model.ckpt-*")) for folder in folders)
    assert parts == [kept, kept]
    assert len(kept) == 2
    assert kept[-1] == "model.ckpt-6"
    with cluster(tmp_path, 3, first=7) as servers, worker(servers, 2) as store:
        again = trainer(store, tmp_path)
        assert again.fit(clicks()) == 12
        assert learned(again) == learned(whole)


def test_parts_whose_checkpoint_was_never_completed_are_removed_by_the_next(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers, worker(servers, 1) as store:
        # As by a chief that died before it had written its own part.
        begin_server_saves(store.links, tmp_path / "model.ckpt-1", step=1).finish()
        assert len(list(tmp_path.glob("ps/*/model.ckpt-1"))) == 2
        trainer(store, tmp_path).fit(clicks(), steps=2)
    assert sorted(path.name for path in tmp_path.glob("ps/*/model.ckpt-*")) == ["model.ckpt-2"] * 2


def test_a_server_that_lost_everything_is_restored_when_the_run_goes_on_and_the_others_are_not(tmp_path: Path) -> None:
    whole = trainer(None, None)
    whole.fit(clicks())
    with cluster(tmp_path, flush=None) as servers, cluster(tmp_path, 1, first=9) as spare:
        with worker(servers, 1) as store:
            run = trainer(store, tmp_path)
            run.fit(clicks(), steps=6)
        with worker([servers[0], spare[0]], 2) as store:
            run.model.embeddings.use_store(store)
            assert run.fit(clicks()) == 12
            assert store.is_initialised()
            assert learned(run) == learned(whole)


def test_going_back_takes_the_servers_along(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers, worker(servers, 1) as store:
        trainer(store, tmp_path, save_checkpoints_steps=3).fit(clicks(), steps=9)
    whole = trainer(None, None)
    whole.fit(clicks(), steps=3)
    with cluster(tmp_path) as servers, worker(servers, 2) as store:
        back = trainer(store, tmp_path, restore_to="step=3")
        assert back.restore(training=True)
        assert back.step == 3
        assert learned(back) == learned(whole)
        # Who only looks leaves the servers, which others train on, where they are.
        reader = trainer(store, tmp_path, restore_to="step=9")
        assert reader.restore()
        assert store.lookup([ROW])[0].tolist() == whole.model.embeddings.store.lookup([ROW])[0].tolist()


def counting(store: ServerStore, *, postpush: bool, resume_data: bool = True) -> tuple[Trainer, CachedParameters]:
    model = Counts(store)
    cached = CachedParameters(
        nn.ParameterDict({"batches": model.batches}), store, torch.optim.SGD([model.batches], lr=1.0)
    )
    config = RunConfig(enable_embedding_postpush=postpush, clip_norm=None, resume_data=resume_data)
    return Trainer(model, ServerOptimizer(cached), config=config), cached


@pytest.mark.parametrize(
    ("call", "postpush", "dies_at"),
    [
        (Call.APPLY_GRADIENTS, False, 1),
        (Call.APPLY_GRADIENTS, True, 5),
        (Call.APPLY_GRADIENTS, True, 12),
        (Call.APPLY_DENSE, False, 5),
        (Call.APPLY_DENSE, True, 12),
    ],
)
def test_a_successor_of_a_worker_that_died_in_a_push_counts_each_batch_once_on_every_server(
    tmp_path: Path, call: Call, postpush: bool, dies_at: int
) -> None:
    with cluster(tmp_path, flush=None) as servers:
        config = ClientConfig(worker="w0", epoch=1, timeout=60.0)
        addresses = [server.address for server in servers]
        with ServerStore(addresses, tables_of(COUNTED), config=config) as store:
            run, cached = counting(store, postpush=postpush)
            refused = next(s for s in reversed(servers) if call != Call.APPLY_DENSE or s.address == dense_at(cached))
            with refusing(refused, call, dies_at), pytest.raises(ServerError, match="as if the worker had died"):
                run.fit(clicks())
        with ServerStore(addresses, tables_of(COUNTED), config=config.model_copy(update={"epoch": 2})) as store:
            run, cached = counting(store, postpush=postpush)
            assert run.fit(clicks()) == 12
            ids = torch.cat([batch["user_id"] for batch in clicks()])
            found, times = ids.unique(return_counts=True)
            bags = Bags(table="user_id", ids=found.numpy(), offsets=np.arange(len(found) + 1))
            assert store.lookup([bags])[0].flatten().tolist() == (-times).tolist()
            assert cached.origin.read()["batches"].item() == -12
            # Asked again in the same process, it makes another pass, and that counts.
            assert run.fit(clicks()) == 24
        with ServerStore(addresses, tables_of(COUNTED), config=config.model_copy(update={"epoch": 3})) as store:
            run, cached = counting(store, postpush=postpush)
            # The servers know that the data has ended: a worker that is started again has nothing left to do.
            assert run.fit(clicks()) == 24
            assert store.lookup([bags])[0].flatten().tolist() == (-2 * times).tolist()
            assert cached.origin.read()["batches"].item() == -24
            assert run.fit(clicks(), steps=12) == 36
            assert store.lookup([bags])[0].flatten().tolist() == (-3 * times).tolist()


def test_data_of_a_launch_is_trained_once_although_a_worker_is_restarted_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(launch: str, epoch: int) -> ClientConfig:
        runner = RunnerConfig(num_ps=2, num_workers=2, uuid=launch, server_type="worker", index=1)
        return client_config(runner, epoch, launch=launch).model_copy(update={"timeout": 60.0})

    def run_in(store: ServerStore) -> Trainer:
        run, _ = counting(store, postpush=False, resume_data=False)
        run.named_by_launch = True
        return run

    ids, times = torch.cat([batch["user_id"] for batch in clicks()]).unique(return_counts=True)
    bags = Bags(table="user_id", ids=ids.numpy(), offsets=np.arange(len(ids) + 1))
    with cluster(tmp_path, flush=None) as servers:
        addresses = [server.address for server in servers]
        with (
            ServerStore(addresses, tables_of(COUNTED), config=worker("monday", 1)) as store,
            refusing(servers[-1], Call.APPLY_GRADIENTS, 7),
            pytest.raises(ServerError, match="as if the worker had died"),
        ):
            run_in(store).fit(clicks())
        for launch, epoch, passes in (("monday", 2, 1), ("monday", 3, 1), ("tuesday", 4, 2)):
            with ServerStore(addresses, tables_of(COUNTED), config=worker(launch, epoch)) as store:
                caplog.clear()
                with caplog.at_level("INFO"):
                    run_in(store).fit(clicks())
                told = [message for message in caplog.messages if message.startswith("continuing after batch")]
                again = r"continuing after batch \d+ of this worker; repeating 1 that not all servers have"
                assert [bool(re.fullmatch(again, message)) for message in told] == {2: [True], 3: [False], 4: []}[epoch]
                assert store.lookup([bags])[0].flatten().tolist() == (-passes * times).tolist()


def dense_at(cached: CachedParameters) -> str:
    return cached.origin._routes._link_of["batches"].address


@contextmanager
def refusing(server: ParameterServer, call: Call, batch: int) -> Iterator[None]:
    """Pushes of one batch do not reach one server."""
    dispatcher, real = server._dispatcher, server._dispatcher._called

    def called(frame: Frame) -> Answer:
        if frame.call == call and json.loads(frame.text)["position"]["batches"] == batch:
            raise ServerError("as if the worker had died")
        return real(frame)

    dispatcher._called = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        dispatcher._called = real  # type: ignore[method-assign]


def test_a_server_without_room_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with cluster(tmp_path, limit=700_000) as servers, worker(servers, 1) as store:
        run = trainer(store, tmp_path)
        many = ClickStream(ClickStreamConfig(users=100_000, items=100_000, batches=200, batch_size=512))
        with pytest.raises(MemoryLimitError, match="raise --memory-limit"):
            run.fit(many)
        assert run.step > 0
        assert is_complete(tmp_path / f"model.ckpt-{run.step}")
    with cluster(tmp_path) as servers, worker(servers, 2) as store:
        again = trainer(store, tmp_path)
        assert again.restore(training=True)
        assert again.step == run.step


def test_workers_without_a_model_dir_save_nothing_and_leave_the_servers_as_they_are(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers, worker(servers, 1, "w1") as store:
        trainer(store, None).fit(clicks(), steps=2)
        assert not store.is_initialised()
    assert not list(tmp_path.glob("**/model.ckpt-*"))


def test_the_simple_store_of_one_server_tells_positions_too(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as (server,):
        for epoch in (1, 2):
            config = ClientConfig(worker="w0", epoch=epoch, timeout=60.0)
            with ServerStore([server.address], tables_of(FEATURES), config=config) as store:
                assert trainer(store, None).fit(clicks(), steps=4) == 4 * epoch
