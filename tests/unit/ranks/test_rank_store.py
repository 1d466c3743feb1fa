"""Danger: a model trained over ranks quietly becomes another model than the one trained in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, InvalidArgumentError, RanksDisagreeError
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Kind, Mesh
from monolith.ranks.rank_store import RankStore
from monolith.ranks.row_exchange import GradientPart
from monolith.table import Bags, Gradient, Store
from monolith.table.bags import single_ids
from monolith.testing import sgd_table_config
from monolith.testing.rank_threads import run_ranks
from rank_tables import (
    CONFIGS,
    DECLARED,
    DIMS,
    EVERY_ID,
    POOLINGS,
    exact_gradient,
    local_store,
    random_bags,
    run_stores,
    same_entries,
)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_of_all_ranks_is_that_of_one_process_with_the_whole_batch(size: int) -> None:
    rates = {"item": (0.25, 0.5)}

    def batch(step: int, rank: int) -> tuple[list[Bags], list[Gradient]]:
        rng = np.random.default_rng([step, rank])
        bags = [random_bags(rng, name) for name in POOLINGS]
        return bags, [exact_gradient(rng, one, rates.get(one.table)) for one in bags]

    local, expected = local_store(), []
    for step in range(12):
        expected.append([local.lookup(batch(step, rank)[0]) for rank in range(size)])
        local.apply([g for rank in range(size) for g in batch(step, rank)[1]], step=step, event_time=100 + 10 * step)
        # The filter counts how often an id came, so it must see every time.
        assert step or local.stats()["filtered"].rows < local.stats()["user"].rows
    known = {name: local.tables[name].lookup_entry(EVERY_ID) for name in POOLINGS}
    stats, evicted = local.stats(), [local.evict(now=255), local.evict(now=270)]

    def rank(store: RankStore) -> None:
        assert isinstance(store, Store)
        me = store.agreement.mesh.rank
        for step in range(12):
            store.agreement.next_step(rows=1)
            bags, gradients = batch(step, me)
            for mine, wanted in zip(store.lookup(bags), expected[step][me], strict=True):
                assert torch.equal(mine, wanted)
            # The rank that is not the last has older data: the newest time of all counts.
            store.apply(gradients, step=step, event_time=100 + 10 * step if me == size - 1 else 1)
            store.agreement.step_ended()
        if me == 0:
            for name, entries in known.items():
                assert same_entries(store.lookup_entry(name, EVERY_ID), entries), name
            for name, one in store.stats().items():
                assert (one.rows, one.max_event_time) == (stats[name].rows, stats[name].max_event_time)
            assert [store.evict(now=255), store.evict(now=270)] == evicted
            assert store.stats()["item"].rows == 0

    run_stores(size, rank)


def test_rows_expire_by_the_newest_time_of_any_rank() -> None:
    def rank(store: RankStore) -> None:
        if store.agreement.mesh.rank == 0:
            store.assign("item", EVERY_ID, torch.zeros(60, 8), event_time=10)
            store.assign(
                "item", EVERY_ID[:1], torch.zeros(1, 8), event_time=200
            )  # one rank alone knows that it is late
            assert store.evict()["item"] == 59

    run_stores(2, rank)


@pytest.mark.parametrize("newest", [0, 1])
def test_the_newest_event_time_of_a_step_is_that_of_all_its_rows(newest: int) -> None:
    def rank(store: RankStore) -> object:
        own = store.agreement.mesh.rank
        store.agreement.next_step(rows=1)
        bags = single_ids("user", EVERY_ID[own::2])
        gradient = Gradient(bags=bags, values=torch.ones(len(EVERY_ID) // 2, 5))
        store.apply([gradient], event_time=200 if own == newest else 100)
        store.agreement.step_ended()
        return store.lookup_entry("user", EVERY_ID).times.tolist() if own == 0 else None

    assert run_stores(2, rank)[0] == [200] * len(EVERY_ID)


def test_rows_are_where_their_buckets_are() -> None:
    def rank(store: RankStore) -> set[int]:
        store.agreement.next_step(rows=1)
        store.apply([Gradient(bags=single_ids("user", EVERY_ID), values=torch.ones(60, 5))])
        store.agreement.step_ended()
        return set(store.local.tables["user"])

    one, two = run_stores(2, rank)
    assert one
    assert two
    assert not one & two
    assert one | two == set(EVERY_ID.tolist())


def test_gradients_are_multiplied_by_the_weight_of_their_rank() -> None:
    def rank(store: RankStore) -> object:
        store.agreement.next_step(rows=1)
        store.weight = 0.75 if store.agreement.mesh.rank == 0 else 0.25
        bags = single_ids("item", np.array([5]))
        before = store.lookup([bags])[0]
        store.apply([Gradient(bags=bags, values=torch.tensor([[0.0, *[float(store.agreement.mesh.rank)] * 7]]))])
        return (before - store.lookup([bags])[0])[0, 1:].tolist()

    assert run_stores(2, rank) == [[0.125] * 7] * 2  # 0.5 * (0.75 * 0 + 0.25 * 1)


def test_a_rank_without_data_answers_the_others() -> None:
    def rank(store: RankStore) -> object:
        agreement, bags = store.agreement, single_ids("user", EVERY_ID)
        agreement.next_step(rows=agreement.mesh.rank, ended=agreement.mesh.rank == 0)
        if agreement.mesh.rank == 0:
            store.follow_lookups()
            agreement.mesh.exchange(Kind.DENSE, [[], []])
            store.apply([], step=3)
            return len(store.local.tables["user"])
        first, second = store.lookup([bags])[0], store.lookup([bags])[0]
        assert torch.equal(first, second)
        agreement.mesh.exchange(Kind.DENSE, [[], []])
        store.apply([Gradient(bags=bags, values=torch.ones(60, 5))], step=3)
        return 60 - len(store.local.tables["user"])

    rows, missing = run_stores(2, rank)
    assert rows == missing
    assert 0 < rows < 60


def test_the_store_of_one_rank_changes_nothing() -> None:
    bags = single_ids("user", EVERY_ID)

    def rank(store: RankStore) -> torch.Tensor:
        store.apply([Gradient(bags=bags, values=torch.ones(60, 5))])
        return store.lookup([bags])[0]

    local = local_store()
    local.apply([Gradient(bags=bags, values=torch.ones(60, 5))])
    assert torch.equal(run_stores(1, rank)[0], local.lookup([bags])[0])


def test_between_steps_one_rank_reads_and_writes_alone() -> None:
    local, ids, rows = local_store(), torch.arange(20).reshape(4, 5), torch.randn(4, 5, 5)
    twice, bags = torch.tensor([3, 3, 77]), single_ids("user", np.arange(90))
    local.assign("user", ids, rows, event_time=4)
    local.assign_add("user", twice, torch.ones(3, 5), event_time=5)
    existed = local.reinitialize("user", torch.tensor([[0, 500], [19, 501]]))
    expected, entries = local.lookup([bags])[0], local.tables["user"].lookup_entry(np.arange(90))
    everything = {int(i): v for ids_, values in local.iter_rows("user") for i, v in zip(ids_, values, strict=True)}

    def rank(store: RankStore) -> None:
        if store.agreement.mesh.rank == 1:
            store.assign("user", ids, rows, event_time=4)
            store.assign_add("user", twice, torch.ones(3, 5), event_time=5)
            assert torch.equal(store.reinitialize("user", torch.tensor([[0, 500], [19, 501]])), existed)
        if store.agreement.mesh.rank == 2:
            # Actions of the lower rank come first.
            while store.stats()["user"].rows < len(everything):
                pass  # the other rank is still writing
            assert torch.equal(store.lookup([bags])[0], expected)
            assert same_entries(store.lookup_entry("user", np.arange(90)), entries)
            chunks = list(store.iter_rows("user", chunk=4))
            assert len(chunks) > 3
            found = {int(i): v for ids_, values in chunks for i, v in zip(ids_, values, strict=True)}
            assert found.keys() == everything.keys()
            assert all(torch.equal(found[i], everything[i]) for i in found)
            assert store.is_initialised() is False
            store.mark_initialised()
            assert store.is_initialised()

    run_stores(3, rank)


def test_lookups_of_two_ranks_at_once_do_not_get_each_others_rows() -> None:
    def rank(store: RankStore) -> bool:
        wanted = single_ids("user", np.arange(10) + 100 * store.agreement.mesh.rank)
        expected = local_store().lookup([wanted])[0]
        return all(torch.equal(store.lookup([wanted])[0], expected) for _ in range(20))

    assert run_stores(3, rank) == [True] * 3


def test_within_an_action_all_ranks_ask_together() -> None:
    def rank(store: RankStore) -> object:
        counted: list[int] = []
        store.agreement.actions["count"] = lambda _: counted.append(store.stats()["user"].rows)
        if store.agreement.mesh.rank == 0:
            store.assign("user", EVERY_ID, torch.zeros(60, 5))
            store.agreement.run("count")
        store.agreement.next_step(rows=1)
        return counted

    assert run_stores(2, rank) == [[60], [60]]


def test_a_refused_write_names_the_rank_and_leaves_the_others_working() -> None:
    def rank(store: RankStore) -> None:
        if store.agreement.mesh.rank == 0:
            with pytest.raises(InvalidArgumentError, match=r"rank [01]: event_time"):
                store.assign("user", EVERY_ID, torch.zeros(60, 5), event_time=-1)
            with pytest.raises(InvalidArgumentError, match=r"values: expected float32 \[60, 5\]"):
                store.assign("user", EVERY_ID, torch.zeros(60, 4))
            with pytest.raises(ConfigError, match="have not declared 'nobody'; they have 'bits', 'filtered'"):
                store.lookup([single_ids("nobody", EVERY_ID)])
            assert store.stats()["user"].rows == 0

    run_stores(2, rank)


def test_gradients_between_two_steps_are_refused() -> None:
    def rank(store: RankStore) -> None:
        assert store.collective == {"apply", "prefetch"}
        with pytest.raises(InvalidArgumentError, match="apply: was called between two steps"):
            store.apply([])
        store.agreement.next_step(rows=1)
        assert store.collective == {"apply", "lookup", "prefetch"}
        with pytest.raises(InvalidArgumentError, match="within step 1"):
            store.stats()

    run_stores(2, rank)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DECLARED[1:], "table 'user': ranks 0 and 1 have not declared the same: only one of them has it"),
        (
            [DeclaredTable(config=CONFIGS[0].model_copy(update={"seed": 4})), *DECLARED[1:]],
            "table 'user': ranks 0 and 1 have not declared the same: their settings differ",
        ),
    ],
)
@pytest.mark.parametrize("call", ["lookup", "apply"])
def test_ranks_with_other_tables_are_told_which(other: list[DeclaredTable], message: str, call: str) -> None:
    bags = single_ids("item", EVERY_ID)

    def rank(mesh: Mesh) -> None:
        agreement = Agreement(mesh)
        store = RankStore(agreement, other if mesh.rank == 1 else DECLARED)
        agreement.next_step(rows=1)
        with pytest.raises(RanksDisagreeError, match=message):
            store.lookup([bags]) if call == "lookup" else store.apply([])

    run_ranks(3, rank)


def test_ranks_with_other_learning_rates_are_told_which() -> None:
    def rank(store: RankStore) -> None:
        store.agreement.next_step(rows=1)
        rates = (0.25, 0.5 if store.agreement.mesh.rank < 2 else 0.625)
        gradient = Gradient(bags=single_ids("item", EVERY_ID), values=torch.ones(60, 8), learning_rates=rates)
        with pytest.raises(RanksDisagreeError, match=r"of table 'item': rank 1 has 0.5, rank 2 has 0.625"):
            store.apply([gradient] if store.agreement.mesh.rank else [])
        assert store.local.stats()["item"].rows == 0

    run_stores(3, rank)


@pytest.mark.parametrize(("wire", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_narrow_rows_and_gradients_round(wire: str, bits: int) -> None:
    fine = 1 + 2.0**-12

    def rank(mesh: Mesh) -> object:
        agreement = Agreement(mesh)
        store = RankStore(agreement, DECLARED, wire=wire)  # type: ignore[arg-type]
        bags = single_ids("item", EVERY_ID)
        if mesh.rank == 0:
            store.assign("item", EVERY_ID, torch.full((60, 8), 3.0))
        agreement.next_step(rows=1)
        store.apply([Gradient(bags=bags, values=torch.full((60, 8), fine if mesh.rank else 0.0))])
        exact = torch.cat([entries.values for entries in store.local.tables["item"].iter_batches()])
        return set(exact[:, 1].tolist()), set(store.lookup([bags])[0][:, 1].tolist())

    # 3 - 0.5 * 1: the gradient has lost its last bit, the row has none to lose.
    assert run_ranks(2, rank) == [({2.5}, {2.5})] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_added_in_the_order_of_their_numbers_whoever_has_them(size: int) -> None:
    def parts(step: int) -> list[GradientPart]:
        made = []
        for number in range(4):
            rng = np.random.default_rng([step, number])
            gradients = []
            for name in POOLINGS:
                bags = random_bags(rng, name)
                values = rng.standard_normal((len(bags.offsets) - 1, DIMS[name]), dtype=np.float32)
                gradients.append(Gradient(bags=bags, values=torch.from_numpy(values)))
            made.append(GradientPart(number=number, gradients=gradients, weight=0.3))
        return made

    def trained(store: RankStore) -> object:
        me = store.agreement.mesh.rank
        for step in range(8):
            store.agreement.next_step(rows=1)
            # Dealt in turn, the largest first: neither the order of ranks nor that of the call is the order of numbers.
            mine = [part for part in reversed(parts(step)) if part.number % store.agreement.mesh.size == me]
            store.apply_parts(mine, step=step, event_time=step)
            store.agreement.step_ended()
        if me == 0:
            return {name: store.lookup_entry(name, EVERY_ID) for name in POOLINGS}
        return None

    expected, found = run_stores(1, trained)[0], run_stores(size, trained)[0]
    for name in POOLINGS:
        assert bool(expected[name].found.any())  # type: ignore[index]
        assert same_entries(found[name], expected[name]), name  # type: ignore[index]


def test_with_a_step_for_each_rank_the_gradient_of_each_counts_by_itself() -> None:
    def rank(mesh: Mesh) -> torch.Tensor:
        agreement = Agreement(mesh)
        store = RankStore(agreement, DECLARED, step_by_rank=True)
        agreement.next_step(rows=1)
        bags = single_ids("user", np.array([3, 4]))
        store.apply([Gradient(bags=bags, values=torch.full((2, 5), 1.0 + mesh.rank))])
        return store.lookup([bags])[0]

    local = local_store().tables["user"]
    for number in range(2):
        local.apply_gradients([3, 4], torch.full((2, 5), 1.0 + number))
    for found in run_ranks(2, rank):
        assert torch.equal(found, local.lookup([3, 4]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_of_each_rank_counts(size: int) -> None:
    """Lookup and push of the original's `distributed_ps_sync`: ids that all ranks have, and ids that one has."""

    def rank(store: RankStore) -> list[list[float]]:
        me = store.agreement.mesh.rank
        store.agreement.next_step(rows=3)
        bags = single_ids("plain", np.array([7, 7, 100 + me]))
        assert store.lookup([bags])[0].tolist() == [[0.0], [0.0], [0.0]]
        store.apply([Gradient(bags=bags, values=torch.tensor([[1.0], [2.0], [4.0]]))])
        return store.lookup([bags])[0].tolist()

    plain = DeclaredTable(config=sgd_table_config(1, name="plain"))
    assert run_stores(size, rank, [plain]) == [[[-3.0 * size], [-3.0 * size], [-4.0]]] * size
