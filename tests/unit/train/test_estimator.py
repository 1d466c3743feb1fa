"""Danger: an evaluation or prediction that is not of the model as trained, and calls that quietly do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, mean_squared_error, roc_auc_score

from monolith.errors import CheckpointMismatchError, ConfigError, InvalidArgumentError
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.table import Adagrad, Zeros
from monolith.train import Estimator, Head, RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from training import ClickModel, Stream, assert_same, batch_of, everything


class WithData(ClickModel):
    def input_fn(self, mode: str) -> Iterable[Batch]:
        return Stream(40 if mode == "train" else 5)


def trained(model_dir: Path | None = None) -> Estimator:
    estimator = Estimator(WithData(), RunConfig(model_dir=None if model_dir is None else str(model_dir)))
    estimator.train(steps=10)
    return estimator


def logits_of(estimator: Estimator, count: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    model = estimator.model.eval()
    batches = [batch_of(number) for number in range(count)]
    with torch.no_grad():
        outputs = [model(batch) for batch in batches]
    columns = {name: np.concatenate([batch[name].numpy() for batch in batches]) for name in ("clicked", "seconds")}  # type: ignore[union-attr]
    click, stay = (torch.cat([output[name] for output in outputs]).double().numpy() for name in ("click", "stay"))
    return click, stay, columns


def test_evaluate_agrees_with_scikit_learn_on_every_head() -> None:
    estimator = trained()
    metrics = estimator.evaluate()
    click, stay, labels = logits_of(estimator, 5)
    predicted = 1 / (1 + np.exp(-click))
    assert metrics["click/auc"] == pytest.approx(roc_auc_score(labels["clicked"], click), abs=1e-4)
    assert metrics["click/log_loss"] == pytest.approx(log_loss(labels["clicked"], predicted), rel=1e-5)
    assert metrics["click/loss"] == pytest.approx(metrics["click/log_loss"], rel=1e-5)
    assert metrics["click/calibration"] == pytest.approx(predicted.sum() / labels["clicked"].sum(), rel=1e-5)
    rate = labels["clicked"].mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert metrics["click/ne"] == pytest.approx(log_loss(labels["clicked"], predicted) / entropy, rel=1e-5)
    assert metrics["stay/mse"] == pytest.approx(mean_squared_error(labels["seconds"], stay), rel=1e-5)
    assert metrics["stay/loss"] == pytest.approx(metrics["stay/mse"], rel=1e-5)
    assert (metrics["click/examples"], metrics["global_step"]) == (40, 10)


def test_evaluate_stops_after_its_steps() -> None:
    assert trained().evaluate(steps=2)["click/examples"] == 16


def test_evaluating_and_predicting_train_nothing() -> None:
    estimator = trained()
    before = everything(estimator.model)
    estimator.evaluate()
    list(estimator.predict())
    after = everything(estimator.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sampled_examples_stand_for_those_left_out() -> None:
    heads = [Head(name="click", label="clicked", sample_rate="rate"), ClickModel.heads[1]]
    estimator = Estimator(ClickModel(), heads=heads)
    batch = {**batch_of(0), "rate": torch.full((8,), 0.25)}
    metrics = estimator.evaluate([batch])
    logits, _, labels = logits_of(estimator, 1)
    # A click is always kept; each of the others stands for four.
    weights = np.where(labels["clicked"] > 0, 1.0, 4.0)
    predicted = 1 / (1 + np.exp(-logits))
    assert metrics["click/log_loss"] == pytest.approx(
        log_loss(labels["clicked"], predicted, sample_weight=weights), rel=1e-5
    )
    assert metrics["click/calibration"] == pytest.approx(
        (weights * predicted).sum() / labels["clicked"].sum(), rel=1e-5
    )


def test_predict_yields_one_prediction_per_example() -> None:
    estimator = trained()
    rows = list(estimator.predict())
    click, stay, _ = logits_of(estimator, 5)
    assert [row["click"].item() for row in rows] == pytest.approx(list(1 / (1 + np.exp(-click))), rel=1e-5)
    assert [row["stay"].item() for row in rows] == pytest.approx(list(stay), rel=1e-5)


def test_predict_is_lazy_and_can_yield_batches() -> None:
    def endless() -> Iterator[Batch]:
        while True:
            yield batch_of(0)

    first = next(trained().predict(endless(), yield_single_examples=False))
    assert first["click"].shape == (8,)


def test_predict_keys_choose_heads_and_pass_columns_through() -> None:
    row = next(trained().predict(predict_keys=["user", "click"]))
    assert list(row) == ["user", "click"]
    assert row["user"] == batch_of(0)["user"][0]  # type: ignore[index]
    with pytest.raises(
        InvalidArgumentError, match=r"predict_keys: the batch has no column 'clik'; did you mean 'click'"
    ):
        next(trained().predict(predict_keys=["clik"]))


def test_a_new_estimator_evaluates_what_the_model_dir_holds(tmp_path: Path) -> None:
    old = trained(tmp_path)
    new = Estimator(WithData(), RunConfig(model_dir=str(tmp_path)))
    assert new.evaluate() == old.evaluate()
    assert new.global_step == 10
    assert_same(new.model, old.model)


class Watch(Hook):
    def __init__(self, *, stop_after: int | None = None) -> None:
        self.moments: list[str] = []
        self.losses: list[float] = []
        self.stop_after = stop_after

    def begin(self, trainer: Trainer) -> None:
        self.moments.append("begin")

    def after_start(self, trainer: Trainer) -> None:
        self.moments.append(f"after_start@{trainer.step}")

    def before_step(self, trainer: Trainer) -> None:
        self.moments.append("before_step")

    def before_update(self, trainer: Trainer, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        raise AssertionError("nothing is updated")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.moments.append(f"after_step:{result.examples}")
        self.losses.append(result.loss.item())
        if len(self.losses) == self.stop_after:
            trainer.request_stop("seen enough")

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.moments.append(f"end:{error}")


def test_hooks_watch_an_evaluation(tmp_path: Path) -> None:
    trained(tmp_path)
    watch = Watch()
    estimator = Estimator(WithData(), RunConfig(model_dir=str(tmp_path)))
    assert estimator.evaluate(steps=2, hooks=[watch]) == estimator.evaluate(steps=2)
    step = ["before_step", "after_step:8"]
    assert watch.moments == ["begin", "after_start@10", *step, *step, "end:None"]
    model = estimator.model.eval()
    with torch.no_grad():
        logits = model(batch_of(0))
    click = torch.nn.functional.binary_cross_entropy_with_logits(
        logits["click"], batch_of(0)["clicked"], reduction="sum"
    )
    stay = (logits["stay"] - batch_of(0)["seconds"]).square().sum()
    assert watch.losses[0] == pytest.approx((click + 0.1 * stay).item(), rel=1e-6)


def test_a_hook_may_stop_an_evaluation_and_not_the_training_around_it() -> None:
    estimator = trained()
    examples: list[float] = []

    class Evaluate(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            examples.append(estimator.evaluate(hooks=[Watch(stop_after=1)])["click/examples"])

    assert estimator.train(steps=3, hooks=[Evaluate()]) == 13
    assert examples == [8, 8, 8]


def test_a_stop_asked_of_the_training_outlives_an_evaluation() -> None:
    estimator = trained()

    class Stop(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            trainer.request_stop("enough")
            assert estimator.evaluate(hooks=[Watch()])["click/examples"] == 40

    assert estimator.train(steps=3, hooks=[Stop()]) == 11
    assert estimator.trainer.stop_reason == "enough"


def test_hooks_watch_predictions_until_they_are_let_go() -> None:
    watch = Watch()
    predictions = trained().predict(hooks=[watch])
    assert watch.moments == [], "predictions are made when they are asked for"
    next(predictions)
    assert watch.moments == ["begin", "after_start@10", "before_step", "after_step:8"]
    assert np.isnan(watch.losses).all()
    predictions.close()
    assert watch.moments[-1] == "end:None"


def test_hooks_hear_what_broke_an_evaluation() -> None:
    watch = Watch()
    with pytest.raises(InvalidArgumentError, match="no column 'clicked'"):
        trained().evaluate([{name: c for name, c in batch_of(0).items() if name != "clicked"}], hooks=[watch])
    assert watch.moments[-1].startswith("end:head 'click'")


def test_a_warm_start_takes_weights_and_rows_and_begins_anew(tmp_path: Path) -> None:
    old = trained(tmp_path / "old")
    config = RunConfig(model_dir=str(tmp_path / "new"), warm_start_from=str(tmp_path / "old"))
    new = Estimator(ClickModel(), config)
    assert new.global_step == 0
    before, after = everything(old.model), everything(new.model)
    assert int(after.pop("embeddings.steps")) == 0
    assert all(torch.equal(after[name], before[name]) for name in after)
    watch = Stream()
    assert new.train(watch, steps=2) == 2
    assert watch.next == 2, "from the beginning of the data"
    resumed = Estimator(ClickModel(), config)
    assert resumed.global_step == 2, "its own model_dir comes first"
    assert_same(resumed.model, new.model)


def test_a_warm_start_from_nothing_or_from_another_model_is_refused(tmp_path: Path) -> None:
    config = RunConfig(warm_start_from=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="expected the model_dir of a saved run"):
        Estimator(ClickModel(), config).train(Stream(), steps=1)
    trained(tmp_path)
    model = ClickModel()
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointMismatchError, match=r"'extra\.bias' is not in the checkpoint"):
        Estimator(model, config).train(Stream(), steps=1)


def test_train_continues_its_own_data() -> None:
    twice, once = Estimator(WithData()), Estimator(WithData())
    assert twice.train(steps=3) == 3
    assert twice.train(max_steps=8) == 8
    once.train(steps=8)
    assert_same(twice.model, once.model)
    assert once.train() == 40, "until the data ends"
    assert once.train(steps=1) == 41, "and from its beginning then"


def test_two_models_in_one_process_do_not_interfere() -> None:
    alone = Estimator(ClickModel(seed=1))
    alone.train(Stream(), steps=6)
    first, second = Estimator(ClickModel(seed=1)), Estimator(ClickModel(seed=2))
    for _ in range(6):
        first.train(_rest(first), steps=1)
        second.train(_rest(second), steps=1)
    assert_same(first.model, alone.model)
    with pytest.raises(AssertionError):
        assert_same(first.model, second.model)


def _rest(estimator: Estimator) -> Stream:
    stream = Stream()
    stream.next = estimator.trainer.step
    return stream


def test_expired_rows_read_their_initial_value() -> None:
    """The original's test: slot 1 expires at once, slot 2 after a day; zero start, gradient +1 per id, Adagrad 0.001."""

    class Sum(torch.nn.Module):
        heads = (Head(name="loss", label="zero", kind="regression"),)

        def __init__(self) -> None:
            super().__init__()
            options: dict[str, Any] = {"dim": 5, "initializer": Zeros()}
            optimizer = Adagrad(learning_rate=0.001, initial_accumulator_value=1.0)
            self.embeddings = EmbeddingBagCollection(
                [
                    Feature(name="one", slot=1, optimizer=optimizer, expire_seconds=0, **options),
                    Feature(name="two", slot=2, optimizer=optimizer, expire_seconds=86400, **options),
                ]
            )

        def forward(self, batch: Any) -> torch.Tensor:  # noqa: ANN401
            return torch.zeros(len(batch["zero"]))

        def extra_loss(self, batch: Any, logits: Any) -> torch.Tensor:  # noqa: ANN401
            rows = self.embeddings(batch)
            return rows["one"].sum() + rows["two"].sum()

    ids = torch.tensor([[0, 1]])
    batch: Batch = {"one": ids, "two": ids, "zero": torch.zeros(1), "req_time": torch.tensor([100])}
    model = Sum()
    Estimator(model, RunConfig(event_time="req_time")).train([batch])
    model.embeddings.store.evict()
    rows = model.eval().embeddings(batch)
    assert rows["one"].tolist() == [[0.0] * 5]
    assert rows["two"][0].tolist() == pytest.approx([-0.001414] * 5, abs=1e-6)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InvalidArgumentError, match="ClickModel has no input_fn"):
        Estimator(ClickModel()).train()
    with pytest.raises(InvalidArgumentError, match=r"expected a torch\.nn\.Module, got str"):
        Estimator("ffm:FFM")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match=r"heads: expected at least one head and no name twice, got \['a', 'a'\]"
    ):
        Estimator(ClickModel(), heads=[Head(name="a"), Head(name="a")])
    with pytest.raises(InvalidArgumentError, match="no logits for head 'ctr'"):
        Estimator(ClickModel(), heads=[Head(name="ctr", label="clicked")]).train(Stream(), steps=1)
    with pytest.raises(InvalidArgumentError, match="no batch to trace"):
        Estimator(ClickModel(), RunConfig(model_dir="unused")).export_saved_model()
    with pytest.raises(InvalidArgumentError, match="there is no model_dir"):
        Estimator(ClickModel()).export_saved_model(example=batch_of(0))


