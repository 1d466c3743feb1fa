"""Danger: the synthetic world lacks what it promises, so a benchmark on it measures nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from monolith.data.synthetic import ClickStream, ClickStreamConfig, CriteoLike, CriteoLikeConfig, LateClicks, best_auc
from monolith.data.synthetic.criteo import write_parquet
from monolith.data.transforms import concat_rows
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Ragged, fid_v2


def read(stream: ClickStream | CriteoLike | LateClicks, batches: int) -> Batch:
    return concat_rows([batch for _, batch in zip(range(batches), stream, strict=False)])


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Share of pairs ranked right, by counting."""
    positive, negative = score[label > 0], score[label == 0]
    right = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    return right / (len(positive) * len(negative))


IMPATIENT = ClickStreamConfig(click_delay=60.0, click_window=60.0)


@pytest.mark.parametrize("source", [ClickStream(IMPATIENT), CriteoLike()], ids=["clicks", "criteo"])
def test_the_stated_probability_is_the_frequency_of_clicks(source: ClickStream | CriteoLike) -> None:
    rows = read(source, 50)
    probability, label = rows["click_probability"].numpy(), rows["label"].numpy()
    for group in np.array_split(np.argsort(probability), 10):
        expected = probability[group].mean()
        deviation = np.sqrt(expected * (1 - expected) / len(group))
        assert abs(label[group].mean() - expected) < 4.5 * deviation


def test_best_auc_is_what_the_true_probability_reaches() -> None:
    rows = read(ClickStream(ClickStreamConfig(batch_size=5000)), 1)
    probability = rows["click_probability"].numpy().astype(np.float64)
    reached = auc(probability, rows["label"].numpy())
    assert abs(reached - best_auc(rows["click_probability"])) < 0.03
    rng = np.random.default_rng(0)
    small = probability[:400]
    simulated = [auc(small, (rng.random(400) < small).astype(float)) for _ in range(400)]
    assert abs(np.mean(simulated) - best_auc(torch.from_numpy(small))) < 4 * np.std(simulated) / 20


def test_best_auc_counts_ties_half_and_refuses_one_sided_data() -> None:
    p = np.array([0.2, 0.2, 0.7, 0.7, 0.4])
    weight = p[:, None] * (1 - p) * (1 - np.eye(5))
    order = (p[:, None] > p) + 0.5 * (p[:, None] == p)
    assert best_auc(torch.from_numpy(p)) == pytest.approx((weight * order).sum() / weight.sum())
    for wrong in ([0.5], [0.0, 0.0], [1.0, 1.0], [-0.1, 0.5], [float("nan"), 0.5]):
        with pytest.raises(InvalidArgumentError, match="probability"):
            best_auc(torch.tensor(wrong))


def test_popularity_is_zipf() -> None:
    config = ClickStreamConfig(items=1000, new_items_per_hour=0.0, batch_size=200_000, popularity_exponent=1.0)
    _, counts = torch.unique(ClickStream(config).batch(0)["item_id"], return_counts=True)
    counts = np.sort(counts.numpy())[::-1]
    expected = 200_000 / np.arange(1, 1001) / (1 / np.arange(1, 1001)).sum()
    assert np.abs(counts[:20] / expected[:20] - 1).max() < 0.06


def test_later_items_have_the_popularity_of_the_first() -> None:
    config = ClickStreamConfig(items=7, popularity_exponent=1.0)
    drawn = ClickStream(config)._catalogue.draw(np.random.default_rng(0), 400_000, 17)
    counts = np.bincount(drawn, minlength=17)
    assert len(counts) == 17
    expected = 1 / np.arange(1, 8)
    scale = counts[:7].sum() / expected.sum()
    for generation in (counts[:7], np.sort(counts[7:14])[::-1]):
        assert np.abs(generation / (scale * expected) - 1).max() < 0.05
    # Of the third generation only three items exist. Each has the popularity of a rank, and no two of them the same.
    ranks = np.rint(scale / counts[14:])
    assert len(set(ranks)) == 3
    assert ranks.min() >= 1
    assert ranks.max() <= 7
    assert np.abs(counts[14:] * ranks / scale - 1).max() < 0.05


def test_a_late_batch_costs_no_more_memory_than_the_first() -> None:
    stream = ClickStream(ClickStreamConfig(users=100, items=100, new_items_per_hour=1e6))

    def peak(number: int) -> int:
        tracemalloc.start()
        try:
            stream.batch(number)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    stream.batch(0)
    early = peak(1)
    assert stream.items_at(stream.config.start_time + 10**6 * 2048 / 200) > 10**9
    assert peak(10**6) < 1.5 * early


