"""Danger: a ready model that does not learn, or that cannot be exported and served: the first model a newcomer tries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monolith import ConfigError, models
from monolith.cli import main
from monolith.features import Batch, Ragged
from monolith.models import RankingModel
from monolith.nn.heads import total_loss
from monolith.serve import load
from monolith.serve.export import export_model
from monolith.train import Estimator, RunConfig

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = ["user", "item", "tags"]
HISTORY = {"item": "item", "history": "seen", "max_length": 4}
TASKS = [{"name": "click", "label": "label"}, {"name": "stay", "label": "seconds", "kind": "regression"}]

MAKERS: dict[str, dict[str, object]] = {
    "AutoIntModel": {},
    "DCNv2": {},
    "DCNv2 low rank": {"low_rank": 2},
    "DIENModel": HISTORY,
    "DINModel": HISTORY,
    "DLRM": {"numbers": ["age", "price"]},
    "DLRM without numbers": {"numbers": []},
    "DeepFM": {},
    "MMoEModel": {"heads": TASKS},
    "PLE": {"heads": TASKS},
    "SASRec": {**HISTORY, "num_layers": 2, "num_heads": 2},
    "TwoTower": {"user": ["user", "age"]},
    "XDeepFM": {},
}


def fields_of(name: str) -> dict[str, object]:
    feature = {"optimizer": {"kind": "adagrad", "learning_rate": 0.1}}
    return {"ids": IDS, "numbers": ["age"], "dim": 4, "hidden": [8], "feature": feature, **MAKERS[name]}


def make(name: str) -> RankingModel:
    torch.manual_seed(0)
    model: RankingModel = getattr(models, name.split()[0])(**fields_of(name))
    return model


def batches(mode: str = "train", rows: int = 64) -> list[Batch]:
    """Batches in which users like some of the items, the same in every call."""
    random = torch.Generator().manual_seed(3)
    made: list[Batch] = []
    for _ in range(4):
        user, item = (torch.randint(0, 20, (rows,), generator=random) for _ in range(2))
        lengths = torch.randint(0, 7, (rows,), generator=random)
        seen = torch.randint(0, 20, (int(lengths.sum()),), generator=random)
        splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        label = ((user + item) % 3 == 0).float()
        made.append(
            {
                "user": user,
                "item": item + 1000,
                "tags": Ragged(seen % 5, splits),
                "seen": Ragged(seen + 1000, splits),
                "age": torch.rand(rows, generator=random),
                "price": torch.rand(rows, generator=random),
                "label": label,
                "seconds": label * 2,
            }
        )
    return made


def test_every_model_is_tried_here() -> None:
    made = {name for name in models.__all__ if issubclass(getattr(models, name), RankingModel)} - {"RankingModel"}
    assert made == {name.split()[0] for name in MAKERS}


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_learns_and_its_export_predicts_the_same(name: str, tmp_path: Path) -> None:
    model = make(name)
    data = batches()

    def loss() -> float:
        model.eval()
        with torch.no_grad():
            outputs = model(data[0])
        logits = outputs if isinstance(outputs, dict) else {model.heads[0].name: outputs}
        return float(total_loss(logits, data[0], model.heads))

    before = loss()
    estimator = Estimator(model, RunConfig(seed=0, threads=1))
    estimator.train(data * 30)
    assert loss() < 0.9 * before

    served = load(estimator.export_saved_model(tmp_path, example=data[0]))
    for batch in (data[1], batches(rows=3)[0]):  # traced with another batch, and of another size
        inputs = {column: value for column, value in batch.items() if column not in ("label", "seconds")}
        (trained,) = estimator.predict([batch], yield_single_examples=False)
        predicted = served.predict(inputs)
        assert set(predicted) == {head.name for head in model.heads}
        for head in predicted:
            torch.testing.assert_close(predicted[head], torch.as_tensor(trained[head]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["DINModel", "DIENModel", "SASRec"])
def test_a_model_of_sequences_reads_the_newest_of_the_history(name: str) -> None:
    model = make(name).eval()
    Estimator(model, RunConfig(seed=0, threads=1)).train(batches())
    model.eval()
    one = {key: value[:1] for key, value in batches()[0].items() if isinstance(value, torch.Tensor)}
    one["tags"] = Ragged.from_lists([[1]])

    def logit(*seen: int) -> float:
        with torch.no_grad():
            return float(model({**one, "seen": Ragged.from_lists([list(seen)])}))

    assert logit(1, 1005, 1006, 1007, 1008) == logit(2, 1005, 1006, 1007, 1008), "only four are read"
    assert logit(1005, 1006, 1007, 1008) != logit(1005, 1006, 1007, 1009)
    assert logit(1005, 1006) != logit()


def test_the_vectors_of_two_towers_do_not_see_the_other_side() -> None:
    model = make("TwoTower").eval()
    assert isinstance(model, models.TwoTower)
    batch = batches()[0]
    other = {**batch, "item": batch["item"] + 1}
    assert torch.equal(model.user_vectors(batch), model.user_vectors(other))
    assert not torch.equal(model.item_vectors(batch), model.item_vectors(other))
    torch.testing.assert_close(model.user_vectors(batch).norm(dim=1), torch.ones(64))


def test_one_tower_is_exported_for_itself(tmp_path: Path) -> None:
    model = make("TwoTower").eval()
    assert isinstance(model, models.TwoTower)
    batch = batches()[0]
    served = load(export_model(model, batch, tmp_path, vectors="item_vectors"))
    found = served.predict({"item": batch["item"], "tags": batch["tags"]})["item_vectors"]
    torch.testing.assert_close(found, model.item_vectors(batch))


def test_a_yaml_file_names_a_model_and_its_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {**fields_of("DeepFM"), "heads": [{"name": "click"}]}
    job = {
        "model": "monolith.models:DeepFM",
        "model_args": arguments,
        "input": "test_models:batches",
        "run": {"model_dir": str(tmp_path / "run"), "threads": 1},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "job.yaml"), "--json"]) == 0
    assert "click/auc" in capsys.readouterr().out
    job["model_args"] = {**arguments, "hiden": [8]}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert main(["train", str(tmp_path / "job.yaml")]) == 2
    assert "DeepFM.hiden: unknown field; did you mean 'hidden'?" in capsys.readouterr().err


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no ids": (lambda: models.DeepFM(), r"Inputs\.ids: field required"),
    "dim": (lambda: models.DeepFM(ids=["a"], dim=0), r"Inputs\.dim: input should be greater than 0; got 0"),
    "feature": (
        lambda: models.DeepFM(ids=["a"], feature={"optimiser": {}}),
        "Feature.optimiser: unknown field; did you",
    ),
    "not data": (lambda: models.DeepFM(ids={"a"}), r"DeepFM: expected fields as in a YAML file: .* is a set"),
    "two tasks": (lambda: models.DeepFM(ids=["a"], heads=TASKS), r"DeepFM\.heads: predicts one task, got 2; MMoEModel"),
    "no history": (
        lambda: models.DINModel(ids=["a"], item="a"),
        r"DINModel\.item, DINModel\.history: .* got 'a' and None",
    ),
    "history": (lambda: models.DLRM(ids=["a"], history="b"), r"DLRM\.history: reads no sequence; .* got 'b'"),
    "user": (
        lambda: models.TwoTower(ids=["a", "b"], user=["c"]),
        r"TwoTower\.user: .* ids \['a', 'b'\], .* got \['c'\]",
    ),
    "all user": (
        lambda: models.TwoTower(ids=["a", "b"], user=["a", "b"]),
        r"TwoTower\.user: expected some but not all",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_fields_are_refused_with_their_names(case: str) -> None:
    made, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        made()


def test_a_number_that_the_batch_lacks_is_named() -> None:
    batch = batches()[0]
    del batch["age"]
    with pytest.raises(Exception, match=r"DeepFM\.numbers: the batch has no column 'age'"):
        make("DeepFM")(batch)
