"""Danger: a read that was begun before a change sees it, or not, as the network likes, and no run can be repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from monolith.ps import CachedParameters, ClientConfig, ParameterServer, ServerStore
from monolith.table import Bags, Gradient
from monolith.testing import sgd_table_config

BAGS = Bags(table="t", ids=np.array([1]), offsets=np.array([0, 1]))


@pytest.fixture
def address() -> Iterator[str]:
    with ParameterServer() as server:
        yield server.address


class Gate:
    """Holds a call back until it is opened."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call
        self.opened = threading.Event()

    def __call__(self, *arguments: object) -> object:
        assert self.opened.wait(60)
        return self._call(*arguments)


def changes(store: ServerStore) -> list[Callable[[], object]]:
    return [
        lambda: store.apply([Gradient(bags=BAGS, values=torch.ones(1, 1))]),
        lambda: store.assign("t", [1], torch.ones(1, 1)),
        lambda: store.assign_add("t", [1], torch.ones(1, 1)),
        lambda: store.reinitialize("t", [1]),
    ]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("ordered", [True, False])
def test_a_change_waits_for_a_lookup_that_was_begun_unless_told_not_to(
    address: str, which: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerStore([address], [sgd_table_config(1, name="t")], config=ClientConfig(ordered=ordered)) as store:
        gate = Gate(store._lookup)
        monkeypatch.setattr(store, "_lookup", gate)
        store.prefetch([BAGS])
        changed = threading.Event()
        change = threading.Thread(target=lambda: (changes(store)[which](), changed.set()))
        change.start()
        # Where it must wait, no length of time is long enough to see that it does; a short one shows that it does not.
        assert changed.wait(0.3 if ordered else 60) != ordered
        gate.opened.set()
        change.join()
        assert store.lookup([BAGS])[0].shape == (1, 1)


def test_gradients_of_dense_parameters_wait_for_a_fetch(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerStore([address]) as store:
        model = nn.Linear(1, 1, bias=False)
        cached = CachedParameters(model, store, torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.item()
        model(torch.ones(1, 1)).sum().backward()
        gate = Gate(cached.origin.read)
        monkeypatch.setattr(cached.origin, "read", gate)
        cached.fetch()
        pushed = threading.Event()
        push = threading.Thread(target=lambda: (cached.push(), pushed.set()))
        push.start()
        assert not pushed.wait(0.3)
        gate.opened.set()
        push.join()
        cached.assign()
        assert model.weight.item() == before
        assert cached.origin.read()["weight"].item() == pytest.approx(before - 1)