def test_new_items_appear_and_are_shown() -> None:
    config = ClickStreamConfig(items=100, new_items_per_hour=1000.0, impressions_per_second=1.0, fresh_share=0.3)
    stream = ClickStream(config)
    seen: set[int] = set()
    for number in range(4):
        batch = stream.batch(number)
        items = set(batch["item_id"].tolist())
        assert len(items - seen) > 20
        # The first batch is drawn before anything new has appeared.
        assert len(seen | items) <= stream.items_at(int(batch["event_time"][0]))
        seen |= items


def test_tastes_drift() -> None:
    config = ClickStreamConfig(
        users=1, items=300, new_items_per_hour=0.0, popularity_exponent=0.0, quality=0.0, taste=3.0, batch_size=3600,
        impressions_per_second=1.0, drift_hours=8.0,
    )  # fmt: skip
    stream = ClickStream(config)

    def logits(hour: int) -> np.ndarray:
        batch = stream.batch(hour)
        by_item = dict(zip(batch["item_id"].tolist(), batch["click_probability"].tolist(), strict=True))
        p = np.array([by_item[item] for item in sorted(by_item)])
        assert len(p) == 300
        return np.log(p / (1 - p)) - config.bias

    start = logits(0)
    correlation = [np.corrcoef(start, logits(hour))[0, 1] for hour in (2, 4, 8)]
    assert correlation[0] < 0.8
    assert correlation[1] < -0.99
    assert correlation[2] > 0.99


def test_clicks_come_late_and_only_within_the_window() -> None:
    rows = read(ClickStream(ClickStreamConfig(click_delay=100.0, click_window=150.0, batch_size=50_000)), 1)
    clicked = rows["label"] > 0
    delay = (rows["click_time"] - rows["event_time"])[clicked]
    assert bool((rows["click_time"][~clicked] == -1).all())
    assert 0 <= int(delay.min()) <= 5
    assert 130 < int(delay.max()) <= 150
    # Mean of an exponential cut at 1.5 of its mean, less half a second of rounding down.
    assert abs(float(delay.double().mean()) - (100 - 150 / (np.exp(1.5) - 1) - 0.5)) < 3


def test_ids_are_distinct_fids_of_their_slots() -> None:
    rows = read(ClickStream(), 5)
    for slot, name in enumerate(("user_id", "item_id", "category_id"), start=1):
        assert fid_v2.slot_of(rows[name]).unique().tolist() == [slot]
    tags = rows["tag_ids"]
    assert isinstance(tags, Ragged)
    assert fid_v2.slot_of(tags.values).unique().tolist() == [4]
    assert tags.row_lengths().unique().tolist() == [1, 2, 3, 4]
    config = CriteoLikeConfig(cardinalities=(7, 5, 3), batch_size=5000)
    batch = CriteoLike(config).batch(0)
    assert [len(batch[f"C{i}"].unique()) for i in (1, 2, 3)] == [7, 5, 3]


def test_the_planted_logit_of_criteo_is_the_written_formula() -> None:
    source = CriteoLike(CriteoLikeConfig(cardinalities=(4, 3, 2), batch_size=16))
    weights, slopes, first_row = source._weights
    batch = source.batch(0)
    place = {}
    for column, cardinality in enumerate((4, 3, 2)):
        # An id's rank is found by how often it comes in a long run: rank 0 most often.
        ids, counts = (
            CriteoLike(source.config.model_copy(update={"batch_size": 100_000}))
            .batch(1)[f"C{column + 1}"]
            .unique(return_counts=True)
        )
        ranked = ids[counts.argsort(descending=True)].tolist()
        place |= {id_: first_row[column] + rank for rank, id_ in enumerate(ranked)}
        assert len(ranked) == cardinality
    for row in range(16):
        own = [weights[place[int(batch[f"C{c}"][row])]].astype(np.float64) for c in (1, 2, 3)]
        logit = source.config.bias + sum(slopes[i] * float(batch[f"I{i + 1}"][row]) for i in range(13))
        logit += sum(w[0] for w in own)
        logit += sum(own[a][1:5] @ own[b][1:5] for a in range(3) for b in range(a))
        assert float(batch["click_probability"][row]) == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


def test_parquet_has_the_rows_in_groups_of_the_asked_size(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    source = ClickStream(ClickStreamConfig(batch_size=100, batches=5))
    assert write_parquet(source, path, rows_per_group=150) == 500
    file = pyarrow.parquet.ParquetFile(path)
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert groups == [150, 150, 150, 50]
    expected = concat_rows(list(ClickStream(source.config)))
    table = file.read()
    for name, column in expected.items():
        values = column.to_lists() if isinstance(column, Ragged) else column.tolist()
        assert table[name].to_pylist() == values


def test_parquet_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one batch"):
        write_parquet([], tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match="dense"):
        write_parquet([{"dense": torch.zeros(2, 2)}], tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match="rows_per_group"):
        write_parquet([{"a": torch.zeros(2)}], tmp_path / "a", rows_per_group=0)
