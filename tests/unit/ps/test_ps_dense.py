"""Danger: dense parameters on servers return values that were never written, lose gradients, or differ from worker to worker."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from monolith.errors import CheckpointMismatchError, ConfigError, InvalidArgumentError
from monolith.ps import (
    CachedParameters,
    DenseOptimizer,
    ParameterServer,
    ServerOptimizer,
    ServerParameters,
    ServerStore,
)
from monolith.ps.client.dense_routes import _placed
from monolith.train import RunConfig, Trainer
from monolith.train.hooks import FetchCachedVariablesHook


@pytest.fixture
def store() -> Iterator[ServerStore]:
    """One worker of two servers."""
    with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address, two.address]) as made:
        yield made
        gc.collect()


class Variable(nn.Module):
    """One number that is its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.var = nn.Parameter(torch.tensor(5.0))

    def forward(self, batch: object = None) -> torch.Tensor:
        return self.var * 1.0


def test_reads_use_the_cache_until_it_is_fetched_and_assigned(store: ServerStore) -> None:
    model = Variable()
    cached = CachedParameters(model, store, torch.optim.SGD(model.parameters(), lr=1.0))
    assert model().item() == 5.0
    cached.origin.assign_add({"var": torch.tensor(2.0)})
    assert model().item() == 5.0
    assert cached.origin.read()["var"].item() == 7.0
    cached.fetch()
    assert model().item() == 5.0
    cached.assign()
    assert model().item() == 7.0


def test_gradients_go_to_the_origin_and_the_cache_follows_when_fetched(store: ServerStore) -> None:
    model = Variable()
    cached = CachedParameters(model, store, torch.optim.SGD(model.parameters(), lr=1.0))
    model().backward()
    ServerOptimizer(cached).step()
    assert cached.origin.read()["var"].item() == 4.0
    assert model().item() == 5.0


def test_the_hook_lets_a_step_read_what_was_there_before_the_step_before(store: ServerStore) -> None:
    model, seen = Variable(), []
    cached = CachedParameters(model, store, torch.optim.SGD(model.parameters(), lr=1.0))
    # Changed behind the cache's back: the first step must not start from what the model was built with.
    cached.origin.assign({"var": torch.tensor(8.0)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append(self.inner.var.item())
            return self.inner.var * batch["x"]

        def extra_loss(self, batch: dict[str, torch.Tensor], logits: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.inner.var - (logits["output"] * 0).sum()

    hook = FetchCachedVariablesHook(cached)
    zero = {"x": torch.zeros(1), "label": torch.zeros(1)}
    trainer = Trainer(Net(), ServerOptimizer(cached), hooks=[hook], config=RunConfig(clip_norm=None))
    trainer.fit([zero] * 4)
    # Each step takes 1 away; what a step reads lacks the step before it.
    assert seen == [8.0, 8.0, 7.0, 6.0]
    assert cached.origin.read()["var"].item() == 4.0


def test_the_first_worker_gives_the_values_and_later_ones_find_them(store: ServerStore) -> None:
    first = ServerParameters(store, {"w": torch.tensor([1.0, 2.0])}, DenseOptimizer.of(torch.optim.SGD))
    first.assign({"w": torch.tensor([3.0, 4.0])})
    with ServerStore(store.addresses) as other:
        second = ServerParameters(other, {"w": torch.zeros(2)}, DenseOptimizer.of(torch.optim.SGD))
        assert (first.created, second.created) == (True, False)
        assert second.read()["w"].tolist() == [3.0, 4.0]
        with pytest.raises(ConfigError, match=r"'w': another worker has declared it as \[2\], not \[3\]"):
            ServerParameters(other, {"w": torch.zeros(3)}, DenseOptimizer.of(torch.optim.SGD))
        with pytest.raises(CheckpointMismatchError, match=r"'w'.*torch.optim.SGD, the code now has torch.optim.Adam"):
            ServerParameters(other, {"w": torch.zeros(2)}, DenseOptimizer.of(torch.optim.Adam))


def test_wrong_names_shapes_and_types_change_nothing(store: ServerStore) -> None:
    parameters = ServerParameters(
        store, {"a": torch.zeros(2), "b": torch.zeros(2)}, DenseOptimizer.of(torch.optim.SGD, lr=1.0)
    )
    with pytest.raises(InvalidArgumentError, match="there is no 'c'"):
        parameters.apply({"a": torch.ones(2), "c": torch.ones(2)})
    with pytest.raises(InvalidArgumentError, match=r"'a': expected \[2\], got \[1, 2\]"):
        parameters.apply({"a": torch.ones(1, 2)})
    with pytest.raises(InvalidArgumentError, match="'b': expected float32"):
        parameters.assign({"b": torch.ones(2, dtype=torch.float64)})
    assert all((value == 0).all() for value in parameters.read().values())


def test_parameters_are_spread_by_size_and_the_same_for_everybody() -> None:
    sizes = {"big": 100, "a": 40, "b": 40, "c": 30, "tiny": 1}
    placed = _placed(sizes, 2)
    assert placed == _placed(dict(reversed(sizes.items())), 2) == {"big": 0, "a": 1, "b": 1, "c": 1, "tiny": 0}
    assert set(_placed(sizes, 1).values()) == {0}


def test_half_of_a_model_is_another_model(store: ServerStore) -> None:
    with ParameterServer() as server, ServerStore([server.address]) as one:
        ServerParameters(one, {"a": torch.zeros(1)}, DenseOptimizer.of(torch.optim.SGD))
        with pytest.raises(ConfigError, match="'b': not there, while 'a' is"):
            ServerParameters(one, {"a": torch.zeros(1), "b": torch.zeros(1)}, DenseOptimizer.of(torch.optim.SGD))


def test_what_is_read_while_others_train_is_never_half_of_a_step() -> None:
    with ParameterServer() as server, ServerStore([server.address]) as store:
        names = [f"w{n}" for n in range(8)]
        parameters = ServerParameters(
            store, {name: torch.zeros(100) for name in names}, DenseOptimizer.of(torch.optim.SGD, lr=1.0)
        )
        gradients = {name: torch.ones(100) for name in names}

        def train() -> None:
            for _ in range(100):
                parameters.apply(gradients)

        training = threading.Thread(target=train)
        training.start()
        while training.is_alive():
            assert len(np.unique(torch.cat(list(parameters.read().values())).numpy())) == 1
        training.join()
        assert all((value == -100).all() for value in parameters.read().values())


def test_workers_that_know_more_servers_find_parameters_where_they_are() -> None:
    sgd = DenseOptimizer.of(torch.optim.SGD, lr=1.0)
    values = {"a": torch.zeros(3), "b": torch.zeros(2)}
    with ParameterServer() as one, ParameterServer() as two, ServerStore([one.address]) as store:
        first = ServerParameters(store, values, sgd)
        store.rebalance([one.address, two.address])
        with ServerStore([one.address, two.address]) as later:
            second = ServerParameters(later, values, sgd)
            assert not second.created
            second.apply({"a": torch.ones(3), "b": torch.ones(2)})
        assert first.read()["a"].tolist() == [-1.0] * 3
