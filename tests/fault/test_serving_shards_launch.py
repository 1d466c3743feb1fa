"""Danger: `monolith launch --serve` starts processes that do not find each other, or answers fail when one of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monolith.serve import Client, load
from serving_shards import export_rows

BATCH = {"user": torch.arange(2990, 3010), "item": torch.arange(20)}


class Launched(NamedTuple):
    process: subprocess.Popen[str]
    wait_for: Callable[[Callable[[dict[str, Any]], bool]], dict[str, Any]]


@contextlib.contextmanager
def launched(export: Path, logs: Path, *options: str) -> Iterator[Launched]:
    command = [sys.executable, "-m", "monolith.cli", "launch", "--json", "--serve", str(export), "--log-dir", str(logs)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    ended = threading.Timer(120, process.kill)
    ended.start()

    def wait_for(is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if is_it(event):
                found: dict[str, Any] = event
                return found
        raise AssertionError("the launch has ended")

    try:
        yield Launched(process, wait_for)
    finally:
        ended.cancel()
        process.terminate()
        process.communicate()


def is_line(event: dict[str, Any], role: str, text: str) -> bool:
    return event["event"] == "line" and event["role"] == role and text in event["text"]


def test_shards_and_front_ends_find_each_other_and_survive_a_kill(tmp_path: Path) -> None:
    export = export_rows(tmp_path / "clicks" / "exported_models")
    expected = load(export).predict(BATCH)["ctr"]
    ports = ("--http-port", "0", "--grpc-port", "0")
    with launched(export.parent, tmp_path / "logs", "--shards", "2", "--replicas", "2", *ports) as job:
        shard = job.wait_for(lambda event: event["event"] == "started" and event["role"] == "shard 0")
        serving = job.wait_for(lambda event: is_line(event, "front-end 0", "serving"))
        address = serving["text"].partition("http://")[2].partition(" ")[0]
        with Client(address, model="clicks", timeout=30.0) as client:
            for _ in range(3):
                torch.testing.assert_close(torch.tensor(client.infer(BATCH)["ctr"]), expected, atol=1e-6, rtol=0)
            os.kill(shard["pid"], signal.SIGKILL)
            for _ in range(20):
                torch.testing.assert_close(torch.tensor(client.infer(BATCH)["ctr"]), expected, atol=1e-6, rtol=0)
            job.wait_for(lambda event: event["event"] == "restarting" and event["role"] == "shard 0")
            job.wait_for(lambda event: is_line(event, "shard 0", "listening"))
            torch.testing.assert_close(torch.tensor(client.infer(BATCH)["ctr"]), expected, atol=1e-6, rtol=0)
        job.process.terminate()
        ended = job.wait_for(lambda event: event["event"] == "ended")
        assert ended["role"] == "front-end 0", "it ends before the shards that it asks"
        assert job.wait_for(lambda event: event["event"] == "over")["stopped"] == "received SIGTERM"
