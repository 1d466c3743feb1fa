"""Danger: a server restarts without its data, and the run continues with what is left and reports success."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith import EmbeddingBagCollection, Feature, RunConfig, Trainer
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import ServerLostError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of
from monolith.table import SGD

FEATURES = [Feature(name="user_id", dim=2, optimizer=SGD(learning_rate=0.1))]


class Clicks(nn.Module):
    def __init__(self, store: ServerStore) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(FEATURES, store)

    def forward(self, batch: dict) -> torch.Tensor:
        return self.embeddings(batch)["user_id"].sum(1)


@contextmanager
def servers(folder: Path, *numbers: int) -> Iterator[list[ParameterServer]]:
    """By default two servers; another number is a server on another disk."""
    with ExitStack() as stack:
        configs = [ServerConfig(folder=folder / "ps" / str(n)) for n in numbers or (0, 1)]
        yield [stack.enter_context(ParameterServer(config)) for config in configs]


@contextmanager
def trainer(group: list[ParameterServer], folder: Path, epoch: int) -> Iterator[Trainer]:
    config = ClientConfig(worker="w0", epoch=epoch, timeout=60.0)
    with ServerStore([server.address for server in group], tables_of(FEATURES), config=config) as store:
        yield Trainer(Clicks(store), config=RunConfig(model_dir=str(folder)))


def clicks() -> ClickStream:
    return ClickStream(ClickStreamConfig(users=50, batches=9, batch_size=32))


def train(folder: Path, *numbers: int, epoch: int, steps: int, accept: bool = False) -> int:
    with servers(folder, *numbers) as group, trainer(group, folder, epoch) as run:
        run.accepts_lost_servers = accept
        return run.fit(clicks(), steps=steps)


def test_a_server_keeps_a_log_unless_told_otherwise() -> None:
    assert ServerConfig().log_flush_secs == 0.0


def test_a_server_that_comes_back_empty_ends_the_run(tmp_path: Path) -> None:
    train(tmp_path, epoch=1, steps=1)
    # One step after the checkpoint, and the process is gone before it saves.
    with servers(tmp_path) as group, trainer(group, tmp_path, 2) as run:
        run.restore(training=True)
        run.train_step(next(iter(clicks())))
    with pytest.raises(
        ServerLostError, match=r"servers 127.0.0.1:\d+ have lost .*go back to step 1 of .*--accept-loss"
    ):
        train(tmp_path, 0, 7, epoch=3, steps=1)


def test_a_loss_that_is_accepted_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    test_a_server_that_comes_back_empty_ends_the_run(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, 0, 7, epoch=4, steps=1, accept=True) >= 2
    assert "have lost what was trained on them and go back to step 1" in caplog.text


def test_without_a_checkpoint_the_first_step_cannot_be_lost_unnoticed(tmp_path: Path) -> None:
    with servers(tmp_path) as group, trainer(group, tmp_path, 1) as run:
        for store in run.stores:
            assert isinstance(store, ServerStore)
            store.mark_initialised()
        run.train_step(next(iter(clicks())))
    shutil.rmtree(tmp_path / "ps" / "0")
    with pytest.raises(ServerLostError, match="let only them begin empty"):
        train(tmp_path, epoch=2, steps=1)


def test_a_server_that_dies_before_anything_is_trained_has_lost_nothing(tmp_path: Path) -> None:
    with servers(tmp_path) as group, trainer(group, tmp_path, 1) as run:
        for store in run.stores:
            assert isinstance(store, ServerStore)
            store.mark_initialised()
    shutil.rmtree(tmp_path / "ps" / "1")
    assert train(tmp_path, epoch=2, steps=3) == 3


def test_a_server_that_dies_after_a_restore_gets_the_same_checkpoint_again(tmp_path: Path) -> None:
    train(tmp_path, epoch=1, steps=3)
    with servers(tmp_path, 6, 7) as group, trainer(group, tmp_path, 2) as run:
        run.restore(training=True)
    assert train(tmp_path, 6, 8, epoch=3, steps=2) == 5


def test_a_run_that_has_trained_notices_that_all_servers_are_empty(tmp_path: Path) -> None:
    with servers(tmp_path) as group, trainer(group, tmp_path, 1) as run:
        run.fit(clicks(), steps=2)
        run.step += 1  # a step that no checkpoint has
        with servers(tmp_path / "others") as others, trainer(others, tmp_path, 2) as empty:
            for collection in (module for module in run.model.modules() if isinstance(module, EmbeddingBagCollection)):
                collection.use_store(empty.stores[0])
            with pytest.raises(ServerLostError):
                run.fit(clicks(), steps=1)


def test_a_server_that_was_added_has_nothing_to_lose(tmp_path: Path) -> None:
    train(tmp_path, epoch=1, steps=1)
    with servers(tmp_path) as group, trainer(group, tmp_path, 2) as run:
        run.restore(training=True)
        run.train_step(next(iter(clicks())))
    assert train(tmp_path, 0, 1, 2, epoch=3, steps=1) >= 2
