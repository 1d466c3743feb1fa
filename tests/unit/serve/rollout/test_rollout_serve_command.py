"""Danger: `monolith serve` that serves the newest export after a restart although it was rolled back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.cli import main
from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection, Head
from monolith.serve import export_model
from monolith.serve.client import Client
from monolith.streams import START, open_stream
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
def serving(exports: Path, folder: Path, *more: str) -> Iterator[tuple[str, dict[str, int], subprocess.Popen[str]]]:
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
        *more,
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


def test_what_is_served_comes_back_with_labels_and_judges_the_version(exports: Path, tmp_path: Path) -> None:
    served, examples = tmp_path / "served", open_stream(tmp_path / "examples", partitions=1)
    options = [
        "--log-requests",
        str(served),
        "--log-without",
        "item",
        "--labels-from",
        examples.url,
        "--label",
        "clicked=ctr",
    ]
    p, labels = clicks(200)
    with serving(exports, tmp_path, *options) as (address, _, process):
        asker = Asker(address, TOKEN)
        plan = {"model": "clicks", "stable": 7, "candidate": 8, "share": 1.0, "bounds": {"min_labels": 100}}
        assert asker.send("POST", "/rollout", plan)[0] == 200
        with Client(address, model="clicks", token=TOKEN) as client:
            answer = client.infer(columns(p))
        assert answer.id, "the server gives an id to a request without one"
        rows = _records(served, len(p))
        assert [row["prediction.ctr"] for row in rows] == pytest.approx(answer["ctr"].tolist())
        assert set(rows[0]) == {"request_id", "row", "model", "version", "time_ms", "logit", "prediction.ctr"}
        with examples.writer() as writer:  # as a joiner does
            for row, label in zip(rows, labels, strict=True):
                writer.append(json.dumps({**row, "clicked": label}).encode(), key=row["request_id"].encode())
        state = _waited_for(
            lambda: asker.send("GET", "/rollout")[1], lambda state: not state["models"]["clicks"]["plan"]["candidate"]
        )
        assert state["models"]["clicks"]["plan"]["stable"] == 7, "version 8 is poisoned, as the labels show"
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{address}/metrics", headers={"authorization": f"Bearer {TOKEN}"}),
            timeout=30,
        ) as answered:
            metrics = answered.read().decode()
        assert 'monolith_request_log_rows_total{state="dropped"} 0.0' in metrics
        assert 'monolith_label_stream_records_total{state="read"} 200.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert json.loads((tmp_path / "state" / "labels.position.json").read_bytes())["partitions"] == {"examples/0": 200}


def _records(folder: Path, count: int) -> list[dict[str, Any]]:
    stream = _waited_for(lambda: folder, Path.is_dir)
    found: list[bytes] = []
    with open_stream(stream).reader() as reader:
        reader.assign({"served/0": START})
        for _ in range(300):
            found += [value for records in reader.poll(1000, 0.2) for value in records.values]
            if len(found) >= count:
                break
    return [json.loads(value) for value in found]


def _waited_for(ask: Callable[[], Any], is_there: Callable[[Any], bool]) -> Any:  # noqa: ANN401
    for _ in range(600):
        if is_there(found := ask()):
            break
        threading.Event().wait(0.05)
    assert is_there(found), found
    return found


def test_labels_from_a_stream_need_a_rollout(exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_stream(tmp_path / "labels", partitions=1)
    command = ["serve", str(exports), "--http-port", "0", "--grpc-port", "0", "--labels-from", str(tmp_path / "labels")]
    assert main(command) == 2
    assert "--labels-from: needs --rollout-dir" in capsys.readouterr().err
    assert main([*command, "--rollout-dir", str(tmp_path), "--label", "=ctr"]) == 2
    assert "--label: expected COLUMN or COLUMN=HEAD, got '=ctr'" in capsys.readouterr().err