@pytest.mark.parametrize("limits", [{"steps": 3}, {"max_steps": 5}, {}])
def test_a_run_over_several_processes_gets_all_that_train_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    runner = RunnerConfig(num_ps=1, num_workers=2, discovery_type="file", discovery_folder=str(tmp_path / "found"))
    estimator = Estimator(WithData(), RunConfig(model_dir=str(tmp_path)), runner=runner)
    data, hook = Stream(4), Hook()
    given: dict[str, Any] = {}

    def distributed_train(trainer: Trainer, source: Any, config: RunnerConfig, discovery: object, **more: Any) -> int:  # noqa: ANN401
        given.update(more, trainer=trainer, source=source(), config=config)
        return 7

    monkeypatch.setattr("monolith.train.distributed.run.distributed_train", distributed_train)
    assert estimator.train(data, hooks=[hook], **limits) == 7
    assert (given["trainer"], given["source"], given["config"]) == (estimator.trainer, data, estimator.runner)
    assert {"steps": given["steps"], "max_steps": given["max_steps"]} == {"steps": None, "max_steps": None} | limits
    assert hook in given["hooks"]


@pytest.mark.parametrize("index", [0, 1])
def test_of_the_workers_of_servers_only_the_chief_exports(tmp_path: Path, index: int) -> None:
    job = {"num_ps": 1, "num_workers": 2, "discovery_type": "file", "discovery_folder": str(tmp_path / "found")}
    estimator = Estimator(WithData(), RunConfig(model_dir=str(tmp_path)), runner=RunnerConfig(index=index, **job))
    given = estimator.export_saved_model()
    assert [path.name for path in (tmp_path / "exported_models").glob("*")] == ([given.name] if index == 0 else [])
    assert (given if index else given.parent) == tmp_path / "exported_models"


def test_the_launcher_makes_another_run_of_a_script_that_names_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONOLITH_MODEL_DIR", "runs/servers")
    monkeypatch.setenv("MONOLITH_NUM_PS", "1")
    monkeypatch.setenv("MONOLITH_DISCOVERY_FOLDER", str(tmp_path))
    with caplog.at_level("INFO"):
        made = Estimator(WithData(), RunConfig(model_dir="runs/clicks"))
    assert made.config.model_dir == made.trainer.config.model_dir == made.runner.model_dir == "runs/servers"
    assert "model_dir is runs/servers, as the environment says, and not runs/clicks, as the script says" in caplog.text
    with pytest.raises(ConfigError, match="say it in one place"):
        Estimator(WithData(), RunConfig(model_dir="runs/clicks"), runner=RunnerConfig.from_env())
