"""Danger: rows by slot next to a checkpoint that are not those of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Feature
from monolith.nn import EmbeddingBagCollection
from monolith.original import FidSlotCountSaverListener
from monolith.ps import ParameterServer, ServerStore
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Mesh
from monolith.ranks.rank_store import RankStore
from monolith.state.index import read_checkpoint_info
from monolith.table.embedding_table import EmbeddingTable
from monolith.testing import sgd_table_config
from monolith.testing.rank_threads import run_ranks
from monolith.train import Estimator, RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from training import ClickModel, batch_of


def distinct(steps: int, column: str) -> int:
    batches = [batch_of(number) for number in range(steps)]
    columns = [batch[column] for batch in batches]
    return len({int(one) for c in columns for one in (c if isinstance(c, torch.Tensor) else c.values)})


class SaveAt(Hook):
    """Asks for a checkpoint at a step."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.step == 2:
            trainer.save()


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("postpush", [False, True])
def test_rows_are_counted_by_slot_as_the_checkpoint_has_them(tmp_path: Path, servers: int, postpush: bool) -> None:
    config = RunConfig(model_dir=str(tmp_path), enable_embedding_postpush=postpush)
    estimator = Estimator(ClickModel(), config, runner=RunnerConfig(is_local=True, num_ps=servers))
    estimator.trainer.save_listeners = (FidSlotCountSaverListener(),)
    estimator.train([batch_of(number) for number in range(5)], hooks=[SaveAt()])
    for step in (2, 5):
        info = read_checkpoint_info(str(tmp_path), step)
        assert info is not None
        rows, slots = info
        # "item" has slot 1 and "tags" slot 2. They share a table, and "user" has one without slots.
        assert slots == {1: distinct(step, "item"), 2: distinct(step, "tags")}
        assert rows["user"] == distinct(step, "user")
        assert sum(rows.values()) == sum(slots.values()) + rows["user"]
    estimator.close()


def test_a_model_without_slots_has_nothing_to_count(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = EmbeddingBagCollection([Feature(name="item", dim=1)])

    trainer = Trainer(Plain(), config=RunConfig(model_dir=str(tmp_path)))
    trainer.save_listeners = (FidSlotCountSaverListener(),)
    with pytest.raises(InvalidArgumentError, match="no feature of the model has a slot"):
        trainer.fit([{"item": torch.tensor([1])}])


def test_counts_of_servers_and_ranks_are_those_of_one_table() -> None:
    ids = [slot << 48 | number for slot in (0, 3, 32767) for number in range(slot % 97 + 5)]
    table = EmbeddingTable(sgd_table_config(1, name="t"))
    table.assign(ids, torch.ones(len(ids), 1))
    assert table.slot_counts() == {0: 5, 3: 8, 32767: 32767 % 97 + 5}
    config = sgd_table_config(1, name="t")
    with (
        ParameterServer() as one,
        ParameterServer() as two,
        ServerStore([one.address, two.address], [config]) as store,
    ):
        assert store.slot_counts("t") == {}
        store.assign("t", ids, torch.ones(len(ids), 1))
        assert store.slot_counts("t") == table.slot_counts()

    def rank(mesh: Mesh) -> dict[int, int] | None:
        store, counts = RankStore(Agreement(mesh), [DeclaredTable(config=config)]), None
        if mesh.rank == 0:
            store.assign("t", ids, torch.ones(len(ids), 1))
            counts = store.slot_counts("t")
        store.agreement.next_step(rows=1)
        return counts

    assert run_ranks(2, rank) == [table.slot_counts(), None]
