"""Danger: a program.onnx that another runtime loads, and that predicts something else than the export next to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from monolith import models
from monolith.cli import main
from monolith.errors import MissingPackageError
from monolith.features import Batch, Ragged
from monolith.models import RankingModel
from monolith.serve import load
from monolith.serve.export import export_model
from monolith.serve.program import program_inputs

# The exporter's own: a deprecated class of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance")

INPUTS = {"ids": ["user", "item"], "numbers": ["age"], "dim": 4, "hidden": [8]}
MODELS: dict[str, dict[str, object]] = {
    "DeepFM": {},
    "DCNv2": {},
    "SASRec": {"item": "item", "history": "seen", "max_length": 4},
    "MMoEModel": {"heads": [{"name": "click"}, {"name": "stay", "kind": "regression"}]},
}


def make(name: str) -> RankingModel:
    torch.manual_seed(0)
    model: RankingModel = getattr(models, name)(**INPUTS, **MODELS[name])
    return model


def batch(rows: int) -> Batch:
    random = torch.Generator().manual_seed(rows)
    user, item = torch.randint(0, 9, (2, rows), generator=random)
    seen = Ragged.from_lists([list(range(row % 6)) for row in range(rows)])
    return {"user": user, "item": item, "seen": seen, "age": torch.rand(rows, generator=random)}


@pytest.mark.parametrize("name", MODELS)
def test_another_runtime_predicts_the_same_from_the_same_rows(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make(name).eval()
    folder = export_model(model, batch(3), tmp_path, heads=model.heads, onnx=True)
    session = onnxruntime.InferenceSession(folder / "program.onnx")
    outputs = [output.name for output in session.get_outputs()]
    assert outputs == [head.name for head in model.heads]
    predictor = load(folder)
    for rows in (1, 5, 64):
        some = batch(rows)
        with torch.no_grad():
            given = program_inputs({"age": some["age"]}, {"embeddings": model.embeddings(some)})
        feeds = {wanted.name: given[wanted.name].numpy() for wanted in session.get_inputs()}
        expected = predictor.predict(some)
        for head, found in zip(outputs, session.run(None, feeds), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected[head], rtol=1e-5, atol=1e-6)


def test_the_command_writes_it_next_to_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    job = {
        "model": "monolith.models:DeepFM",
        "model_args": INPUTS,
        "input": "test_export_onnx:batches",
        "run": {"model_dir": str(tmp_path / "run")},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert main(["export", str(tmp_path / "job.yaml"), "--untrained", "--onnx", "--json"]) == 0
    folder = Path(json.loads(capsys.readouterr().out)["folder"])
    assert {"program.onnx", "program.json", "tables"} <= {path.name for path in folder.iterdir()}
    load(folder)  # the manifest lists the file too


def batches(mode: str) -> list[Batch]:
    return [batch(3)]


def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    model = make("DeepFM")
    with pytest.raises(
        MissingPackageError, match=r"exporting ONNX needs the package 'onnxscript'.*monolith-torch\[onnx\]"
    ):
        export_model(model, batch(3), tmp_path, heads=model.heads, onnx=True)
    assert not list(tmp_path.iterdir())
