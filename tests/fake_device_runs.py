"""Runs on a fake accelerator, in a process of their own: `python fake_device_runs.py` prints a JSON object from name to error.

Each function is a case. What it asserts is what test_fake_device.py promises.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.errors import MonolithError
from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.original.tpu_runner import TPUFlags, TPURunner
from monolith.serve import load
from monolith.testing.fake_device import FakeDevice
from monolith.train import Estimator, Head, RunConfig, Trainer
from monolith.train.device import find_device
from monolith.train.hooks import DeepInsightHook, FeatureStatisticsHook, ProgressHook
from rank_runs import Batches, RankRun, rows_of
from tpu_tasks import Ranking, ranking_params
from training import ClickModel, batch_of

DEVICE = FakeDevice()


class Net(nn.Module):
    """A dense net over two features, one of them with a bias and one pooled by mean, and a dense column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        features = [Feature(name="user", dim=4, bias=True), Feature(name="tags", dim=4, pooling="mean")]
        self.embeddings = EmbeddingBagCollection(features)
        self.dense = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Batch -> logits [rows, 1]."""
        rows = self.embeddings(batch)
        joined = torch.cat([rows["user"], rows["tags"], batch["x"]], dim=1)  # type: ignore[list-item]
        logits: torch.Tensor = self.dense(joined) + rows["user.bias"]
        return logits


def batches(count: int = 6) -> list[Batch]:
    """Small batches with ids in main memory."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "user": torch.arange(5) + n,
            "tags": Ragged.from_lists([[1, 2], [], [n], [4], [5]]),
            "x": torch.randn(5, 1, generator=generator),
            "label": (torch.arange(5) % 2).float(),
        }
        for n in range(count)
    ]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All dense parameters and all rows, in main memory."""
    found = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
    tables = model.embeddings.store.tables  # type: ignore[union-attr]
    return found | {name: table.lookup(torch.arange(-2, 20)) for name, table in tables.items()}  # type: ignore[union-attr]


def require_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Both have the same values, up to the order of sums."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6, msg=name)


def require_refusal(call: Callable[[], object], message: str) -> None:
    """The call raises an error of ours with this message."""
    with pytest.raises(MonolithError, match=re.escape(message)):
        call()


def trained(device: str | None, **settings: object) -> Estimator:
    """An estimator that has trained on four batches."""
    estimator = Estimator(Net(), RunConfig(device=device, **settings))  # type: ignore[arg-type]
    estimator.train(batches(4))
    return estimator


def views_of_the_fake_share_its_memory() -> None:
    tensor = torch.zeros(2, 3, device="fake")
    tensor[:, 1] = 5.0
    tensor.view(-1)[3] = 7.0
    assert tensor.cpu().tolist() == [[0, 5, 0], [7, 5, 0]]
    with pytest.raises(NotImplementedError, match="cannot write into a view of a view with gaps"):
        tensor.t()[0].fill_(1.0)


def copies_and_reads_are_counted() -> None:
    before = DEVICE.to_device, DEVICE.to_host, DEVICE.reads
    tensor = torch.ones(3).to("fake") * 2
    assert tensor.sum().item() == 6
    assert tensor.cpu().tolist() == [2, 2, 2]
    assert (DEVICE.to_device - before[0], DEVICE.to_host - before[1], DEVICE.reads - before[2]) == (1, 1, 1)


def it_is_the_current_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert find_device("auto") == torch.device("fake")
    assert find_device("fake:0") == torch.device("fake:0")
    for missing in ("fake:1", "cuda"):
        require_refusal(lambda missing=missing: find_device(missing), "torch finds 1 of type 'fake'")  # type: ignore[misc]


def a_run_has_the_values_of_one_on_the_host() -> None:
    for clip_type in ("global_norm", "dense_and_sparse", "norm", "value"):
        settings = {"clip_norm": 0.5, "sparse_clip_norm": 0.2, "clip_type": clip_type}
        there, here = trained("auto", **settings), trained("cpu", **settings)
        assert {parameter.device.type for parameter in there.model.parameters()} == {"fake"}
        require_equal(weights(there.model), weights(here.model))


def ids_never_leave_the_host() -> None:
    trainer = trained("fake").trainer
    copied = DEVICE.to_device, DEVICE.to_host
    trainer.train_step(batches(1)[0])
    # To the device: the vectors of two tables, x, the label, and the number of the step in Adam's state is on the host.
    # Back: the gradients of two tables, and the norms of the two for the joint norm are made on the host.
    to_device, to_host = DEVICE.to_device - copied[0], DEVICE.to_host - copied[1]
    assert (to_device, to_host) == (6, 2), (to_device, to_host)


def a_model_that_the_caller_has_moved_gets_its_batches_there() -> None:
    model = Net().to("fake")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = Trainer(model, optimizer)
    assert trainer.device.type == "fake"
    trainer.fit(batches(4))
    require_equal(weights(model), weights(trained("cpu").model))


def a_model_moved_after_its_optimizer_was_made_is_refused() -> None:
    model = Net()
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    model.to("fake")
    require_refusal(lambda: trainer.fit(batches(4)), "it has none of the model's parameters, which are on fake")
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    require_refusal(lambda: Trainer(model, optimizer, config=RunConfig(device="fake")), "then make the optimizer")


def a_model_moved_after_its_trainer_was_made_is_followed() -> None:
    model = Net().to("fake")
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    model.to("cpu")
    trainer.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer.fit(batches(4))
    require_equal(weights(model), weights(trained("cpu").model))


def a_checkpoint_moves_between_devices() -> None:
    undisturbed = weights(trained("cpu").model)
    for first, then in (("fake", "cpu"), ("cpu", "fake"), ("fake", "fake")):
        with tempfile.TemporaryDirectory() as folder:
            Estimator(Net(), RunConfig(device=first, model_dir=folder)).train(batches(4), steps=2)
            second = Estimator(Net(), RunConfig(device=then, model_dir=folder, resume_data=False))
            assert second.train(batches(4)[2:], steps=2) == 4
            require_equal(weights(second.model), undisturbed)


def evaluation_prediction_and_export_agree_with_the_host() -> None:
    there, here = trained("fake"), trained("cpu")
    found, expected = there.evaluate(batches(6)[4:]), here.evaluate(batches(6)[4:])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    rows = [row["output"].cpu() for row in there.predict(batches(1))]
    torch.testing.assert_close(rows, [row["output"] for row in here.predict(batches(1))])
    before = dict(there.model.named_parameters())
    with tempfile.TemporaryDirectory() as folder:
        predictor = load(there.export_saved_model(folder))
        torch.testing.assert_close(predictor.predict(batches(1)[0])["output"], torch.stack(rows))
    assert all(parameter is before[name] for name, parameter in there.model.named_parameters())
    assert there.trainer.train_step(batches(1)[0]).step == 5


def heads_read_columns_on_both_sides() -> None:
    """Masks, weights and rates are on the device, the groups of a column of ids on the host."""
    heads = [Head(mask="has", sample_weight="weight", sample_rate="rate", group="user")]
    columns = {
        "has": torch.tensor([True, True, False, True, True]),
        "weight": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        "rate": torch.tensor([0.5, 1.0, 0.5, 1.0, 0.25]),
        "user": torch.tensor([1, 1, 2, 2, 2]),
    }
    data = [{**batch, **columns} for batch in batches(4)]
    results = []
    for device in ("fake", "cpu"):
        for static_rows in (None, 7):
            estimator = Estimator(Net(), RunConfig(device=device, static_rows=static_rows), heads=heads)
            estimator.train(data)
            results.append(estimator.evaluate(data))
    for found in results[:3]:
        torch.testing.assert_close(found, results[3], rtol=1e-4, atol=1e-5)
    assert "output/gauc" in results[0]


def padding_is_not_trained_on() -> None:
    padded, plain = trained("fake", static_rows=8), trained("cpu")
    assert {name: len(table) for name, table in padded.trainer.stores[0].tables.items()} == {
        name: len(table) for name, table in plain.trainer.stores[0].tables.items()
    }
    require_equal(weights(padded.model), weights(plain.model))


def hooks_read_results_on_the_device() -> None:
    seen: list[object] = []
    with tempfile.TemporaryDirectory() as folder:
        data = [{**batch, "uid": torch.arange(5), "req_time": torch.arange(5)} for batch in batches(4)]
        hooks = [
            ProgressHook(seen.append, every_steps=1),
            FeatureStatisticsHook(every_steps=1, write=lambda step, columns: seen.append(columns)),
            DeepInsightHook(f"{folder}/insight", model_name="net", sample_ratio=1.0),
        ]
        Estimator(Net(), RunConfig(device="fake", model_dir=f"{folder}/model")).train(data, hooks=hooks)
        assert len(seen) == 8, seen
        assert any(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())


def a_batch_with_a_column_on_another_device_is_refused_by_torch() -> None:
    model = Net().to("fake")
    with pytest.raises(RuntimeError, match="expected all tensors on fake"):
        model(batches(1)[0])


def the_runner_trains_a_task_with_host_calls() -> None:
    with tempfile.TemporaryDirectory() as folder:
        params = ranking_params(
            Path(folder), enable_host_call_scalar_metrics=True, enable_caching_with_tpu_var_mode=True
        )
        flags = TPUFlags(model_dir=f"{folder}/model", host_call_every_n_steps=2)
        runner = TPURunner(params, flags)
        assert runner.run() == 3
        task = runner.task
        assert isinstance(task, Ranking)
        assert {parameter.device.type for parameter in task.layers.parameters()} == {"fake"}
        assert list(Path(folder, "model", "host_call").iterdir())
        on_host = TPURunner(params, TPUFlags(model_dir=f"{folder}/other", host_call_every_n_steps=0, device="cpu"))
        assert on_host.run() == 3
        assert isinstance(on_host.task, Ranking)
        for there, here in zip(task.layers.parameters(), on_host.task.layers.parameters(), strict=True):
            torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)


def the_host_waits_for_the_device_five_times_a_step() -> None:
    trainer = trained("fake").trainer
    reads = DEVICE.reads
    trainer.train_step(batches(1)[0])
    # Whether the labels, the loss and the norm are valid, and whether the norm is above the limit, for dense and for sparse.
    assert DEVICE.reads - reads == 5, DEVICE.reads - reads


def ranks_train_as_on_the_host() -> None:
    """Two ranks with their dense parts on the device have the values of two on the host, with uneven batches."""
    settings = [{"clip_norm": 0.3}, {"clip_norm": 0.1, "clip_type": "norm"}, {"static_rows": 24}]
    for run in settings:
        there, here = (
            RankRun(
                model=lambda place=place: ClickModel().to(place),  # type: ignore[misc]
                source=lambda: Batches(7, lambda number: batch_of(number, rows=3 + number % 3)),
                run=run,
            ).ranks(2)
            for place in ("fake", "cpu")
        )
        assert [trained.trainer.device.type for trained in there] == ["fake", "fake"]
        require_equal({name: tensor.cpu() for name, tensor in there[0].dense.items()}, here[0].dense)
        for table, columns in rows_of(here).items():
            require_equal(rows_of(there)[table], columns)
        assert all(torch.equal(there[0].dense[name].cpu(), tensor.cpu()) for name, tensor in there[1].dense.items())


CASES = {
    name: case
    for name, case in list(globals().items())
    if inspect.isfunction(case) and case.__module__ == __name__ and not inspect.signature(case).parameters
}


if __name__ == "__main__":
    DEVICE.register()
    torch.set_num_threads(1)
    results: dict[str, str | None] = {}
    for case_name, run in CASES.items():
        try:
            run()
            results[case_name] = None
        except BaseException:
            results[case_name] = traceback.format_exc()
    json.dump(results, sys.stdout)
