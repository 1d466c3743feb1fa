"""Danger: a changed model over an old model_dir is refused with advice that cannot work: the user gets a second error, or the
same one again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith import EmbeddingBagCollection, Feature
from monolith.errors import CheckpointMismatchError
from monolith.features.batch import Batch
from monolith.train import Head, RunConfig, Trainer


class Model(nn.Module):
    heads = (Head(name="click", label="label"),)

    def __init__(self, *columns: str, dim: int = 2, wide: int = 1) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name=column, dim=dim) for column in columns])
        self.linear = nn.Linear(dim * len(columns), wide)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(torch.cat(list(self.embeddings(batch).values()), dim=1)).sum(1)


def train(folder: Path, model: Model, *, clear_nn: bool = False) -> None:
    batch: Batch = {name: torch.arange(2) for name in ("user", "item")}
    config = RunConfig(model_dir=str(folder), clear_nn=clear_nn, resume_data=False)
    Trainer(model, torch.optim.SGD(model.parameters()), config=config).fit([{**batch, "label": torch.ones(2)}])


def test_a_changed_dim_is_not_answered_with_clear_nn_alone(tmp_path: Path) -> None:
    train(tmp_path, Model("user"))
    tables, dense = "table 'user': segment 0 has dim 4.*use another model_dir", "'linear.weight' has shape .*clear_nn"
    with pytest.raises(CheckpointMismatchError, match=f"{tables}.*{dense}"):
        train(tmp_path, Model("user", dim=4))


def test_an_added_feature_is_answered_with_all_that_it_takes(tmp_path: Path) -> None:
    train(tmp_path, Model("user"))
    tables, dense = "table 'item'.*allow_new_tables", "'linear.weight' has shape .*clear_nn"
    with pytest.raises(CheckpointMismatchError, match=f"{tables}.*{dense}"):
        train(tmp_path, Model("user", "item"))


def test_clear_nn_that_was_done_before_is_not_simply_advised_again(tmp_path: Path) -> None:
    train(tmp_path, Model("user", "item"))
    train(tmp_path, Model("user"), clear_nn=True)
    with pytest.raises(CheckpointMismatchError, match=rf"done once: remove {tmp_path}/clear_nn to do it again"):
        train(tmp_path, Model("user", wide=3), clear_nn=True)
    (tmp_path / "clear_nn").unlink()
    train(tmp_path, Model("user", wide=3), clear_nn=True)
