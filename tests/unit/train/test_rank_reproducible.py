"""Danger: the bits of a reproducible run depend on the number of ranks, or on where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError
from monolith.train import Estimator, RunConfig, RunnerConfig
from rank_runs import Batches, RankRun, Trained, rows_of
from training import ClickModel, batch_of


class Restless(ClickModel):
    """The model of the tests with running statistics. What is random is tested with processes: threads share a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(13, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def uneven(number: int) -> dict[str, Any]:
    return batch_of(number, rows=3 + 5 * (number % 3))


RUN = RankRun(
    model=Restless,
    source=lambda: Batches(22, uneven),
    run={"clip_norm": 0.3, "event_time": "time", "seed": 3, "save_checkpoints_secs": 0},
    runner={"micro_batches": 4},
)


def state_of(trained: list[Trained]) -> dict[str, Tensor]:
    """Every number that a run has, with the state of all optimizers."""
    found = dict(trained[0].dense)
    optimizer = trained[0].trainer.optimizer
    assert optimizer is not None
    for number, slots in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{name}": torch.as_tensor(value) for name, value in slots.items()}
    rows = rows_of(trained)
    return found | {f"{table}/{name}": column for table in rows for name, column in rows[table].items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    trained = RUN.ranks(1)
    assert trained[0].step == 6, "22 batches of 4 shards, of which the last two have one less"
    return state_of(trained)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bits_do_not_depend_on_the_number_of_ranks(ranks: int, expected: dict[str, Tensor]) -> None:
    trained = RUN.ranks(ranks)
    assert_same_bits(expected, state_of(trained))
    assert all(one.losses == trained[0].losses for one in trained)


def test_one_process_has_the_same_bits(expected: dict[str, Tensor]) -> None:
    trainer = RUN.trainer()
    runner = RunnerConfig(is_local=True, micro_batches=4)
    estimator = Estimator(trainer.model, RunConfig(**RUN.run), optimizer=trainer.optimizer, runner=runner)
    assert estimator.train(RUN.source()) == 6
    store: Any = estimator.trainer.stores[0]
    assert_same_bits(expected, state_of([Trained(6, estimator.trainer, [], dict(store.local.tables))]))
    estimator.close()


@pytest.mark.parametrize("worlds", [(4, 2, 1), (1, 4, 2)])
def test_a_run_may_continue_with_any_number_of_ranks(
    worlds: tuple[int, ...], expected: dict[str, Tensor], tmp_path: Path
) -> None:
    for ranks, until in zip(worlds, (2, 4, None), strict=True):
        run = RankRun(
            model=Restless,
            source=RUN.source,
            run={**RUN.run, "model_dir": str(tmp_path)},
            runner=RUN.runner,
            train={} if until is None else {"max_steps": until},
        )
        trained = run.ranks(ranks)
    assert_same_bits(expected, state_of(trained))


@pytest.mark.parametrize(
    ("runner", "run", "said"),
    [
        ({"data_shards": 8}, {}, "data_shards: 8 cannot be used with micro_batches"),
        ({"dense_backend": "gloo"}, {}, "dense_backend: 'gloo' cannot be used"),
        ({"dense_wire": "float16"}, {}, "dense_wire: 'float16' cannot be used"),
        ({"use_dataservice": True}, {}, "use_dataservice: True cannot be used"),
        ({"micro_batches": 3}, {}, "expected a multiple of the 2 ranks, got 3"),
        ({}, {"enable_embedding_postpush": True}, "enable_embedding_postpush, .* cannot be used"),
        ({"enable_pipelined_fwda2a": True}, {}, "enable_pipelined_fwda2a cannot be used"),
    ],
)
def test_what_would_change_the_bits_is_refused(runner: dict[str, Any], run: dict[str, Any], said: str) -> None:
    wrong = RankRun(source=RUN.source, run=run, runner={"micro_batches": 4, **runner})
    with pytest.raises(ConfigError, match=said):
        wrong.ranks(2)


def test_data_that_cannot_be_divided_is_refused() -> None:
    wrong = RankRun(source=lambda: [batch_of(0)], runner={"micro_batches": 4})
    with pytest.raises(ConfigError, match=r"a list has no shard\(index, count\)"):
        wrong.ranks(2)


def test_fewer_ranks_that_micro_batches_cannot_be_dealt_to_are_refused_before_any_is_lost() -> None:
    RunnerConfig(num_workers=4, micro_batches=12, min_ranks=2).require_ranks()
    RunnerConfig(num_workers=2, micro_batches=4, min_ranks=1).require_ranks()
    with pytest.raises(
        ConfigError, match=r"min_ranks: with 2, the run may continue with 3 of 4 ranks, .*micro_batches=4"
    ):
        RunnerConfig(num_workers=4, micro_batches=4, min_ranks=2).require_ranks()
