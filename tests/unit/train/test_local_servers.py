"""Danger: a run with servers in its own process, for debugging, trains something else, or does not end them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import ConfigError, UnavailableError
from monolith.features import Batch, Feature
from monolith.nn import EmbeddingBagCollection
from monolith.ps import ClientConfig, ServerStore
from monolith.table import Adagrad
from monolith.train import Estimator, RunConfig, RunnerConfig

COLUMNS = ("user_id", "item_id")


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=4, optimizer=Adagrad(learning_rate=0.1)) for name in COLUMNS]
        )
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(torch.cat(list(self.embeddings(batch).values()), dim=1)).squeeze(1)  # type: ignore[no-any-return,arg-type]

    def input_fn(self, mode: str) -> ClickStream:
        return ClickStream(ClickStreamConfig(users=50, items=50, batches=12, batch_size=16))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive() or thread.daemon, thread


def estimator(num_ps: int, model_dir: Path | None = None) -> Estimator:
    config = RunConfig(model_dir=None if model_dir is None else str(model_dir))
    return Estimator(Clicks(), config, runner=RunnerConfig(is_local=True, num_ps=num_ps))


def test_the_same_is_trained_as_without_servers() -> None:
    with closing(estimator(0)) as alone, closing(estimator(2)) as served:
        assert alone.train(steps=8) == served.train(steps=8) == 8
        for mine, theirs in zip(served.model.parameters(), alone.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        (store,) = served.trainer.stores
        assert isinstance(store, ServerStore)
        assert len(store.addresses) == 2
        assert all(one["bytes"] for one in store.health())
        # Afterwards the rows are still there to look at.
        assert served.evaluate() == alone.evaluate()


def test_a_run_goes_on_in_its_folder_with_any_number_of_servers(tmp_path: Path) -> None:
    with closing(estimator(0)) as alone:
        alone.train(steps=9)
    for num_ps in (2, 2, 0):
        with closing(estimator(num_ps, tmp_path)) as part:
            part.train(steps=3)
    assert part.global_step == 9
    for mine, theirs in zip(part.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert part.evaluate()["output/auc"] == alone.evaluate()["output/auc"]


@pytest.mark.parametrize("closed", [True, False])
def test_servers_end_with_their_estimator(closed: bool) -> None:
    served = estimator(1)
    (address,) = served.trainer.stores[0].addresses  # type: ignore[attr-defined]
    served.train(steps=1)
    if closed:
        served.close()
        served.close()
    else:
        del served
        gc.collect()
    with pytest.raises(UnavailableError):
        ServerStore([address], config=ClientConfig(timeout=0.3))


def test_a_folder_that_servers_cannot_write_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="servers in this process keep their rows on a local disk"):
        Estimator(Clicks(), RunConfig(model_dir="memory://run"), runner=RunnerConfig(is_local=True, num_ps=1))
