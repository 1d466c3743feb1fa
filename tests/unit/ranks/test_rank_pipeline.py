"""Danger: overlapping exchanges make what a batch sees depend on timing, or let a rank without data hang the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from monolith.ranks.mesh import Kind
from monolith.ranks.rank_store import RankStore
from monolith.table import Bags, Gradient
from monolith.table.bags import single_ids
from rank_tables import EVERY_ID, POOLINGS, exact_gradient, local_store, random_bags, run_stores

STEPS = 8


def batch(step: int, rank: int) -> tuple[list[Bags], list[Gradient]]:
    rng = np.random.default_rng([step, rank])
    bags = [random_bags(rng, name) for name in POOLINGS]
    return bags, [exact_gradient(rng, one) for one in bags]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_lookup_that_was_begun_misses_exactly_the_update_before_it(size: int) -> None:
    local, expected = local_store(), [local_store().lookup(batch(0, rank)[0]) for rank in range(3)]
    seen = [expected]
    for step in range(STEPS):
        seen.append([local.lookup(batch(step + 1, rank)[0]) for rank in range(size)])
        local.apply([g for rank in range(size) for g in batch(step, rank)[1]], step=step)

    def rank(store: RankStore) -> None:
        me = store.agreement.mesh.rank
        store.prefetch(batch(0, me)[0])
        for step in range(STEPS):
            store.agreement.next_step(rows=1)
            store.prefetch(batch(step + 1, me)[0])
            for mine, wanted in zip(store.lookup(batch(step, me)[0]), seen[step][me], strict=True):
                assert torch.equal(mine, wanted)
            store.apply(batch(step, me)[1], step=step)
            store.agreement.step_ended()
        store.forget_prefetched()

    run_stores(size, rank)


def test_a_rank_without_a_next_batch_answers_those_of_the_others() -> None:
    local = local_store()

    def rank(store: RankStore) -> None:
        agreement, bags = store.agreement, single_ids("user", EVERY_ID)
        store.prefetch([bags])
        for step in range(3):
            ended = agreement.mesh.rank == 0 and step > 0
            agreement.next_step(rows=1, ended=ended)
            has_next = step < 2 and agreement.mesh.rank == 1
            store.prefetch([bags] if has_next else [])
            if ended:
                store.follow_lookups()
            else:
                assert torch.equal(store.lookup([bags])[0], local.lookup([bags])[0])
            agreement.mesh.exchange(Kind.DENSE, [[], []])
            store.apply([], step=step)
            agreement.step_ended()

    run_stores(2, rank)


def test_an_evaluation_between_two_steps_leaves_what_was_begun() -> None:
    def rank(store: RankStore) -> None:
        bags = single_ids("user", EVERY_ID)
        store.prefetch([bags])
        store._ahead.wait()
        if store.agreement.mesh.rank == 0:
            before = store.lookup([bags])[0]
            store.assign("user", EVERY_ID, torch.zeros(60, 5))
            assert not torch.equal(store.lookup([bags])[0], before)
        store.agreement.next_step(rows=1)
        found = store.lookup([bags])[0]  # neither rank asks again
        assert store.agreement.mesh.rank == 1 or torch.equal(found, before)

    run_stores(2, rank)


def test_gradients_of_another_thread_have_a_channel_of_their_own() -> None:
    def rank(store: RankStore) -> torch.Tensor:
        agreement, me = store.agreement, store.agreement.mesh.rank
        store.delayed_push = True
        bags = single_ids("user", EVERY_ID)
        with ThreadPoolExecutor(1) as thread:
            agreement.next_step(rows=1)
            pushed = thread.submit(store.apply, [Gradient(bags=bags, values=torch.ones(60, 5))], step=4)
            for _ in range(5):
                agreement.mesh.exchange(Kind.DENSE, [[np.zeros(10 * me)]] * 2)
            pushed.result()
            agreement.step_ended()
        return torch.tensor(sorted(store.local.tables["user"]))

    one, two = run_stores(2, rank)
    assert len(one) + len(two) == 60
