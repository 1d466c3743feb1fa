"""Danger: servers that pool bags themselves return other sums, or train other rows, than one table would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.ps import ClientConfig, ParameterServer, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.table import Adagrad, Bags, Gradient, LocalStore
from monolith.transport.link import Exchange, Link

TABLE = TableConfig(name="t", segments=(Segment(dim=6, optimizer=Adagrad(learning_rate=0.1)),))
IDS = np.arange(200) * 2**40 + 7


@contextmanager
def servers(count: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ParameterServer()).address for _ in range(count)]


def long_bags(rng: np.random.Generator, pooling: str) -> Bags:
    lengths = rng.integers(0, 40, size=30)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    return Bags(table="t", ids=rng.choice(IDS, splits[-1]), offsets=splits, pooling=pooling)  # type: ignore[arg-type]


def gradient_of(bags: Bags, rng: np.random.Generator) -> Gradient:
    return Gradient(bags=bags, values=torch.from_numpy(rng.standard_normal((30, 6), dtype=np.float32)))


def rows_of(store: LocalStore | ServerStore) -> torch.Tensor:
    return store.lookup([Bags(table="t", ids=IDS, offsets=np.arange(len(IDS) + 1))])[0]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of the arrays of every request."""
    sizes: list[int] = []
    begin = Link.begin

    def counted(
        self: Link, call: Call, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
    ) -> Exchange:
        sizes.append(sum(array.nbytes for array in arrays))
        return begin(self, call, text, arrays, timeout=timeout)

    monkeypatch.setattr(Link, "begin", counted)
    return sizes


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_trained_bit_for_bit_and_sums_differ_by_rounding_alone(count: int, pooling: str) -> None:
    rng, local = np.random.default_rng(2), LocalStore([EmbeddingTable(TABLE)])
    with servers(count) as addresses, ServerStore(addresses, [TABLE]) as store:
        for _ in range(5):
            bags = long_bags(rng, pooling)
            mine, expected = store.lookup([bags])[0], local.lookup([bags])[0]
            assert mine.shape == expected.shape
            assert torch.equal(mine, expected) if count == 1 else torch.allclose(mine, expected, rtol=1e-5, atol=1e-6)
            gradient = gradient_of(bags, rng)
            for one in (store, local):
                one.apply([gradient])
            assert torch.equal(rows_of(store), rows_of(local))


def test_a_worker_can_ask_for_rows_and_pool_them_itself() -> None:
    rng, local = np.random.default_rng(3), LocalStore([EmbeddingTable(TABLE)])
    here = ClientConfig(pool_on_servers=False)
    with servers(3) as addresses, ServerStore(addresses, [TABLE], config=here) as store:
        for _ in range(5):
            bags = long_bags(rng, "sum")
            assert torch.equal(store.lookup([bags])[0], local.lookup([bags])[0])
            gradient = gradient_of(bags, rng)
            for one in (store, local):
                one.apply([gradient])


def test_what_is_sent_grows_with_the_bags_and_not_with_their_ids(sent: list[int]) -> None:
    bags = Bags(table="t", ids=IDS, offsets=np.array([0, 100, 200]))
    values = torch.ones(2, 6)
    with servers(1) as addresses, ServerStore(addresses, [TABLE]) as store:
        sent.clear()
        store.lookup([bags])
        store.apply([Gradient(bags=bags, values=values)])
    asked = 8 * (200 + 3)
    assert sent == [asked, asked + 4 * 2 * 6]


def test_bags_are_cut_anew_when_their_buckets_have_moved() -> None:
    rng, local = np.random.default_rng(4), LocalStore([EmbeddingTable(TABLE)])
    with servers(3) as addresses, ServerStore(addresses[:2], [TABLE]) as store:
        with ServerStore(addresses[:2]) as mover:
            for now in (addresses, addresses[1:], addresses[:1]):
                bags = long_bags(rng, "mean")
                store.lookup([bags])
                mover.rebalance(now)
                # The store learns of it by being refused, with a split that it has kept from its lookup.
                gradient = gradient_of(bags, rng)
                for one in (store, local):
                    one.apply([gradient])
                assert torch.allclose(store.lookup([bags])[0], local.lookup([bags])[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(rows_of(store), rows_of(local))
