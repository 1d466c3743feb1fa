"""Danger: a model trained over servers quietly becomes another model than the one trained in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.ps import ClientConfig, ParameterServer, ServerStore
from monolith.ps.protocol.messages import DeclaredTable
from monolith.table import SGD, Adagrad, Bags, Expiry, Ftrl, Gradient, LocalStore, OneBit, SlidingAdmission
from monolith.table.admission import AdmissionFilter
from monolith.table.store import Store

CONFIGS = (
    TableConfig(name="user", segments=(Segment(dim=5, optimizer=Adagrad(learning_rate=0.1)),), seed=3),
    TableConfig(
        name="item",
        segments=(Segment(dim=1, optimizer=Ftrl()), Segment(dim=7, optimizer=SGD(learning_rate=0.5))),
        expiry=Expiry(default=50),
    ),
    TableConfig(name="bits", segments=(Segment(dim=3, compressor=OneBit(step_size=2)),)),
)
ADMISSION = SlidingAdmission(capacity=1000, default_threshold=3)
FILTERED = TableConfig(name="filtered", segments=(Segment(dim=2),))
DECLARED = [*(DeclaredTable(config=config) for config in CONFIGS), DeclaredTable(config=FILTERED, admission=ADMISSION)]


@pytest.fixture(params=[1, 2, 3, "pooled"])
def remote(request: pytest.FixtureRequest) -> Iterator[Store]:
    """The same tables in every home away from home."""
    with ExitStack() as stack:
        count = 1 if request.param == "pooled" else request.param
        addresses = [stack.enter_context(ParameterServer()).address for _ in range(count)]
        # Sums of long bags that several servers pool are added in another order, which may change their last bits.
        config = ClientConfig(pool_on_servers=request.param == "pooled")
        yield stack.enter_context(ServerStore(addresses, DECLARED, config=config))


def local_store() -> LocalStore:
    tables = [EmbeddingTable(config) for config in CONFIGS]
    return LocalStore([*tables, EmbeddingTable(FILTERED, admission=AdmissionFilter(ADMISSION))])


def random_bags(rng: np.random.Generator, table: str, pooling: str, *, single: bool) -> Bags:
    bags = int(rng.integers(0, 40))
    lengths = np.ones(bags, dtype=np.int64) if single else rng.integers(0, 5, size=bags)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Few distinct ids: most come several times, in one bag and in several.
    ids = rng.integers(-30, 30, size=int(splits[-1])) * 2**40 + 7
    return Bags(table=table, ids=ids, offsets=splits, pooling=pooling)  # type: ignore[arg-type]


def test_lookups_and_updates_are_those_of_local_tables_bit_for_bit(remote: Store) -> None:
    rng, local = np.random.default_rng(5), local_store()
    poolings = {"user": "sum", "item": "mean", "bits": "sqrtn", "filtered": "sum"}
    for step in range(30):
        requests = [random_bags(rng, name, pooling, single=step % 3 == 0) for name, pooling in poolings.items()]
        for mine, expected in zip(remote.lookup(requests), local.lookup(requests), strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, expected)
        gradients = [
            Gradient(
                bags=bags,
                values=torch.from_numpy(rng.standard_normal((len(bags.offsets) - 1, dim), dtype=np.float32)),
                learning_rates=(0.01 * step + 0.01, 0.3) if bags.table == "item" else None,
            )
            for bags, dim in zip(requests, (5, 8, 3, 2), strict=True)
        ]
        for store in (remote, local):
            store.apply(gradients, step=step, event_time=100 + 10 * step)
        if step == 2:
            # The filter counts how often an id came, so it must see every time.
            assert 0 < local.stats()["filtered"].rows < local.stats()["user"].rows
            assert remote.stats()["filtered"].rows == local.stats()["filtered"].rows
    everything = [Bags(table=n, ids=np.arange(-30, 30) * 2**40 + 7, offsets=np.arange(61)) for n in poolings]
    for mine, expected in zip(remote.lookup(everything), local.lookup(everything), strict=True):
        assert torch.equal(mine, expected)
    for name, stats in local.stats().items():
        assert remote.stats()[name].rows == stats.rows
        assert remote.stats()[name].max_event_time == stats.max_event_time
    evicted = local.evict()
    assert evicted["item"] > 0
    assert remote.evict() == evicted


def test_rows_expire_by_the_newest_time_of_any_server(remote: Store) -> None:
    ids = np.arange(50)
    remote.assign("item", ids, torch.zeros(50, 8), event_time=10)
    remote.assign("item", ids[:1], torch.zeros(1, 8), event_time=200)  # one server alone knows that it is late
    assert remote.evict()["item"] == 49
    assert remote.evict(now=400)["item"] == 1


def test_several_gradients_of_one_table_are_one_step(remote: Store) -> None:
    local, rng = local_store(), np.random.default_rng(1)
    parts = [random_bags(rng, "user", "sum", single=False) for _ in range(3)]
    gradients = [Gradient(bags=bags, values=torch.ones(len(bags.offsets) - 1, 5)) for bags in parts]
    for store in (remote, local):
        store.apply(gradients)
    for mine, expected in zip(remote.lookup(parts), local.lookup(parts), strict=True):
        assert torch.equal(mine, expected)


def test_assign_add_and_reinitialize_are_those_of_local_tables(remote: Store) -> None:
    local = local_store()
    ids, rows = torch.arange(20).reshape(4, 5), torch.randn(4, 5, 5)
    twice = torch.tensor([3, 3, 77])
    bags = Bags(table="user", ids=np.arange(90), offsets=np.arange(91))
    answers = []
    for store in (remote, local):
        store.assign("user", ids, rows, event_time=4)
        store.assign_add("user", twice, torch.ones(3, 5), event_time=5)
        answers.append(store.reinitialize("user", torch.tensor([[0, 500], [19, 501]])))
    assert answers[0].tolist() == answers[1].tolist() == [[1, 0], [1, 0]]
    assert answers[0].dtype == answers[1].dtype == torch.int32
    assert torch.equal(remote.lookup([bags])[0], local.lookup([bags])[0])
    assert remote.evict(now=10**6) == local.evict(now=10**6)


def test_it_is_a_store_that_can_be_saved_if_its_servers_have_folders(remote: Store, tmp_path: Path) -> None:
    assert isinstance(remote, Store)
    assert not remote.is_initialised()
    remote.mark_initialised()
    assert remote.is_initialised()
    with pytest.raises(InvalidArgumentError, match="the server has no folder; start it with --folder"):
        remote.save(tmp_path / "tables")
    with pytest.raises(
        (CorruptFileError, InvalidArgumentError), match=r"start it with --restore-root|a server restores what it owns"
    ):
        remote.restore(tmp_path / "tables")


@pytest.mark.parametrize(("wire", "exact"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_a_narrow_wire_rounds_once_to_nearest(wire: str, exact: float) -> None:
    values = torch.linspace(-3, 3, 500).reshape(100, 5)
    ids = np.arange(100)
    with ParameterServer() as one, ParameterServer() as two:
        config = ClientConfig(wire=wire)  # type: ignore[arg-type]
        with ServerStore([one.address, two.address], DECLARED, config=config) as store:
            store.assign("user", ids, values)
            (read,) = store.lookup([Bags(table="user", ids=ids, offsets=np.arange(101))])
    assert torch.equal(read, values.to(getattr(torch, wire)).float())
    assert (read - values).abs().max() <= 3 * exact
    assert not torch.equal(read, values)


def test_gradients_on_a_narrow_wire_are_rounded_after_they_were_summed() -> None:
    config = TableConfig(name="t", segments=(Segment(dim=1, optimizer=SGD(learning_rate=1.0)),))
    bags = Bags(table="t", ids=np.array([5, 5]), offsets=np.arange(3))
    values = torch.tensor([[1.0 + 2**-9], [1.0 + 2**-9]])  # each rounds to 1 in bfloat16, the sum does not to 2
    with (
        ParameterServer() as server,
        ServerStore([server.address], [config], config=ClientConfig(wire="bfloat16")) as store,
        ServerStore([server.address], [config]) as exact,
    ):
        before = exact.lookup([bags])[0][0, 0]
        store.apply([Gradient(bags=bags, values=values)])
        after = exact.lookup([bags])[0][0, 0]
    summed = values.sum().to(torch.bfloat16).float()
    assert torch.equal(after, before - summed)


def test_whole_rows_with_optimizer_state_are_those_of_local_tables(remote: Store) -> None:
    local, rng = local_store(), np.random.default_rng(5)
    for step in range(4):
        bags = [random_bags(rng, config.name, "sum", single=True) for config in CONFIGS]
        gradients = [
            Gradient(bags=b, values=torch.from_numpy(rng.normal(size=(len(b.ids), c.dim)).astype(np.float32)))
            for b, c in zip(bags, CONFIGS, strict=True)
        ]
        for store in (local, remote):
            store.apply(gradients, step=step, event_time=100 + step)
    ids = rng.permutation(np.arange(-40, 40)) * 2**40 + 7
    for config in CONFIGS:
        ours, theirs = local.lookup_entry(config.name, ids), remote.lookup_entry(config.name, ids)
        assert 0 < int(ours.found.sum()) < len(ids)
        assert theirs.ids.tolist() == ids.tolist()
        assert theirs.found.tolist() == ours.found.tolist()
        assert list(theirs.slots) == list(ours.slots)
        for mine, other in [(ours.values, theirs.values), (ours.times, theirs.times)] + [
            (ours.slots[name], theirs.slots[name]) for name in ours.slots
        ]:
            assert mine.dtype == other.dtype
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert remote.lookup_entry("user", []).values.shape == (0, 5)
    with pytest.raises(ConfigError, match="'other'"):
        remote.lookup_entry("other", [1])
