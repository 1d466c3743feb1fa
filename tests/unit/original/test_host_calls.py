"""Danger: summaries that training waits for, that are lost at the end, or that are of other rows or steps than they say."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch
from monolith.metrics import AUC
from monolith.original.host_calls import BaseEmbeddingHostCall, BaseHostCall
from monolith.train import Head, Trainer

Written = list[tuple[int, dict[str, float]]]


class Same(nn.Module):
    """Its logits are a column of the batch. `calls` gets a tensor of each step."""

    def __init__(self, calls: BaseHostCall | None = None, heads: tuple[Head, ...] = (Head(),)) -> None:
        super().__init__()
        self.calls, self.heads = calls, heads

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.calls is not None:
            for ending in ("_avg", "_max", "_sum", ""):
                self.calls.record_summary_tensor(f"x{ending}", batch["x"])  # type: ignore[arg-type]
            self.calls.record_summary_tensor("rows_max", torch.tensor(len(batch["x"])))
        return {head.name: batch["x"] for head in self.heads}  # type: ignore[misc]


def batches(count: int, rows: int = 4) -> list[Batch]:
    return [
        {"x": torch.arange(rows).float() + n, "label": torch.arange(rows) % 2 * 1.0, "uid": torch.arange(rows)}
        for n in range(count)
    ]


def keep(written: Written) -> object:
    return lambda step, values: written.append((step, dict(values)))


def test_every_n_steps_tensors_are_summarised_by_their_names() -> None:
    written: Written = []
    calls = BaseHostCall(None, every_n_steps=2, write=keep(written))  # type: ignore[arg-type]
    Trainer(Same(calls), hooks=[calls]).fit(batches(5))
    # Step 2 has 1, 2, 3, 4, and step 4 has 3, 4, 5, 6.
    assert written == [
        (2, {"x_avg": 2.5, "x_max": 4.0, "x_sum": 10.0, "x": 1.0, "rows_max": 4.0}),
        (4, {"x_avg": 4.5, "x_max": 6.0, "x_sum": 18.0, "x": 3.0, "rows_max": 4.0}),
    ]


def test_tensors_of_one_dtype_become_one() -> None:
    calls = BaseHostCall(None)
    calls.is_due = True
    for name, tensor in (("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor(3)), ("c", torch.tensor(4.0))):
        calls.record_summary_tensor(name, tensor)
    sizes, tensors = calls.compress_tensors()
    assert [tensor.tolist() for tensor in tensors] == [[[1.0, 2.0, 4.0]], [[3]]]
    assert sizes == [[("a", 2), ("c", 1)], [("b", 1)]]
    found = calls.decompress_tensors(sizes, tensors)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [1, 2], "b": [3], "c": [4]}
    assert calls.compress_tensors() == ([], [])


def test_training_does_not_wait_for_a_call_and_the_end_does() -> None:
    may_write, trained, written = threading.Event(), threading.Event(), []

    def write(step: int, values: Mapping[str, float]) -> None:
        assert may_write.wait(60)
        written.append(step)

    calls = BaseHostCall(None, every_n_steps=3, write=write)
    model = Same(calls)
    thread = threading.Thread(target=lambda: Trainer(model, hooks=[calls]).fit(data()))

    def data() -> object:
        yield from batches(5)
        trained.set()

    thread.start()
    try:
        assert trained.wait(60)  # all five steps, while the call of the third waits
        assert written == []
    finally:
        may_write.set()
        thread.join(60)
    assert written == [3]


def test_an_error_of_a_call_ends_the_run() -> None:
    def write(step: int, values: Mapping[str, float]) -> None:
        raise OSError("the disk is full")

    calls = BaseHostCall(None, every_n_steps=1, write=write)
    with pytest.raises(OSError, match="the disk is full"):
        Trainer(Same(calls), hooks=[calls]).fit(batches(1))


def test_mistakes_in_recording_are_named() -> None:
    calls = BaseHostCall(None)
    calls.record_summary_tensor("x", torch.zeros(2, 2))  # not due: nothing is looked at
    calls.is_due = True
    with pytest.raises(InvalidArgumentError, match=r"x: expected a tensor of shape \[\] or \[n\], got \[2, 2\]"):
        calls.record_summary_tensor("x", torch.zeros(2, 2))
    calls.record_summary_tensor("x", torch.zeros(2))
    with pytest.raises(InvalidArgumentError, match="x: recorded before in this step"):
        calls.record_summary_tensor("x", torch.zeros(2))


def test_summaries_are_in_a_folder_of_their_own(tmp_path: Path) -> None:
    calls = BaseHostCall(str(tmp_path), every_n_steps=2)
    Trainer(Same(calls), hooks=[calls]).fit(batches(4))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "host_call"))
    events.Reload()
    assert sorted((point.step, point.value) for point in events.Scalars("x_max")) == [(2, 4.0), (4, 6.0)]


def test_disabled_calls_do_nothing() -> None:
    written: Written = []
    calls = BaseHostCall(None, enable_host_call=False, every_n_steps=1, write=keep(written))  # type: ignore[arg-type]
    Trainer(Same(calls), hooks=[calls]).fit(batches(3))
    assert written == []


def sampled(seed: int, rows: int = 40) -> Batch:
    random = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, generator=random),
        "label": torch.randint(0, 2, (rows,), generator=random).float(),
        "uid": torch.randint(0, 5000, (rows,), generator=random),
    }


def expected_auc(data: list[Batch], count: int) -> float:
    auc = AUC()
    for batch in data:
        buckets = batch["uid"] % 1000  # type: ignore[operator]
        rows = buckets.argsort()[:count]
        rows = rows[buckets[rows] < 10]
        auc.update(batch["x"].sigmoid()[rows], batch["label"][rows])  # type: ignore[union-attr, index]
    return auc.compute()


@pytest.mark.parametrize("caching", [False, True])
def test_the_auc_is_that_of_the_sampled_users(caching: bool) -> None:
    written: Written = []
    data = [sampled(seed, rows=400) for seed in range(9)]
    calls = BaseEmbeddingHostCall(
        None,
        every_n_steps=3,
        enable_caching_with_tpu_var_mode=caching,
        top_k_sampling_num_per_core=5,
        write=keep(written),  # type: ignore[arg-type]
    )
    Trainer(Same(), hooks=[calls]).fit(data)
    assert [step for step, _ in written] == [3, 6, 9]
    counted = [data[:3], data[:6], data] if caching else [data[2:3], [data[2], data[5]], [data[2], data[5], data[8]]]
    assert [values["output/auc"] for _, values in written] == [expected_auc(part, 5) for part in counted]


def test_scalars_are_for_those_who_ask() -> None:
    for scalars, norms in ((False, True), (True, False), (True, True)):
        written: Written = []
        calls = BaseEmbeddingHostCall(
            None,
            every_n_steps=1,
            enable_host_call_scalar_metrics=scalars,
            enable_host_call_norm_metrics=norms,
            write=keep(written),  # type: ignore[arg-type]
        )
        model = Same(calls)
        model.weight = nn.Parameter(torch.zeros(()))
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), hooks=[calls])
        trainer.fit(batches(1))
        names = set(written[0][1])
        scalar = {"loss_avg", "output/label_avg", "learning_rate_max", "x_avg", "x_max", "x_sum", "x", "rows_max"}
        assert names & scalar == (scalar if scalars else set())
        assert ("gradient_norm_max" in names) == (scalars and norms)
        if scalars:
            assert written[0][1]["learning_rate_max"] == 0.5
            assert written[0][1]["output/label_avg"] == 0.5


def test_rows_without_a_label_do_not_count() -> None:
    written: Written = []
    calls = BaseEmbeddingHostCall(None, every_n_steps=1, write=keep(written))  # type: ignore[arg-type]
    batch = batches(1)[0] | {
        "has": torch.tensor([True, True, True, False]),
        "label": torch.tensor([0.0, 1.0, 0.0, 9.0]),
    }
    Trainer(Same(heads=(Head(mask="has"),)), hooks=[calls]).fit([batch])
    assert written[0][1]["output/sampled_labels_avg"] == pytest.approx(1 / 3)


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_call_every_n_steps must be more than 1, got 1"):
        BaseEmbeddingHostCall(None, every_n_steps=1, enable_caching_with_tpu_var_mode=True)
    calls = BaseEmbeddingHostCall(None, every_n_steps=1)
    batch = {name: column for name, column in batches(1)[0].items() if name != "uid"}
    with pytest.raises(InvalidArgumentError, match="the batch has no column 'uid'"):
        Trainer(Same(), hooks=[calls]).fit([batch])
