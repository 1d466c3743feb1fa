"""Danger: trainer and replica are killed and stopped at random moments while clients ask. Requests must be answered by whatever
is alive, and in the end the replica must answer exactly as the trained model does, whoever died how often.

`MONOLITH_CAMPAIGN_KILLS=50 pytest -m slow tests/fault/test_follow_campaign.py` is the long form."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import followed_job
from followed_tables import until
from monolith.errors import MonolithError
from monolith.serve import Client, export_model
from monolith.state.restore_points import restore_points

PROBE = {name: np.arange(400) for name in followed_job.COLUMNS}
ROOT = Path(followed_job.__file__).parent
_log = logging.getLogger(__name__)
SLOW_KILLS = int(os.environ.get("MONOLITH_CAMPAIGN_KILLS", "20"))


class Processes:
    """A trainer and a replica that are started again whenever they die, as a supervisor does."""

    def __init__(self, folder: Path, batches: int) -> None:
        self.folder, self.run, self.export, self.batches = folder, folder / "run", folder / "export", batches
        tensors = {name: torch.from_numpy(ids) for name, ids in PROBE.items()}
        export_model(followed_job.Clicks(), tensors, self.export, heads=[followed_job.CLICK])
        self.address = ""
        self.answered = self.refused = 0
        self.recoveries: dict[str, list[float]] = {"replica": [], "trainer": []}
        """Seconds from each kill until the replica answered again, and until it followed the run again."""
        self.trainer = self._train()
        try:
            self.replica = self._serve()
        except BaseException:
            _end(self.trainer)
            raise
        self._done = threading.Event()
        self._asking = threading.Thread(target=self._ask)
        self._asking.start()

    def _environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
        return {
            **clean,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "STEP_SECS": "0.02",
            "BATCHES": str(self.batches),
        }

    def _train(self) -> subprocess.Popen[bytes]:
        with (self.folder / "train.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, followed_job.__file__, str(self.run)], env=self._environment(), stdout=log, stderr=log
            )

    def _serve(self) -> subprocess.Popen[bytes]:
        out = self.folder / "serving.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "monolith.cli", "serve", str(self.export), "--run", str(self.run)]
        with out.open("wb") as file, (self.folder / "serve.log").open("ab") as log:
            options = ["--name", "clicks", "--http-port", "0", "--grpc-port", "0", "--json"]
            process = subprocess.Popen([*command, *options], env=self._environment(), stdout=file, stderr=log)
        try:
            # Importing torch takes long where other tests run too.
            until(lambda: process.poll() is not None or b"\n" in out.read_bytes(), "the replica to serve", limit=240)
            assert process.poll() is None, (self.folder / "serve.log").read_text()[-3000:]
        except BaseException:
            _end(process)
            raise
        self.address = json.loads(out.read_bytes().splitlines()[0])["http"]
        return process

    def ask(self) -> np.ndarray:
        with Client(self.address, model="clicks", timeout=20.0) as client:
            return np.asarray(client.infer(PROBE)["click"])

    def _ask(self) -> None:
        while not self._done.wait(0.02):
            try:
                self.ask()
                self.answered += 1
            except MonolithError:
                self.refused += 1

    def hurt(self, draw: random.Random) -> str:
        """Kill or stop one of the two, and start it again if it is dead. Requests may fail only while the replica is dead."""
        trainer = draw.random() < 0.6
        process = self.trainer if trainer else self.replica
        what = f"{'trainer' if trainer else 'replica'} {'stopped' if (stops := draw.random() < 0.3) else 'killed'}"
        if stops:
            process.send_signal(signal.SIGSTOP)
            time.sleep(draw.uniform(0.05, 0.4))
            process.send_signal(signal.SIGCONT)
            return what
        refused, answered = self.refused, self.answered
        _end(process)
        killed = time.monotonic()
        if trainer:
            step = self.step()
            self.trainer = self._train()
            if draw.random() < 0.7:
                # The other times it is hurt again before it has come back.
                until(
                    lambda: self.step() > step or self.trainer.poll() is not None, "the run to be followed", limit=240
                )
                self.recoveries["trainer"].append(time.monotonic() - killed)
            assert self.refused == refused, "a replica must answer while its run is dead"
        else:
            self.replica = self._serve()
            until(lambda: self.answered > answered, "an answer")
            self.recoveries["replica"].append(time.monotonic() - killed)
        return what

    def step(self) -> int:
        """The step of the run that the replica has."""
        with Client(self.address, model="clicks", timeout=20.0) as client:
            return int(client.infer(PROBE).parameters["monolith_step"])

    def settled(self) -> np.ndarray:
        """Let the run end. Returns what the trained model answers."""
        self.trainer.wait(timeout=600)
        assert self.trainer.returncode == 0, (self.folder / "train.log").read_text()[-3000:]
        estimator = followed_job.estimator(str(self.run))
        estimator.trainer.restore()
        estimator.model.eval()
        with torch.no_grad():
            return torch.sigmoid(estimator.model({name: torch.from_numpy(ids) for name, ids in PROBE.items()})).numpy()

    def close(self) -> None:
        self._done.set()
        self._asking.join()
        for process in (self.trainer, self.replica):
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def campaign(folder: Path, kills: int, seed: int, *, batches: int) -> None:
    draw, processes = random.Random(seed), Processes(folder, batches)
    history: list[str] = []
    try:
        until(lambda: bool(restore_points(processes.run)) if processes.run.exists() else False, "the run to save")
        for _ in range(kills):
            if processes.trainer.poll() is not None:
                break  # it has trained everything
            time.sleep(draw.uniform(0.1, 1.5))
            history.append(processes.hurt(draw))
        expected = processes.settled()
        until(lambda: bool(np.allclose(processes.ask(), expected, atol=1e-6, rtol=0)), f"equal answers after {history}")
        assert processes.answered > len(history), "it was asked all the time"
    finally:
        processes.close()
    for name, seconds in processes.recoveries.items():
        _log.info("%s: back after %s s", name, ", ".join(f"{one:.1f}" for one in sorted(seconds)) or "-")


# Slow for now: next to other tests it failed in one of two full runs, because the replica did not equal the run within 60 s. It
# passes alone. A likely reason is the first of "Limits" about the end of a run in docs/guide-follow.md.
@pytest.mark.slow
def test_a_replica_answers_as_the_trained_model_after_kills(tmp_path: Path) -> None:
    campaign(tmp_path, kills=4, seed=1, batches=1200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(1, SLOW_KILLS // 10)))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, kills=10, seed=100 + seed, batches=2500)
