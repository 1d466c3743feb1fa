"""Danger: gradients that are lost, applied twice, applied by looking, or applied with the rates and times of another step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith import ConfigError, EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.features import Feature, Ragged
from monolith.nn import EmbeddingBagCollection, embedding_collections
from monolith.nn.collection import MAX_PENDING
from monolith.table import SGD, Adagrad, Bags, Constant, LocalStore, Zeros

SGD = SGD(learning_rate=1.0)
IDS = torch.tensor([3, 4, 3])


def user(**fields: object) -> Feature:
    return Feature(name="user", dim=2, initializer=Zeros(), optimizer=SGD, **fields)  # type: ignore[arg-type]


def test_an_unseen_id_trains_from_its_first_step_at_its_initial_value() -> None:
    embeddings = EmbeddingBagCollection([Feature(name="user", dim=1, initializer=Constant(value=3.0), optimizer=SGD)])
    out = embeddings({"user": IDS})["user"]
    assert out.tolist() == [[3.0], [3.0], [3.0]]
    # d/dx of x²/2 is x, so the first step must go from 3 by the sum of both occurrences.
    (out.square().sum() / 2).backward()
    assert embeddings.store.stats()["user"].rows == 0
    embeddings.step()
    assert embeddings({"user": IDS})["user"].tolist() == [[-3.0], [0.0], [-3.0]]


def test_backward_only_collects_and_step_applies_once() -> None:
    embeddings = EmbeddingBagCollection([user()])
    embeddings({"user": IDS})["user"].sum().backward()
    assert embeddings({"user": IDS})["user"].sum() == 0
    (gradient,) = embeddings.gradients
    assert gradient.bags.ids.tolist() == [3, 4, 3]
    assert gradient.values.tolist() == [[1.0, 1.0]] * 3
    embeddings.step()
    embeddings.step()
    assert embeddings({"user": IDS})["user"].tolist() == [[-2.0, -2.0], [-1.0, -1.0], [-2.0, -2.0]]


def test_accumulated_passes_make_one_optimizer_step() -> None:
    def trained(passes: list[torch.Tensor]) -> torch.Tensor:
        adagrad = Adagrad(learning_rate=1.0)
        embeddings = EmbeddingBagCollection([Feature(name="user", dim=2, initializer=Zeros(), optimizer=adagrad)])
        for ids in passes:
            embeddings({"user": ids})["user"].sum().backward()
        embeddings.step()
        return embeddings({"user": torch.tensor([3, 4])})["user"]

    assert torch.equal(trained([IDS[:1], IDS[1:]]), trained([IDS]))


def test_eval_and_no_grad_collect_nothing() -> None:
    embeddings = EmbeddingBagCollection([user()])
    with torch.no_grad():
        assert not embeddings({"user": IDS})["user"].requires_grad
    embeddings.eval()
    out = embeddings({"user": IDS})["user"]
    assert not out.requires_grad
    assert embeddings.gradients == ()


def test_features_that_the_loss_does_not_use_are_not_touched() -> None:
    embeddings = EmbeddingBagCollection([user(), Feature(name="item", dim=2)])
    embeddings({"user": IDS, "item": IDS})["user"].sum().backward()
    embeddings.step()
    assert {name: stats.rows for name, stats in embeddings.store.stats().items()} == {"user": 2, "item": 0}


def test_discarded_gradients_are_gone() -> None:
    embeddings = EmbeddingBagCollection([user()])
    embeddings({"user": IDS})["user"].sum().backward()
    embeddings.discard_gradients()
    embeddings.step()
    assert embeddings.store.stats()["user"].rows == 0


def test_schedules_see_the_global_step_and_each_segment_has_its_own() -> None:
    seen = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 0.5 * (step + 1)

    segments = (Segment(dim=1, initializer=Zeros(), optimizer=SGD), Segment(dim=1, initializer=Zeros(), optimizer=SGD))
    embeddings = EmbeddingBagCollection([Feature(name="user", segments=segments, learning_rate=(None, schedule))])
    for _ in range(2):
        embeddings({"user": torch.tensor([1])})["user"].sum().backward()
        embeddings.step()
    assert embeddings({"user": torch.tensor([1])})["user"].tolist() == [[-2.0, -1.5]]
    embeddings.step(7)
    assert seen == [0, 1, 7]
    assert embeddings.steps.item() == 8


def test_a_schedule_holds_for_all_gradients_of_a_step() -> None:
    embeddings = EmbeddingBagCollection([user(learning_rate=lambda step: 0.25)])
    for _ in range(2):
        embeddings({"user": torch.tensor([1])})["user"].sum().backward()
    embeddings.step()
    assert embeddings({"user": torch.tensor([1])})["user"][0, 0].item() == -0.5


def test_the_event_time_reaches_the_rows_and_expiry_counts_from_it() -> None:
    embeddings = EmbeddingBagCollection(
        [user(slot=1, expire_seconds=10), Feature(name="item", slot=2, dim=2, initializer=Zeros(), optimizer=SGD)]
    )
    for time, ids in ((100, [1]), (110, [2])):
        outputs = embeddings({"user": torch.tensor(ids), "item": torch.tensor(ids)})
        (outputs["user"] + outputs["item"]).sum().backward()
        embeddings.step(event_time=time)
    assert embeddings.store.evict() == {"slots_2_sgd": 1}
    assert embeddings({"user": torch.tensor([1, 2]), "item": torch.tensor([1, 2])})["user"].tolist() == [
        [0.0, 0.0],
        [-1.0, -1.0],
    ]


def test_ids_below_the_threshold_get_no_row() -> None:
    embeddings = EmbeddingBagCollection([user(occurrence_threshold=2)])
    for expected in (0, 0, 1):
        embeddings({"user": torch.tensor([7])})["user"].sum().backward()
        embeddings.step()
        assert embeddings.store.stats()["user"].rows == expected


def test_a_bias_is_an_output_of_its_own() -> None:
    bias = Segment(dim=1, initializer=Constant(value=5.0), optimizer=SGD)
    embeddings = EmbeddingBagCollection(
        [
            user(bias=bias),
            Feature(name="seen", shared_with="user", pooling="none"),
            Feature(name="b", shared_with="user", bias=True),
        ]
    )
    outputs = embeddings({"user": IDS, "seen": Ragged.from_lists([[3], [], [4, 3]]), "b": IDS})
    assert list(outputs) == ["user", "user.bias", "seen", "b", "b.bias"]
    assert outputs["user"].tolist() == [[0.0, 0.0]] * 3
    assert outputs["user.bias"].tolist() == outputs["b.bias"].tolist() == [[5.0]] * 3
    assert outputs["seen"].to_lists() == [[[0.0, 0.0]], [], [[0.0, 0.0], [0.0, 0.0]]]
    outputs["user.bias"].sum().backward()
    embeddings.step()
    assert embeddings({"user": IDS, "seen": IDS, "b": IDS})["user.bias"].tolist() == [[3.0], [4.0], [3.0]]


def test_a_forgotten_step_is_an_error_before_it_fills_the_memory() -> None:
    embeddings = EmbeddingBagCollection([user()])
    for _ in range(MAX_PENDING):
        embeddings({"user": IDS})["user"].sum().backward()
    loss = embeddings({"user": IDS})["user"].sum()
    with pytest.raises(InvalidArgumentError, match=rf"{MAX_PENDING} backward passes wait to be applied; call step\(\)"):
        loss.backward()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"users": IDS, "item": IDS}, r"batch\['user'\]: there is no such column; did you mean 'users'\?"),
        ({"user": IDS, "item": IDS[:2]}, r"batch\['item'\]: expected 3 rows as in batch\['user'\], got 2"),
        (
            {"user": IDS.float(), "item": IDS},
            r"batch\['user'\]: expected ids of type int64, got torch.float32; .*hash_strings",
        ),
        (
            {"user": torch.zeros(3, 1, 1, dtype=torch.int64), "item": IDS},
            r"batch\['user'\]: expected \[rows\] or \[rows, n\], got",
        ),
        (
            {"user": Ragged(torch.zeros(3, 2, dtype=torch.int64), [0, 1, 2, 3]), "item": IDS},
            r"expected values \[n\], got \[3, 2\]",
        ),
        ({"user": torch.tensor(3), "item": IDS}, r"batch\['user'\]: expected one number per row as a tensor"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_column(batch: dict[str, torch.Tensor], message: str) -> None:
    embeddings = EmbeddingBagCollection([user(), Feature(name="item", dim=2)])
    with pytest.raises(InvalidArgumentError, match=message):
        embeddings(batch)


def test_no_rows_and_no_ids_are_fine() -> None:
    embeddings = EmbeddingBagCollection(
        [user(slot=1), Feature(name="tags", shared_with="user", pooling="last_n", max_length=3)]
    )
    empty = torch.empty(0, dtype=torch.int64)
    outputs = embeddings({"user": empty, "tags": Ragged(empty, [0])})
    assert [list(output.shape) for output in outputs.values()] == [[0, 2], [0, 3, 2], [0, 3]]
    outputs = embeddings({"user": empty.reshape(4, 0), "tags": Ragged(empty, [0] * 5)})
    assert outputs["user"].tolist() == [[0.0, 0.0]] * 4
    assert not outputs["tags"].any()


def test_int32_ids_are_the_same_ids() -> None:
    embeddings = EmbeddingBagCollection([Feature(name="user", dim=2)])
    assert torch.equal(embeddings({"user": IDS.int()})["user"], embeddings({"user": IDS})["user"])


def test_a_store_that_does_not_fit_is_refused() -> None:
    def table(**fields: object) -> EmbeddingTable:
        return EmbeddingTable(TableConfig(**fields))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="it has no table 'user' for feature 'user'; it has 'other'"):
        EmbeddingBagCollection([user()], LocalStore([table(name="other", segments=(Segment(dim=2),))]))
    with pytest.raises(ConfigError, match="the segments of its table 'user' are not those of feature 'user'"):
        EmbeddingBagCollection([user()], LocalStore([table(name="user", segments=(Segment(dim=3),))]))


def test_two_collections_on_one_store_see_each_other_and_two_stores_do_not() -> None:
    one = EmbeddingBagCollection([user()])
    same, other = EmbeddingBagCollection([user()], one.store), EmbeddingBagCollection([user()])
    one({"user": IDS})["user"].sum().backward()
    one.step()
    assert (
        same({"user": IDS})["user"].tolist()
        == one({"user": IDS})["user"].tolist()
        != other({"user": IDS})["user"].tolist()
    )


def test_collections_are_found_once_each() -> None:
    embeddings = EmbeddingBagCollection([user()])
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(embeddings), "b": embeddings})
    assert embedding_collections(model) == [embeddings]
    assert embedding_collections([model, embeddings]) == [embeddings]
    assert list(embeddings.parameters()) == []
    assert "user -> user" in repr(model)


def test_requests_are_plain_arrays() -> None:
    embeddings = EmbeddingBagCollection([user(slot=3)])
    asked: list[Bags] = []

    class Recording(LocalStore):
        def lookup(self, requests: list[Bags]) -> list[torch.Tensor]:  # type: ignore[override]
            asked.extend(requests)
            return super().lookup(requests)

    EmbeddingBagCollection([user(slot=3)], Recording(embeddings.store.tables.values()))({"user": IDS})  # type: ignore[attr-defined]
    (request,) = asked
    assert (request.table, request.pooling) == ("slots_2_sgd", "sum")
    assert isinstance(request.ids, np.ndarray)
    assert request.ids.tolist() == [(3 << 48) + i for i in IDS.tolist()]
    assert request.offsets.tolist() == [0, 1, 2, 3]
