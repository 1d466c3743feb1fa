"""Danger: an export that answers differently from the model, needs its code, or is believed although it is damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.features import Feature, Ragged
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.serve import Predictor, export_model, import_saved_model, load
from monolith.table import SGD, FixedR8, Fp16, LocalStore
from monolith.testing import bit_flips, truncations
from monolith.train import Estimator, Head
from training import ClickModel, Stream, batch_of


def assert_answers_like(predictor: Predictor, estimator: Estimator, batch: Batch) -> None:
    (expected,) = estimator.predict([batch], yield_single_examples=False)
    outputs = predictor.predict(batch)
    assert outputs.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(outputs[name], expected[name], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def trained() -> Estimator:
    estimator = Estimator(ClickModel())
    estimator.train(Stream(), steps=10)
    return estimator


@pytest.fixture(scope="module")
def exported(trained: Estimator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.export_saved_model(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize("rows", [1, 2, 8, 100])
def test_predictions_equal_those_of_the_model(trained: Estimator, exported: Path, rows: int) -> None:
    batch = batch_of(77, rows)
    batch["user"] = torch.arange(rows) - 3  # seen and unseen ids
    assert_answers_like(load(exported), trained, batch)


def test_a_fresh_process_needs_nothing_but_the_export(trained: Estimator, exported: Path, tmp_path: Path) -> None:
    batch = batch_of(5)
    columns = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    tags = batch["tags"]
    assert isinstance(tags, Ragged)
    save_file({**columns, "tags": tags.values, "splits": tags.offsets}, tmp_path / "batch.safetensors")
    script = (
        "import sys\n"
        "from safetensors.torch import load_file, save_file\n"
        "from monolith.features import Ragged\n"
        "from monolith.serve import load\n"
        "batch = load_file(sys.argv[2])\n"
        "batch['tags'] = Ragged(batch['tags'], batch.pop('splits'))\n"
        "outputs = load(sys.argv[1]).predict(batch)\n"
        "save_file({name: output.clone() for name, output in outputs.items()}, sys.argv[3])\n"
        "assert 'training' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(exported), str(tmp_path / "batch.safetensors")]
    subprocess.run([*command, str(tmp_path / "out.safetensors")], check=True, cwd=tmp_path)
    outputs = load_file(tmp_path / "out.safetensors")
    (expected,) = trained.predict([batch], yield_single_examples=False)
    for name in expected:
        torch.testing.assert_close(outputs[name], expected[name], rtol=0, atol=1e-6)


class Everything(nn.Module):
    """Every kind of feature, in two collections."""

    heads = (Head(name="out", label="y", kind="regression"), Head(name="class", label="c", kind="multiclass"))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sgd: dict[str, Any] = {"optimizer": SGD(learning_rate=0.5)}
        self.first = EmbeddingBagCollection(
            [
                Feature(name="user", dim=3, **sgd),
                Feature(name="item", slot=4, dim=3, bias=True, learning_rate=lambda step: 0.5, **sgd),
                Feature(name="other", slot=5, dim=3, bias=True, learning_rate=lambda step: 0.1, **sgd),
                Feature(name="clicks", shared_with="item", pooling="last_n", max_length=2),
                Feature(name="tags", slot=6, dim=3, pooling="sqrtn", occurrence_threshold=1, **sgd),
            ],
            seed=7,
        )
        self.second = EmbeddingBagCollection(
            [
                Feature(name="words", dim=3, pooling="none", **sgd),
                Feature(name="left", slot=1, dim=3, stack="sides", **sgd),
                Feature(name="right", slot=2, dim=3, stack="sides", **sgd),
            ]
        )
        self.linear = nn.Linear(3, 4)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        rows = self.first(batch)
        second = self.second(batch)
        words, sides = second["words"], second["sides"].sum(1)
        sums = torch.zeros(rows["user"].shape[0], 3).index_add(0, words.value_rowids(), words.values)
        sums = sums / words.row_lengths().clamp(min=1).unsqueeze(1)
        clicks = (rows["clicks"] * rows["clicks.mask"].unsqueeze(2)).mean(1)
        hidden = rows["user"] + rows["item"] + rows["other"].sin() + clicks + rows["tags"] + sums + sides
        return {"out": hidden.sum(1) + rows["item.bias"].squeeze(1), "class": self.linear(hidden)}


def mixed_batch(seed: int, rows: int = 6) -> Batch:
    random = torch.Generator().manual_seed(seed)

    def lists(high: int) -> Ragged:
        lengths = torch.randint(0, 4, (rows,), generator=random).tolist()
        return Ragged.from_lists([torch.randint(0, high, (n,), generator=random).tolist() for n in lengths])

    return {
        "user": torch.randint(0, 9, (rows,), generator=random),
        "item": torch.randint(0, 9, (rows,), generator=random),
        "other": torch.randint(0, 9, (rows, 2), generator=random),
        "clicks": lists(9),
        "tags": lists(5),
        "words": lists(9),
        "left": torch.randint(0, 9, (rows,), generator=random),
        "right": lists(9),
        "y": torch.rand(rows, generator=random),
        "c": torch.randint(0, 4, (rows,), generator=random),
    }


def test_every_kind_of_feature_survives(tmp_path: Path) -> None:
    estimator = Estimator(Everything())
    estimator.train([mixed_batch(seed) for seed in range(8)])
    predictor = load(estimator.export_saved_model(tmp_path))
    for seed, rows in ((0, 6), (50, 1), (51, 33)):
        assert_answers_like(predictor, estimator, mixed_batch(seed, rows))
    assert predictor.signature.columns == ("user", "item", "other", "clicks", "tags", "words", "left", "right")
    assert [(out.name, out.shape) for out in predictor.signature.outputs] == [("out", ()), ("class", (4,))]


def test_tables_are_compressed_as_their_features_say(tmp_path: Path) -> None:
    class Compressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features = [
                Feature(name="half", dim=8, compressor=Fp16()),
                Feature(name="byte", dim=8, compressor=FixedR8(range=1.0)),
            ]
            self.embeddings = EmbeddingBagCollection(features)

        def forward(self, batch: Mapping[str, Any]) -> Tensor:
            rows = self.embeddings(batch)
            return rows["half"].sum(1) + rows["byte"].sum(1)

    batch: Batch = {"half": torch.arange(9), "byte": torch.arange(9), "label": torch.zeros(9)}
    estimator = Estimator(Compressed())
    estimator.train([batch])
    predictor = load(estimator.export_saved_model(tmp_path))
    stats = predictor.stores["embeddings"].stats()
    assert (stats["half"].row_bytes, stats["byte"].row_bytes) == (16, 8)
    (expected,) = estimator.predict([batch], yield_single_examples=False)
    torch.testing.assert_close(predictor.predict(batch)["output"], expected["output"], rtol=0, atol=1e-2)


def test_many_threads_get_the_answers_of_one(exported: Path) -> None:
    predictor = load(exported)
    batches = [batch_of(number, 1 + number % 9) for number in range(64)]
    for _ in range(2):  # the first answers for a number of rows come from torch, whose last bits differ
        for batch in batches[:9]:
            predictor.predict(batch)
    expected = [predictor.predict(batch)["click"] for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda batch: predictor.predict(batch)["click"], batches))
    assert all(map(torch.equal, answers, expected))


def test_optimizer_state_and_labels_stay_behind(exported: Path) -> None:
    predictor = load(exported)
    store = predictor.stores["embeddings"]
    assert isinstance(store, LocalStore)
    assert all(config.mode == "serving" for config in store.configs().values())
    assert predictor.signature.columns == ("user", "item", "tags", "age")
    assert predictor.signature.step == 10


def test_training_goes_on_without_changing_an_export(trained: Estimator, tmp_path: Path) -> None:
    estimator = Estimator(ClickModel())
    estimator.train(Stream(), steps=3)
    assert estimator.model.training
    predictor = load(estimator.export_saved_model(tmp_path))
    assert estimator.model.training, "an export leaves the model in the mode it was in"
    before = predictor.predict(batch_of(0))["click"]
    estimator.train(Stream(), steps=3)
    assert torch.equal(predictor.predict(batch_of(0))["click"], before)


def test_the_newest_version_is_loaded_and_versions_grow(trained: Estimator, tmp_path: Path) -> None:
    options: dict[str, Any] = {"heads": trained.heads, "now": lambda: 1_700_000_000.9}
    folders = [export_model(trained.model, batch_of(0), tmp_path, step=step, **options) for step in range(3)]
    assert [int(folder.name) for folder in folders] == list(range(1_700_000_000, 1_700_000_003))
    (tmp_path / "1800000000").mkdir()  # a version that was never finished
    assert load(tmp_path).signature.step == 2
    with import_saved_model(tmp_path) as predict:
        assert predict(batch_of(0))["click"].shape == (8,)


def test_a_failed_export_leaves_nothing(trained: Estimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("monolith.serve.export.write_export_manifest", refuse)
    with pytest.raises(StorageError, match="disk full"):
        trained.export_saved_model(tmp_path / "exports")
    assert list((tmp_path / "exports").iterdir()) == []


def copy_of(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_refused(folder: Path) -> bool:
    try:
        load(folder)
    except CorruptFileError:
        return True
    return False


def test_every_file_is_protected(exported: Path, tmp_path: Path) -> None:
    folder = copy_of(exported, tmp_path)
    assert len(files_of(folder)) == 6
    for name in files_of(folder):
        good = (folder / name).read_bytes()
        damaged = [*truncations(good, count=8), *bit_flips(good, count=24), ("longer", good + b"\0")]
        for what, data in damaged:
            (folder / name).write_bytes(data)
            assert is_refused(folder), f"{name} was believed: {what}"
        (folder / name).unlink()
        with pytest.raises(CorruptFileError):
            load(folder)
        (folder / name).write_bytes(good)
    load(folder)


def forge(folder: Path, name: str, text: str) -> None:
    """Replace a file and make the manifest agree, as someone with bad intentions would."""
    from monolith.serve.manifest import write_export_manifest

    (folder / name).write_text(text)
    (folder / "manifest.json").unlink()
    write_export_manifest(folder)


def test_a_forged_program_runs_nothing(exported: Path, tmp_path: Path) -> None:
    folder = copy_of(exported, tmp_path)
    program = json.loads((folder / "program.json").read_text())
    marker = tmp_path / "executed"
    program["steps"].insert(0, {"name": "evil", "operator": "os.system", "args": [f"touch {marker}"], "kwargs": {}})
    forge(folder, "program.json", json.dumps(program))
    with pytest.raises(CorruptFileError, match=r"os\.system"):
        load(folder)
    assert not marker.exists()


def test_a_forged_signature_reads_no_other_file(exported: Path, tmp_path: Path) -> None:
    folder = copy_of(exported, tmp_path)
    signature = json.loads((folder / "signature.json").read_text())
    signature["collections"][0]["tables"]["user"] = "../../elsewhere.table"
    forge(folder, "signature.json", json.dumps(signature))
    with pytest.raises(CorruptFileError, match="manifest does not list"):
        load(folder)


def test_a_newer_format_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = copy_of(exported, tmp_path)
    text = (folder / "manifest.json").read_text().replace('"format_version": 1', '"format_version": 2')
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CorruptFileError, match="format version 2, but this release reads 1"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, r"batch\['age'\]: there is no such column"),
        ({"user": None}, r"batch\['user'\]: there is no such column"),
        ({"age": torch.rand(8)}, r"batch\['age'\]: expected float32 \[rows, 1\], got float32 \[8\]"),
        ({"age": torch.rand(8, 1).double()}, r"expected float32 \[rows, 1\], got float64 \[8, 1\]"),
        ({"age": torch.rand(7, 1)}, r"expected 8 rows"),
        ({"user": torch.rand(8)}, r"expected ids of type int64"),
    ],
)
def test_bad_requests_are_answered(exported: Path, change: dict[str, Any], message: str) -> None:
    batch = {name: column for name, column in {**batch_of(0), **change}.items() if column is not None}
    with pytest.raises(InvalidArgumentError, match=message):
        load(exported).predict(batch)


def test_labels_are_no_input_of_a_served_model(tmp_path: Path) -> None:
    class Cheating(ClickModel):
        def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
            logits = super().forward(batch)
            return {**logits, "click": logits["click"] + batch["clicked"]}

    with pytest.raises(InvalidArgumentError, match="forward reads column 'clicked'"):
        Estimator(Cheating()).export_saved_model(tmp_path, example=batch_of(0))


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="expected the folder of an export"):
        load(tmp_path / "nothing")
    with pytest.raises(CorruptFileError, match="not an export"):
        load(tmp_path)


def test_len_of_a_ragged_would_fix_the_rows(tmp_path: Path) -> None:
    class Measuring(Everything):
        def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
            outputs = super().forward(batch)
            return {**outputs, "out": outputs["out"] / len(self.second(batch)["words"])}

    with pytest.raises(InvalidArgumentError, match=r"row_lengths\(\)\.shape\[0\]"):
        Estimator(Measuring()).export_saved_model(tmp_path, example=mixed_batch(0))
