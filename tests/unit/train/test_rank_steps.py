"""Danger: ranks train something else than one process with the whole global batch, or go apart from each other."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import cluster_job
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.data.transforms.rows import concat_rows
from monolith.errors import ConfigError, RanksDisagreeError
from monolith.nn import embedding_collections
from monolith.table import EmbeddingTable, LocalStore
from monolith.testing.rank_threads import run_ranks
from monolith.train import Estimator, RunnerConfig, Trainer
from rank_runs import Batches, MeanModel, RankRun, Trained, global_batches, rows_of, rows_of_model
from training import ClickModel, batch_of


def uneven(number: int) -> dict[str, object]:
    return batch_of(number, rows=3 + 5 * (number % 3))  # type: ignore[return-value]


def alone(run: RankRun, batches: list[dict[str, object]]) -> Trained:
    trainer = run.trainer()
    step = trainer.fit(batches)  # type: ignore[arg-type]
    return Trained(step, trainer, [], {})


def assert_close(trained: list[Trained], one: Trained) -> None:
    assert [rank.step for rank in trained] == [one.step] * len(trained)
    for rank in trained[1:]:
        assert {
            name: torch.equal(rank.dense[name], values) for name, values in trained[0].dense.items()
        } == dict.fromkeys(trained[0].dense, True)
    for name, values in one.dense.items():
        torch.testing.assert_close(trained[0].dense[name], values, rtol=1e-5, atol=1e-6)
    rows, expected = rows_of(trained), rows_of_model(one.trainer.model)
    assert rows.keys() == expected.keys()
    for table, columns in expected.items():
        assert torch.equal(rows[table]["ids"], columns["ids"])
        for name, values in columns.items():
            torch.testing.assert_close(rows[table][name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "config",
    [
        {"clip_norm": None},
        {"clip_norm": 0.3},
        {"clip_norm": 0.2, "clip_type": "dense_and_sparse", "sparse_clip_norm": 0.05},
        {"clip_norm": 0.1, "clip_type": "norm"},
        {"clip_norm": 0.01, "clip_type": "value"},
        {"dense_weight_decay": 0.1, "event_time": "time"},
    ],
    ids=["unclipped", "global_norm", "dense_and_sparse", "norm", "value", "decay"],
)
@pytest.mark.parametrize("model", [ClickModel, MeanModel])
def test_ranks_do_what_one_process_does_with_the_whole_batch(
    model: type[ClickModel], ranks: int, config: dict[str, object]
) -> None:
    run = RankRun(model=model, source=lambda: Batches(10, uneven), run=config)
    assert_close(run.ranks(ranks), alone(run, global_batches(10, ranks, uneven)))


@pytest.mark.parametrize("model", [ClickModel, MeanModel])
def test_the_result_of_a_step_is_that_of_the_global_batch(model: type[ClickModel]) -> None:
    run = RankRun(model=model, source=lambda: Batches(4, uneven), run={"clip_norm": 1.0})
    first, second = run.ranks(2)
    trainer = run.trainer()
    expected = [trainer.train_step(batch).mean_loss for batch in global_batches(4, 2, uneven)]
    assert first.losses == second.losses == pytest.approx(expected, rel=1e-5)


class Regularized(nn.Linear):
    def auxiliary_loss(self) -> torch.Tensor:
        return self.weight.square().sum()


class Regular(ClickModel):
    """With a layer that has a loss of its own, which counts once in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Regularized(13, 8), nn.ReLU(), nn.Linear(8, 2))


def test_losses_of_layers_count_once() -> None:
    run = RankRun(model=Regular, source=lambda: Batches(6, uneven))
    assert_close(run.ranks(3), alone(run, global_batches(6, 3, uneven)))


def test_heads_that_are_reduced_differently_are_refused() -> None:
    class Mixed(ClickModel):
        heads = (ClickModel.heads[0], MeanModel.heads[1])

    with pytest.raises(ConfigError, match="heads: expected one reduction"):
        RankRun(model=Mixed).ranks(2)


def test_the_auc_is_that_of_one_process_with_the_same_global_batch() -> None:
    config = ClickStreamConfig(users=20, items=20, batches=300, batch_size=64)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return cluster_job.ClickModel()

    run = RankRun(model=model, source=lambda: ClickStream(config))
    held_out = list(ClickStream(config.model_copy(update={"batches": 330})))[300:]

    def auc(trainer: Trainer, tables: Mapping[str, EmbeddingTable]) -> float:
        (collection,) = embedding_collections(trainer.model)
        collection.store = LocalStore(tables.values())
        return Estimator(trainer.model, runner=RunnerConfig(is_local=True)).evaluate(held_out)["output/auc"]

    trained = run.ranks(2)
    (collection,) = embedding_collections(trained[0].trainer.model)
    whole = {table.config.name: EmbeddingTable(table.config) for table in collection.declaration.tables}
    for name, columns in rows_of(trained).items():
        whole[name].assign(columns["ids"], columns["values"])
    trainer, batches = run.trainer(), list(ClickStream(config))
    trainer.fit([concat_rows(batches[first : first + 2]) for first in range(0, 300, 2)])
    expected = auc(trainer, dict(trainer.stores[0].tables))
    assert expected > 0.55, "it has learned something"
    assert auc(trained[0].trainer, whole) == pytest.approx(expected, abs=1e-4)


def test_ranks_with_different_models_are_told_what_differs() -> None:
    class Wider(ClickModel):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(13, 9), nn.ReLU(), nn.Linear(9, 2))

    run, other = RankRun(), RankRun(model=Wider)
    trainers = [run.trainer(), other.trainer(chief=False)]
    said = r"rank 1 has another model than rank 0: mlp\.0\.weight is float32\[9, 13\] here and float32\[8, 13\] there"
    with pytest.raises(RanksDisagreeError, match=said):
        run_ranks(2, lambda mesh: (run, other)[mesh.rank].on(mesh, trainers[mesh.rank]))
