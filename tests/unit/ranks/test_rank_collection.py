"""Danger: a model over ranks gets the rows of one feature for another, or trains on some of its passes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from monolith.features import Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.ps import tables_of
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Mesh
from monolith.ranks.rank_store import RankStore
from monolith.table import SGD
from monolith.testing.rank_threads import run_ranks
from monolith.train.updates import SparsePush

FEATURES = [
    Feature(name="user", dim=4, optimizer=SGD(learning_rate=0.5)),
    Feature(name="a", dim=8, stack="pair"),
    Feature(name="b", dim=8, stack="pair"),
    Feature(name="tags", dim=3, pooling="mean"),
    Feature(name="history", dim=4, shared_with="user", pooling="first_n", max_length=3),
]


def batch(step: int, rank: int) -> dict[str, object]:
    rng = np.random.default_rng([step, rank])
    lists = [rng.integers(0, 20, size=n).tolist() for n in rng.choice([0, 1, 2, 4], size=6)]
    return {
        **{name: torch.from_numpy(rng.integers(0, 30, size=6)) for name in ("user", "a", "b")},
        "tags": Ragged.from_lists(lists),
        "history": Ragged.from_lists([one[::-1] for one in lists]),
    }


def loss_of(outputs: dict[str, torch.Tensor], features: slice) -> torch.Tensor:
    names = [name for name in ("user", "pair", "tags", "history") if name in outputs][features]
    return sum((outputs[name] * torch.arange(outputs[name].shape[-1])).sum() for name in names)  # type: ignore[return-value]


@pytest.mark.parametrize("case", ["all features", "some features", "two passes"])
def test_collections_over_ranks_train_as_one_over_the_whole_batch(case: str) -> None:
    some = slice(1, 3) if case == "some features" else slice(None)
    passes = 2 if case == "two passes" else 1

    def train(embeddings: EmbeddingBagCollection, ranks: list[int], step: int) -> list[dict[str, torch.Tensor]]:
        outputs = []
        for rank in ranks:
            for number in range(passes):
                outputs.append(embeddings(batch(step + 100 * number, rank)))
                loss_of(outputs[-1], some).backward()
        return [{name: one.detach() for name, one in o.items() if isinstance(one, torch.Tensor)} for o in outputs]

    single = EmbeddingBagCollection(FEATURES)
    expected = []
    for step in range(4):
        expected.append(train(single, [0, 1], step))
        single.step(step)

    def rank(mesh: Mesh) -> None:
        agreement = Agreement(mesh)
        store = RankStore(agreement, tables_of(FEATURES))
        embeddings = EmbeddingBagCollection(FEATURES, store)
        push = SparsePush(nn.Sequential(embeddings), delayed=False)
        for step in range(4):
            agreement.next_step(rows=6)
            for found, wanted in zip(
                train(embeddings, [mesh.rank], step), expected[step][passes * mesh.rank :], strict=False
            ):
                for name, one in found.items():
                    assert torch.allclose(one, wanted[name], rtol=0, atol=1e-6), name
            push.push(step, event_time=0)
            agreement.step_ended()
        if mesh.rank == 0:
            for name, table in single.store.tables.items():
                ids = sorted(table)
                assert ids or case == "some features"
                found, wanted = store.lookup_entry(name, ids), table.lookup_entry(ids)
                assert bool(found.found.all())
                assert torch.allclose(found.values, wanted.values, rtol=0, atol=1e-6), name
        agreement.next_step(rows=0, ended=True)

    run_ranks(2, rank)
