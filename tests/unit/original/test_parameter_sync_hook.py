"""Danger: a run with `ParameterSyncHook` whose serving targets are not what was trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from followed_tables import rows_of, until
from followed_tables import table as trained_table
from followed_tables import train as train_rows
from monolith import Estimator
from monolith.errors import DiscoveryError, InvalidArgumentError
from monolith.follow import Feed
from monolith.original import ParameterSyncHook, ParameterSyncServer
from monolith.original.assign_signatures import target_tables
from monolith.original.parameter_sync_hook import ParameterSyncThread
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.serve import Predictor, export_model, load
from monolith.table import EmbeddingTable
from monolith.train import RunConfig, Trainer
from monolith.train.hooks import Hook
from monolith.transport.server import ListenConfig
from rank_runs import RankRun
from training import ClickModel, batch_of


class Targets:
    """A back end that tests change."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.asked: list[str] = []
        self.fails = False

    def get_sync_targets(self, sub_graph: str) -> tuple[str, Sequence[str]]:
        self.asked.append(sub_graph)
        if self.fails:
            raise DiscoveryError("the back end is gone")
        return sub_graph, self.addresses


def trainer_of(model: ClickModel, *hooks: Hook, **config: object) -> Trainer:
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config=RunConfig(feed_secs=0.01, **config),
        hooks=hooks,
    )


def exported(model: ClickModel, folder: Path) -> Predictor:
    return load(export_model(model, batch_of(0), folder, heads=model.heads))


def rows(predictor: Predictor) -> dict[str, dict[int, tuple[float, ...]]]:
    return {name: rows_of(copies[0]) for name, copies in target_tables(predictor).items()}


def trained(trainer: Trainer) -> dict[str, dict[int, tuple[float, ...]]]:
    return {name: rows_of(shards[0]) for name, shards in trainer.tables().items()}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_a_target_has_the_rows_of_the_run_when_it_ends(stack: ExitStack, tmp_path: Path) -> None:
    model = ClickModel()
    predictor = exported(model, tmp_path)
    target = stack.enter_context(ParameterSyncServer(target_tables(predictor)))
    backend = Targets(target.address)
    trainer = trainer_of(model, ParameterSyncHook(backend, 3))
    trainer.fit([batch_of(number) for number in range(20)])
    assert any(rows(predictor).values())
    assert rows(predictor) == trained(trainer)
    assert set(backend.asked) == {"ps_3"}


