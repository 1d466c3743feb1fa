"""Danger: `monolith serve` that serves the newest export after a restart although it was rolled back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection, Head
from monolith.serve import export_model
from monolith.serve.client import Client
from rollout_models import Asker, clicks

TOKEN = "a-token-of-tests-only"


class Given(nn.Module):
    """Predicts the column `logit`, or its negative if it is poisoned."""

    def __init__(self, *, poisoned: bool) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name="item", dim=1)])
        self.sign = nn.Parameter(torch.tensor(-1.0 if poisoned else 1.0))

    def forward(self, batch: Batch) -> Tensor:
        logit = batch["logit"]
        assert isinstance(logit, Tensor)
        return logit * self.sign + 0 * self.embeddings(batch)["item"].squeeze(1)


def columns(p: list[float]) -> Batch:
    return {"item": torch.zeros(len(p), dtype=torch.int64), "logit": torch.logit(torch.tensor(p))}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for version, poisoned in ((7, False), (8, True)):
        model = Given(poisoned=poisoned)
        export_model(model, columns([0.5]), folder, heads=[Head(name="ctr")], now=lambda at=version: at)  # type: ignore[misc]
    return folder


@contextmanager
def serving(exports: Path, folder: Path) -> Iterator[tuple[str, dict[str, int], subprocess.Popen[str]]]:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    command = [sys.executable, "-m", "monolith.cli", "serve", str(exports), "--name", "clicks", "--json"]
    command += [
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--token-file",
        str(token),
        "--rollout-dir",
        str(folder / "state"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            started = json.loads(process.stdout.readline())
            yield started["http"], started["models"], process
        finally:
            process.kill()


def test_a_poisoned_export_is_rolled_back_and_stays_so_after_kill_9(exports: Path, tmp_path: Path) -> None:
    with serving(exports, tmp_path) as (address, models, process):
        assert models == {"clicks": 8}, "without a plan the newest export is served"
        asker = Asker(address, TOKEN)
        plan = {"model": "clicks", "stable": 7, "candidate": 8, "share": 1.0, "bounds": {"min_labels": 300}}
        assert asker.send("POST", "/rollout", plan)[0] == 200
        p, labels = clicks(1000)
        with Client(address, model="clicks", token=TOKEN) as client:
            answer = client.infer(columns(p), request_id="r")
            assert answer.version == 8
            assert answer["ctr"][0] == pytest.approx(1 - p[0], abs=1e-4)
            status, counts = asker.send("POST", "/labels", {"request_id": "r", "label": labels})
            assert (status, counts["joined"]) == (200, 1000)
            assert client.infer(columns(p), request_id="s").version == 7
        models_of_page = asker.send("GET", "/status.json")[1]["replicas"][0]["models"]
        assert models_of_page[0]["versions"][0]["version"] == 7
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(exports, tmp_path) as (address, models, _):
        assert models == {"clicks": 7}
        with Client(address, model="clicks", token=TOKEN) as client:
            assert client.infer(columns([0.5])).version == 7
