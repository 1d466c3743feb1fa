"""Danger: the same script trains another model, or none, once its tables are on servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from monolith import EmbeddingBagCollection, Feature, RunConfig, Trainer
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import ConfigError
from monolith.ps import ClientConfig, ParameterServer, ReadAhead, ServerStore, tables_of
from monolith.table import Adagrad, AdmissionFilter, Bags, EmbeddingTable, Gradient, LocalStore
from monolith.table.store import Position, Store

IDS, SPLITS = np.arange(200), np.arange(201)

COLUMNS = ("user_id", "item_id", "tag_ids")
FEATURES = [
    Feature(name="user_id", dim=16, optimizer=Adagrad(learning_rate=0.1)),
    Feature(name="item_id", dim=16, optimizer=Adagrad(learning_rate=0.1), occurrence_threshold=1),
    Feature(name="tag_ids", dim=16, optimizer=Adagrad(learning_rate=0.1), pooling="mean"),
]


class ClickModel(torch.nn.Module):
    """The model of the README, whose tables may be anywhere."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embeddings = EmbeddingBagCollection(FEATURES, store)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        user, item, tags = self.embeddings(batch).values()
        return self.mlp(torch.cat([user, item, tags], dim=1)).squeeze(1) + (user * (item + tags)).sum(1)


def train(store: Store | None, *, delayed: bool) -> tuple[ClickModel, list[float]]:
    model, losses = ClickModel(store), []
    config = RunConfig(enable_embedding_postpush=delayed, embedding_prefetch_capacity=1)
    trainer = Trainer(model, torch.optim.Adam(model.mlp.parameters()), config=config)
    for batch in ClickStream(ClickStreamConfig(users=200, batches=8, batch_size=256)):
        losses.append(trainer.train_step(batch).loss.item())
    trainer.push.drain()
    return model, losses


@pytest.fixture(params=[1, 2, 3])
def addresses(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ParameterServer()).address for _ in range(request.param)]


@pytest.mark.parametrize("delayed", [False, True])
def test_a_model_on_servers_is_that_of_one_process_bit_for_bit(addresses: list[str], delayed: bool) -> None:
    local, expected = train(None, delayed=delayed)
    with ServerStore(addresses, tables_of(FEATURES)) as store:
        remote, losses = train(store, delayed=delayed)
        assert losses == expected
        for mine, theirs in zip(remote.mlp.parameters(), local.mlp.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        for name, table in local.embeddings.store.tables.items():  # type: ignore[attr-defined]
            ids = table.entries().ids.numpy()
            assert len(ids) == store.stats()[name].rows > 0
            bags = Bags(table=name, ids=ids, offsets=torch.arange(len(ids) + 1).numpy())
            assert torch.equal(store.lookup([bags])[0], table.lookup(ids))


class LateStore(LocalStore):
    """A local store whose lookups miss the last update, by rules that can be read at a glance."""

    def __init__(self) -> None:
        tables = tables_of(FEATURES)
        super().__init__(
            EmbeddingTable(t.config, admission=None if t.admission is None else AdmissionFilter(t.admission))
            for t in tables
        )
        self._waiting: list[tuple[list[Gradient], int, int]] = []

    def apply(
        self,
        gradients: Sequence[Gradient],
        *,
        step: int = 0,
        event_time: int = 0,
        position: Position | None = None,
    ) -> None:
        self.catch_up()
        self._waiting = [(list(gradients), step, event_time)]

    def catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for gradients, step, event_time in waiting:
            super().apply(gradients, step=step, event_time=event_time)


def test_reading_ahead_misses_exactly_the_update_before(addresses: list[str]) -> None:
    stream = list(ClickStream(ClickStreamConfig(users=200, batches=8, batch_size=256)))
    outcomes = []
    with ServerStore(addresses, tables_of(FEATURES)) as store:
        for place in (LateStore(), store):
            model, losses = ClickModel(place), []
            trainer = Trainer(model, torch.optim.Adam(model.mlp.parameters()))
            for batch in ReadAhead(stream, model):
                losses.append(trainer.train_step(batch).loss.item())
            if isinstance(place, LateStore):
                place.catch_up()
            rows = [place.lookup([Bags(table=n, ids=IDS, offsets=SPLITS)])[0] for n in ("user_id", "tag_ids")]
            outcomes.append((losses, torch.cat(rows)))
    (late_losses, late_rows), (losses, rows) = outcomes
    assert losses == late_losses
    assert losses != train(None, delayed=False)[1]
    assert torch.equal(rows, late_rows)


def test_reading_ahead_knows_the_place_of_the_batch_handed_out(addresses: list[str]) -> None:
    with ServerStore(addresses, tables_of(FEATURES)) as store:
        model = ClickModel(store)
        ahead = ReadAhead(ClickStream(ClickStreamConfig(users=50, batches=5, batch_size=8)), model)
        batches = iter(ahead)
        for _ in range(2):
            model(next(batches))
        place = ahead.state_dict()
        again = ReadAhead(ClickStream(ClickStreamConfig(users=50, batches=5, batch_size=8)), model)
        again.load_state_dict(place)
        third = next(iter(again))
        assert torch.equal(third["user_id"], next(batches)["user_id"])


def test_a_lookup_that_was_not_begun_is_not_given_what_was(addresses: list[str]) -> None:
    with ServerStore(addresses, tables_of(FEATURES)) as store:
        store.assign("user_id", [1, 2], torch.stack([torch.ones(16), torch.full((16,), 2.0)]))
        one, two = (Bags(table="user_id", ids=IDS[n : n + 1], offsets=SPLITS[:2]) for n in (1, 2))
        for _ in range(20):  # for batches that never come
            store.prefetch([Bags(table="user_id", ids=IDS[:3], offsets=SPLITS[:4])])
        store.prefetch([one])
        assert store.lookup([two])[0][0, 0] == 2
        store.assign("user_id", [1], torch.full((1, 16), 5.0))
        assert store.lookup([one])[0][0, 0] == 1, "it was asked for before the change"
        assert store.lookup([one])[0][0, 0] == 5


def test_a_narrow_wire_trains_nearly_the_same_model(addresses: list[str]) -> None:
    _, expected = train(None, delayed=False)
    with ServerStore(addresses, tables_of(FEATURES), config=ClientConfig(wire="float16")) as store:
        _, losses = train(store, delayed=False)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=1e-2)


def test_a_model_that_is_not_the_servers_is_refused_before_it_trains(addresses: list[str]) -> None:
    with ServerStore(addresses, tables_of(FEATURES)):
        other = [Feature(name="user_id", dim=8)]
        with pytest.raises(ConfigError, match="table 'user_id': the server has it with other rows"):
            ServerStore(addresses, tables_of(other))
        with ServerStore(addresses) as empty, pytest.raises(ConfigError, match="user_id"):
            EmbeddingBagCollection(other, empty)
