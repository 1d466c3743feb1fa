"""Danger: a backend of torch that takes the process down when it is imported, and padding that reaches a table or a loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.train import RunConfig, Trainer
from monolith.train.device import BatchPlacement, find_device, probe_backend
from training import ClickModel, batch_of, everything

CPU = torch.device("cpu")


def package(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package that this process and those it starts can import."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    # Set and deleted, so that what the test imports is not there for later ones.
    monkeypatch.setitem(sys.modules, name, sys)
    del sys.modules[name]


def test_a_backend_that_aborts_is_an_error_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os, sys\nprint('no libtpu.so', file=sys.stderr)\nsys.stderr.flush()\nos.abort()\n"
    package(tmp_path, "torch_tpu", text, monkeypatch)
    with pytest.raises(ConfigError, match=r"'tpu' needs the package torch_tpu: .*signal 6: no libtpu.so"):
        find_device("tpu")
    assert "torch_tpu" not in sys.modules


def test_a_backend_that_is_missing_slow_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="torch_tpu: it is not installed"):
        find_device("tpu:0")
    package(tmp_path, "failing_backend", "raise ImportError('wrong torch')\n", monkeypatch)
    assert (
        probe_backend("failing_backend") == "importing it ends the process with exit code 1: ImportError: wrong torch"
    )
    package(tmp_path, "slow_backend", "import time\ntime.sleep(600)\n", monkeypatch)
    assert probe_backend("slow_backend", timeout=0.5) == "importing it takes more than 0.5 seconds"


def test_a_backend_that_works_is_loaded_only_for_its_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "torch_tpu", "", monkeypatch)
    assert find_device("auto") == find_device("cpu") == CPU
    assert "torch_tpu" not in sys.modules
    # It does not register a device, so torch does not know one.
    with pytest.raises(ConfigError, match="torch knows no device 'tpu'"):
        find_device("tpu")
    assert "torch_tpu" in sys.modules


def test_a_device_that_is_not_there_says_what_is() -> None:
    with pytest.raises(ConfigError, match=r"'cuda' is not on this machine, where torch finds no accelerator"):
        find_device("cuda")


def test_a_padded_run_has_the_rows_and_weights_of_a_plain_one() -> None:
    trained = []
    for static_rows in (None, 13):
        model = ClickModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = Trainer(model, optimizer, config=RunConfig(static_rows=static_rows))
        shapes = set[int]()
        model.mlp.register_forward_hook(lambda module, given, out, shapes=shapes: shapes.add(len(out)))
        trainer.fit([batch_of(n, rows=8 + n % 3) for n in range(6)])
        trained.append((everything(model), shapes))
    (plain, some), (padded, one) = trained
    assert some == {8, 9, 10}
    assert one == {13}
    assert plain.keys() == padded.keys()
    for name, value in plain.items():
        torch.testing.assert_close(padded[name], value, msg=name)


def test_results_of_a_padded_step_have_the_rows_of_the_batch() -> None:
    model = ClickModel()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=RunConfig(static_rows=20))
    result = trainer.train_step(batch_of(0))
    assert result.examples == 8
    assert {name: len(column) for name, column in result.batch.items()} == dict.fromkeys(batch_of(0), 8)
    assert {name: len(logits) for name, logits in result.logits.items()} == {"click": 8, "stay": 8}


def test_ids_of_any_form_are_padded_with_empty_rows() -> None:
    model = EmbeddingBagCollection([Feature(name=name, dim=1) for name in ("one", "two", "none", "many")])
    placed = BatchPlacement(model, CPU, static_rows=3)(
        {
            "one": torch.tensor([5, 6]),
            "two": torch.tensor([[1, 2], [3, 4]]),
            "none": torch.empty(2, 0, dtype=torch.int64),
            "many": Ragged.from_lists([[7, 8, 9], []]),
            "x": torch.ones(2, 2),
        }
    )
    lists = {name: column.to_lists() for name, column in placed.items() if isinstance(column, Ragged)}
    assert lists == {
        "one": [[5], [6], []],
        "two": [[1, 2], [3, 4], []],
        "none": [[], [], []],
        "many": [[7, 8, 9], [], []],
    }
    assert placed["x"].tolist() == [[1, 1], [1, 1], [0, 0]]  # type: ignore[union-attr]


def test_what_has_no_static_shape_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"it has 8 rows, RunConfig.static_rows is 7"):
        BatchPlacement(ClickModel(), CPU, static_rows=7)(batch_of(0))
    with pytest.raises(InvalidArgumentError, match=r"batch\['tags'\]: rows of different lengths have no static shape"):
        BatchPlacement(nn.Linear(1, 1), CPU, static_rows=8)(batch_of(0))
    unpooled = EmbeddingBagCollection([Feature(name="seen", dim=1, pooling="none")])
    with pytest.raises(ConfigError, match="feature 'seen' has pooling 'none'"):
        Trainer(unpooled, config=RunConfig(static_rows=8))
