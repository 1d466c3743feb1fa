"""Danger: a step reads values that change under it, or trains the copy it reads instead of the parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monolith.features.batch import Batch
from monolith.original import CachedVariables
from monolith.train import Head, StepResult, Trainer
from monolith.train.hooks import FetchCachedVariablesHook, Hook


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(5.0))

    def forward(self, batch: Batch) -> Tensor:
        return self.value.expand(len(batch["y"]))


BATCH: Batch = {"y": torch.zeros(1)}


def read(cached: CachedVariables) -> float:
    return cached(BATCH).item()


def test_a_change_is_read_after_fetch_and_assign() -> None:
    cached = CachedVariables(Number())
    with torch.no_grad():
        cached.module.value.add_(2.0)
    assert (read(cached), cached.module.value.item()) == (5.0, 7.0)
    cached.fetch()
    assert read(cached) == 5.0
    cached.assign()
    assert read(cached) == 7.0


def test_gradients_train_the_parameter_and_not_the_copy() -> None:
    cached = CachedVariables(Number())
    sgd = torch.optim.SGD(cached.parameters(), lr=1.0)
    cached(BATCH).sum().backward()
    sgd.step()
    assert (read(cached), cached.module.value.item()) == (5.0, 4.0)


def test_gradients_are_those_at_the_copy() -> None:
    cached = CachedVariables(Number())
    with torch.no_grad():
        cached.module.value.fill_(100.0)
    cached(BATCH).square().sum().backward()
    assert cached.module.value.grad.item() == 10.0


def test_the_state_is_that_of_the_parameters() -> None:
    cached = CachedVariables(Number())
    assert {name: value.item() for name, value in cached.state_dict().items()} == {"module.value": 5.0}


def test_with_the_hook_every_step_misses_exactly_the_one_before() -> None:
    cached, seen, values = CachedVariables(Number()), [], []

    class Watch(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            seen.append(result.logits["output"].item())
            values.append(cached.module.value.item())

    head = Head(label="y", kind="regression")
    sgd = torch.optim.SGD(cached.parameters(), lr=0.1)
    with torch.no_grad():
        cached.module.value.fill_(8.0)
    hooks = (FetchCachedVariablesHook(cached), Watch())
    Trainer(cached, sgd, heads=[head], hooks=hooks).fit([BATCH] * 6)
    assert seen == [8.0, 8.0, *values[:4]]
    expected = [8.0]
    for step in range(6):
        expected.append(expected[-1] - 0.1 * 2 * seen[step])
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[1:]))
