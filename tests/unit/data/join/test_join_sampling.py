"""Danger: negatives are dropped at another rate than said, or so that a trained model predicts too much or too little."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from join_oracle import Acted, Shown, config_for, join_all, joined, write_events, written
from monolith.data.join import NegativeSampling, is_kept
from monolith.nn import Head

COUNT = 6000


def events() -> tuple[list[Shown], list[Acted]]:
    """Impressions of which 12 % are clicked, and a third of those bought."""
    random = torch.Generator().manual_seed(3)
    shown = [Shown(f"k{n}", 1_000_000 + n) for n in range(COUNT)]
    draws = torch.rand(COUNT, generator=random).tolist()
    acted = [Acted(one.key, one.time + 1000, "click") for one, draw in zip(shown, draws, strict=True) if draw < 0.12]
    acted += [Acted(one.key, one.time + 2000, "buy") for one, draw in zip(shown, draws, strict=True) if draw < 0.04]
    return shown, acted


def logit_of_best_fit(batch: dict[str, torch.Tensor], head: Head) -> float:
    """Train a model of one weight, a bias, to the minimum of the head's loss."""
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([bias], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = head.loss(bias.float().expand(len(batch["sample_rate"])) * 1.0, batch) / COUNT
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)
    return bias.item()


def batch_of(folder: Path, *, only: int | None = None) -> dict[str, torch.Tensor]:
    rows = [one.fields for one in written(folder / "examples")]
    names = [name for name in rows[0] if name not in ("key", "time", "user")]
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float32) for name in names}


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_a_model_of_sampled_negatives_predicts_the_mean_of_the_stream(tmp_path: Path, rate: float) -> None:
    shown, acted = events()
    write_events(tmp_path, shown, acted)
    counts = join_all(config_for(tmp_path, sampling={"rate": rate, "weight_column": "weight"}, lead_secs=20))
    labels = joined(shown, acted, config_for(tmp_path, lead_secs=20))
    true = sum(label["clicked"] for label in labels.values()) / COUNT
    batch = batch_of(tmp_path)
    kept = sum(
        is_kept(key.encode(), NegativeSampling(rate=rate)) for key, label in labels.items() if not label["clicked"]
    )
    assert counts["negatives"] == kept
    assert counts.get("sampled_out", 0) == COUNT - counts["positives"] - kept
    # What the sample happens to be is known exactly: the rate that corrects it is that of the keys kept, within its error.
    error = math.sqrt(rate * (1 - rate) / (COUNT * (1 - true))) / rate
    corrected = torch.sigmoid(
        torch.tensor(logit_of_best_fit(batch, Head(label="clicked", sample_rate="sample_rate")))
    ).item()
    assert corrected == pytest.approx(true, rel=4 * error + 1e-3)
    weighted = torch.sigmoid(
        torch.tensor(logit_of_best_fit(batch, Head(label="clicked", sample_weight="weight")))
    ).item()
    assert weighted == pytest.approx(true, rel=4 * error + 1e-3)
    if rate < 1:
        naive = torch.sigmoid(torch.tensor(logit_of_best_fit(batch, Head(label="clicked")))).item()
        assert naive > 2 * true


def test_weights_correct_a_label_whose_negatives_are_not_those_sampled(tmp_path: Path) -> None:
    """A click without a purchase is a negative for "bought" that is always kept: one rate cannot say so, weights can."""
    shown, acted = events()
    write_events(tmp_path, shown, acted)
    labels = [{"name": "clicked", "actions": {"click": 1}}, {"name": "bought", "actions": {"buy": 1}}]
    join_all(config_for(tmp_path, labels=labels, sampling={"rate": 0.2, "weight_column": "weight"}, lead_secs=20))
    batch = batch_of(tmp_path)
    true = len({one.key for one in acted if one.type == "buy"}) / COUNT
    weighted = torch.sigmoid(
        torch.tensor(logit_of_best_fit(batch, Head(label="bought", sample_weight="weight")))
    ).item()
    assert weighted == pytest.approx(true, rel=0.15)
    by_rate = torch.sigmoid(
        torch.tensor(logit_of_best_fit(batch, Head(label="bought", sample_rate="sample_rate")))
    ).item()
    assert abs(weighted - true) < abs(by_rate - true)


def test_fast_examples_with_sample_bias_predict_the_mean_of_the_stream(tmp_path: Path) -> None:
    """Each positive was a negative first, so the data have odds of p where a stream has p / (1 - p)."""
    shown, acted = events()
    write_events(tmp_path, shown, acted)
    join_all(config_for(tmp_path, emit="fast", sampling={"rate": 0.5}, lead_secs=20))
    batch = batch_of(tmp_path)
    true = len({one.key for one in acted}) / COUNT
    head = Head(label="clicked", sample_rate="sample_rate", sample_bias=True)
    assert torch.sigmoid(torch.tensor(logit_of_best_fit(batch, head))).item() == pytest.approx(true, rel=0.06)


def test_what_is_kept_depends_on_the_key_alone(tmp_path: Path) -> None:
    """Golden: another hash would draw other negatives after an upgrade, and join each half of a run with another sample."""
    kept = [key for key in range(40) if is_kept(b"%d" % key, NegativeSampling(rate=0.25))]
    assert kept == KEPT
    again = [key for key in range(40) if is_kept(b"%d" % key, NegativeSampling(rate=0.25, seed=1))]
    assert again != kept
    assert all(is_kept(b"%d" % key, NegativeSampling()) for key in range(40))


KEPT = [3, 9, 14, 16, 21, 25, 30, 38]
