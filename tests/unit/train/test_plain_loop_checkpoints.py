"""Danger: a loop of one's own that saves and restores in three lines continues with other rows, weights or data than it had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.nn.heads import heads_of, logits_by_head, total_loss
from monolith.train import ModelCheckpoints
from training import ClickModel, Stream, assert_same


def loop(model_dir: Path | None, until: int, *, save_every: int = 2) -> ClickModel:
    """What a user writes."""
    model, stream = ClickModel(), Stream()
    adam = torch.optim.Adam(model.mlp.parameters(), lr=0.01)
    checkpoints = None if model_dir is None else ModelCheckpoints(model_dir, model, adam, source=stream)
    step = 0 if checkpoints is None else checkpoints.restore()
    for batch in stream:
        loss = total_loss(logits_by_head(model(batch), heads_of(model, None)), batch, heads_of(model, None))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        model.embeddings.step()
        step += 1
        if checkpoints is not None and step % save_every == 0:
            checkpoints.save(step)
        if step == until:
            break
    return model


def test_a_loop_that_was_interrupted_twice_equals_one_that_was_not(tmp_path: Path) -> None:
    loop(tmp_path, until=3)  # the third step is lost
    loop(tmp_path, until=6)
    assert_same(loop(tmp_path, until=8), loop(None, until=8))


def test_only_the_newest_stay(tmp_path: Path) -> None:
    model = ClickModel()
    adam = torch.optim.Adam(model.mlp.parameters())
    checkpoints = ModelCheckpoints(tmp_path, model, adam, max_to_keep=2)
    assert checkpoints.restore() == 0
    paths = [checkpoints.save(step) for step in (1, 2, 3)]
    assert [Path(path).name for path in paths] == ["model.ckpt-1", "model.ckpt-2", "model.ckpt-3"]
    assert [Path(path).exists() for path in paths] == [False, True, True]


def test_dense_parameters_need_their_optimizer() -> None:
    with pytest.raises(InvalidArgumentError, match="optimizer"):
        ModelCheckpoints("runs", ClickModel())


def test_a_model_of_tables_alone(tmp_path: Path) -> None:
    model = ClickModel().embeddings
    checkpoints = ModelCheckpoints(tmp_path, model)
    model.store.assign("user", [1, 2], torch.ones(2, 4))
    checkpoints.save(5)
    other = ClickModel().embeddings
    assert ModelCheckpoints(tmp_path, other).restore() == 5
    assert other.store.stats()["user"].rows == 2
