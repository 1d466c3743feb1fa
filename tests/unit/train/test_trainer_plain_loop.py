"""Danger: a trainer that learns something else than the few lines of plain PyTorch it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.nn import clip_grad_norm_
from monolith.train import RunConfig, Trainer
from training import ClickModel, Stream, assert_same, batch_of

STEPS = 12


def clip_values(model: ClickModel, limit: float, sparse_limit: float) -> None:
    for parameter in model.parameters():
        parameter.grad.clamp_(-limit, limit)  # type: ignore[union-attr]
    model.embeddings.change_gradients(lambda values: values.clamp(-sparse_limit, sparse_limit))


def plain_loop(
    clip_norm: float | None = 1000.0, weight_decay: float = 0.0, clip: Callable[[ClickModel], object] | None = None
) -> ClickModel:
    model = ClickModel()
    adam = torch.optim.Adam(model.mlp.parameters(), lr=0.01)
    for number in range(STEPS):
        batch: dict[str, Any] = dict(batch_of(number))
        logits = model(batch)
        loss = binary_cross_entropy_with_logits(logits["click"], batch["clicked"], reduction="sum")
        loss = loss + 0.1 * (logits["stay"] - batch["seconds"]).square().sum()
        adam.zero_grad()
        loss.backward()
        if clip is not None:
            clip(model)
        elif clip_norm is not None:
            clip_grad_norm_(model, clip_norm)
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=weight_decay)  # type: ignore[union-attr]
        adam.step()
        model.embeddings.step(number, event_time=int(batch["time"].max()))
    return model


def trained(**config: Any) -> ClickModel:  # noqa: ANN401 - fields of RunConfig
    model = ClickModel()
    adam = torch.optim.Adam(model.mlp.parameters(), lr=0.01)
    trainer = Trainer(model, adam, config=RunConfig(event_time="time", **config))
    assert trainer.fit(Stream(), steps=STEPS) == STEPS
    return model


def test_trainer_equals_a_plain_loop_bit_for_bit() -> None:
    assert_same(trained(), plain_loop())


def test_reading_ahead_changes_nothing() -> None:
    assert_same(trained(embedding_prefetch_capacity=3), plain_loop())


@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_clipping_equals_a_plain_loop(clip_norm: float | None) -> None:
    assert_same(trained(clip_norm=clip_norm), plain_loop(clip_norm=clip_norm))


def test_other_ways_to_clip_equal_a_plain_loop() -> None:
    by_value = trained(clip_norm=0.05, clip_type="value", sparse_clip_norm=0.02)
    assert_same(by_value, plain_loop(clip=lambda model: clip_values(model, 0.05, 0.02)))


def test_the_sparse_limit_rises_over_the_steps_of_its_warm_up() -> None:
    limits = iter([0.4 * min(1.0, step / 8) for step in range(1, STEPS + 1)])
    by_hand = plain_loop(clip=lambda model: clip_grad_norm_(model, 0.5, sparse_max_norm=next(limits)))
    assert_same(trained(clip_norm=0.5, sparse_clip_norm=0.4, sparse_norm_warmup_steps=8), by_hand)


@pytest.mark.parametrize("config", [{"clip_norm": None}, {"clip_type": "value"}])
def test_a_warm_up_without_a_limit_to_raise_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sparse_norm_warmup_steps: needs a clip_norm"):
        RunConfig(sparse_norm_warmup_steps=8, **config)


def test_clipping_matters_here() -> None:
    with pytest.raises(AssertionError):
        assert_same(trained(clip_norm=0.5), plain_loop())


def test_weight_decay_is_added_after_clipping_to_dense_gradients_only() -> None:
    assert_same(trained(dense_weight_decay=0.1, clip_norm=0.5), plain_loop(clip_norm=0.5, weight_decay=0.1))


def test_a_model_without_dense_parameters_needs_no_optimizer() -> None:
    class Sparse(ClickModel):
        def forward(self, batch: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
            bias = self.embeddings(batch)["item.bias"].squeeze(1)
            return {"click": bias, "stay": bias}

    model = Sparse()
    del model.mlp
    assert Trainer(model).fit(Stream(), steps=3) == 3


def test_a_model_with_dense_parameters_needs_one() -> None:
    with pytest.raises(InvalidArgumentError, match=r"optimizer.*'mlp\.0\.weight'"):
        Trainer(ClickModel())


def test_extra_loss_is_added() -> None:
    class Regularised(ClickModel):
        def extra_loss(self, batch: Any, logits: dict[str, torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
            return 3.0 * logits["stay"].square().sum()

    plain, extra = ClickModel(), Regularised()
    batch = batch_of(0)
    results = [Trainer(m, torch.optim.SGD(m.mlp.parameters())).train_step(batch) for m in (plain, extra)]
    added = 3.0 * results[0].logits["stay"].square().sum()
    assert torch.allclose(results[1].loss, results[0].loss + added)


def test_batches_must_be_dicts_and_sources_iterable() -> None:
    model = ClickModel()
    trainer = Trainer(model, torch.optim.SGD(model.mlp.parameters()))
    with pytest.raises(InvalidArgumentError, match="source: expected an iterable"):
        trainer.fit(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="batch: expected a dict"):
        trainer.fit([torch.ones(3)])  # type: ignore[list-item]


def test_steps_and_max_steps_are_alternatives() -> None:
    model = ClickModel()
    trainer = Trainer(model, torch.optim.SGD(model.mlp.parameters()))
    with pytest.raises(InvalidArgumentError, match="steps or max_steps"):
        trainer.fit(Stream(), steps=1, max_steps=2)
    with pytest.raises(InvalidArgumentError, match="max_steps: expected at least 0"):
        trainer.fit(Stream(), max_steps=-1)


def test_losses_of_layers_are_added() -> None:
    class Costly(ClickModel):
        def auxiliary_loss(self) -> torch.Tensor:
            return 5.0 * torch.stack([parameter.square().sum() for parameter in self.mlp.parameters()]).sum()

    plain, costly = ClickModel(), Costly()
    results = [Trainer(m, torch.optim.SGD(m.mlp.parameters(), lr=0.0)).train_step(batch_of(0)) for m in (plain, costly)]
    assert torch.allclose(results[1].loss, results[0].loss + costly.auxiliary_loss())