def test_it_shares_the_feed_of_the_run_with_replicas_that_follow(stack: ExitStack, tmp_path: Path) -> None:
    model = ClickModel()
    predictor = exported(model, tmp_path / "export")
    target = stack.enter_context(ParameterSyncServer(target_tables(predictor)))
    config = RunConfig(model_dir=str(tmp_path / "run"), feed_secs=0.01)
    estimator = Estimator(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    estimator.train([batch_of(number) for number in range(20)], hooks=[ParameterSyncHook(Targets(target.address), 0)])
    assert rows(predictor) == trained(estimator.trainer)
    # The run publishes from its first step when it is started again, as after any follower.
    assert (tmp_path / "run" / "followed").exists()


class Pushing:
    """A table that is pushed by a thread, and a clock that the test moves."""

    def __init__(self, stack: ExitStack, backend: Targets) -> None:
        self.now, self.table = 0.0, trained_table()
        self.feed = Feed(lambda: {"item": self.table}, every=0.01)
        stack.callback(self.feed.close)
        self.thread = ParameterSyncThread(self.feed, backend, 0, clock=lambda: self.now)
        stack.callback(self.thread.close)


def served(stack: ExitStack) -> tuple[ParameterSyncServer, EmbeddingTable]:
    one = trained_table(mode="serving")
    return stack.enter_context(ParameterSyncServer({"item": [one]})), one


def test_rows_arrive_while_the_run_goes_on(stack: ExitStack) -> None:
    target, copy = served(stack)
    pushing = Pushing(stack, Targets(target.address))
    for seed in range(3):
        train_rows(pushing.table, [1, 2, seed], seed)
        until(lambda: rows_of(copy) == rows_of(pushing.table))


def test_targets_are_queried_again_after_100_seconds(stack: ExitStack) -> None:
    target, copy = served(stack)
    backend = Targets()
    pushing = Pushing(stack, backend)
    train_rows(pushing.table, [1])
    until(lambda: backend.asked)
    backend.addresses = [target.address]
    pushing.now = 99.0
    train_rows(pushing.table, [2])
    before = pushing.feed.newest
    until(lambda: pushing.feed.newest >= before)
    assert len(backend.asked) == 1
    pushing.now = 100.0
    until(lambda: rows_of(copy) == rows_of(pushing.table))
    assert len(backend.asked) == 2


def test_a_query_that_fails_does_not_lose_the_targets(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    target, copy = served(stack)
    backend = Targets(target.address)
    pushing = Pushing(stack, backend)
    train_rows(pushing.table, [1])
    until(lambda: rows_of(copy) == rows_of(pushing.table))
    backend.fails = True
    with caplog.at_level(logging.WARNING):
        pushing.now = 200.0
        until(lambda: len(backend.asked) == 2)
        train_rows(pushing.table, [2], seed=1)
        until(lambda: rows_of(copy) == rows_of(pushing.table))
    assert "those known before are used" in caplog.text


def test_the_rows_of_a_parameter_server_are_pushed_by_its_process(stack: ExitStack) -> None:
    target, copy = served(stack)
    server = stack.enter_context(ParameterServer(ServerConfig(feed_secs=0.01)))
    store = stack.enter_context(ServerStore([server.address]))
    store.declare([copy.config.model_copy(update={"mode": "training"})])
    store.assign("item", [1, 2], torch.ones(2, 4))
    thread = ParameterSyncThread(server.feed, Targets(target.address), 0)
    stack.callback(thread.close)
    until(lambda: len(copy) == 2)
    store.assign("item", [2], torch.zeros(1, 4))
    until(lambda: rows_of(copy) == {1: (1.0,) * 4, 2: (0.0,) * 4})


def test_each_rank_pushes_its_own_rows(stack: ExitStack, tmp_path: Path) -> None:
    predictor = exported(ClickModel(), tmp_path / "export")
    target = stack.enter_context(ParameterSyncServer(target_tables(predictor)))
    backends = [Targets(target.address), Targets(target.address)]
    run = RankRun(
        run={"feed_secs": 0.01, "model_dir": str(tmp_path / "run")},
        runner={"model_dir": str(tmp_path / "run")},
        hooks=lambda rank: [ParameterSyncHook(backends[rank], rank)],
    )
    ranks = run.ranks(2)
    wanted = {name: rows_of(ranks[0].tables[name]) | rows_of(ranks[1].tables[name]) for name in ranks[0].tables}
    assert all(rows_of(one.tables["user"]) for one in ranks)
    assert rows(predictor) == wanted
    assert [set(backend.asked) for backend in backends] == [{"ps_0"}, {"ps_1"}]


def test_a_target_that_was_started_again_has_all_rows_when_the_run_ends(stack: ExitStack) -> None:
    target, copy = served(stack)
    pushing = Pushing(stack, Targets(target.address))
    train_rows(pushing.table, [1, 2])
    until(lambda: len(copy) == 2)
    target.close()
    again = trained_table(mode="serving")
    stack.enter_context(ParameterSyncServer({"item": [again]}, ListenConfig(port=target.port)))
    train_rows(pushing.table, [3])
    assert pushing.thread.close()
    assert rows_of(again) == rows_of(pushing.table)


def test_a_target_that_does_not_answer_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ParameterSyncServer({"item": [trained_table(mode="serving")]}) as target:
        pass
    trainer = trainer_of(ClickModel(), ParameterSyncHook(Targets(target.address), 0))
    with caplog.at_level(logging.WARNING):
        assert trainer.fit([batch_of(number) for number in range(3)]) == 3
    assert "not all targets" in caplog.text


def test_a_run_whose_rows_are_elsewhere_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(ClickModel(), ParameterSyncHook(Targets(), 0))
    monkeypatch.setattr(trainer, "tables", dict)  # as in a run over servers
    with pytest.raises(InvalidArgumentError, match="serve --run"):
        trainer.fit([batch_of(0)])


@pytest.mark.parametrize(("index", "interval"), [(-1, 100), (0, -1), (0, float("nan"))])
def test_wrong_arguments_are_refused(index: int, interval: float) -> None:
    with pytest.raises(InvalidArgumentError, match="ps_index, refresh_interval"):
        ParameterSyncHook(Targets(), index, interval)
