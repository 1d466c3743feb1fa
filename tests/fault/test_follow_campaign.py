"""Danger: trainer and replica are killed and stopped at random moments while clients ask, and the run goes back to the past.
Requests must be answered by whatever is alive, and in the end the replica must answer exactly as the trained model does, whoever
died how often.

`MONOLITH_CAMPAIGN_FAULTS=50 pytest -m slow tests/fault/test_follow_campaign.py` is the long form."""

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
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import followed_job
from followed_tables import until
from monolith.errors import DeadlineExceededError, MonolithError, UnavailableError
from monolith.serve import Client, export_model
from monolith.state.restore_points import restore_points
from monolith.train.control_server import ControlClient

PROBE = {name: np.arange(400) for name in followed_job.COLUMNS}
ROOT = Path(followed_job.__file__).parent
_log = logging.getLogger(__name__)
SLOW_FAULTS = int(os.environ.get("MONOLITH_CAMPAIGN_FAULTS", "20"))


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

    def _environment(self, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
        return {
            **clean,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "STEP_SECS": "0.02",
            "BATCHES": str(self.batches),
            "SAVE_STEPS": "150",  # each checkpoint makes what is older superfluous
            **more,
        }

    def _train(self, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, followed_job.__file__, str(self.run)]
        with (self.folder / "train.log").open("ab") as log:
            return subprocess.Popen(command, env=self._environment(**environment), stdout=log, stderr=log)

    def _serve_command(self) -> list[str]:
        return [sys.executable, "-m", "monolith.cli", "serve", str(self.export), "--run", str(self.run)]

    def _serve(self) -> subprocess.Popen[bytes]:
        out = self.folder / "serving.json"
        out.unlink(missing_ok=True)
        command = self._serve_command()
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

    def ask(self, timeout: float = 120.0) -> np.ndarray:
        with Client(self.address, model="clicks", timeout=timeout) as client:
            return np.asarray(client.infer(PROBE)["click"])

    def _ask(self) -> None:
        while not self._done.wait(0.02):
            with suppress(DeadlineExceededError):  # a machine that is busy
                try:
                    self.ask(2.0)  # a client tries as long as it may
                    self.answered += 1
                except UnavailableError:
                    self.refused += 1

    def hurt(self, draw: random.Random) -> str:
        """Stop one of the two, or kill it and start it again, the run perhaps from an earlier moment."""
        who = draw.choice(("trainer", "trainer", "replica"))
        what = draw.choice(("killed", "killed", "stopped", *["restored"] * (who == "trainer")))
        process = self.trainer if who == "trainer" else self.replica
        if what == "stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(draw.choice((0.1, 0.5, 6.0)))  # longer than one waits for the other
            process.send_signal(signal.SIGCONT)
            return f"{who} {what}"
        refused = self.refused
        _end(process)
        killed, answered = time.monotonic(), self.answered
        if who == "replica":
            self.replica = self._serve()
            # Nobody asks the one that was killed any more.
            until(lambda: self.answered > answered, "an answer")
            self.recoveries["replica"].append(time.monotonic() - killed)
            return f"{who} {what}"
        step = self.step()
        points = restore_points(self.run) if what == "restored" else []
        self.trainer = self._train(RESTORE_TO=f"step={draw.choice(points).step}" if points else "")
        if draw.random() < 0.7:
            # The other times it is hurt again before it has come back.
            until(lambda: self._goes_on(step) or self.trainer.poll() is not None, "the run to be followed")
            self.recoveries["trainer"].append(time.monotonic() - killed)
        until(lambda: self.answered > answered, "an answer")
        assert self.refused == refused, "a replica must answer while its run is dead"
        return f"{who} {what}"

    def step(self) -> int:
        """The step of the run that the replica has."""
        with Client(self.address, model="clicks", timeout=120.0) as client:
            return int(client.infer(PROBE).parameters["monolith_step"])

    def _goes_on(self, step: int) -> bool:
        with suppress(DeadlineExceededError):  # a machine that is busy
            return self.step() != step
        return False

    def end_run(self) -> None:
        """Ask the run to end, as soon as it answers."""
        for _ in range(600):
            if self.trainer.poll() is not None:
                return
            with suppress(MonolithError), ControlClient.of_run(str(self.run), timeout=20.0) as client:
                client.end_run()
                return
            time.sleep(0.2)
        raise AssertionError("the run did not answer")

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


def require_equal(processes: Processes, after: object) -> None:
    expected = processes.settled()

    def is_equal() -> bool:
        with suppress(UnavailableError):  # a front end may not know yet that a shard is back
            return bool(np.allclose(processes.ask(), expected, atol=1e-6, rtol=0))
        return False

    try:
        until(is_equal, f"equal answers after {after}")
    except AssertionError as error:
        logs = ((processes.folder / name).read_text()[-5000:] for name in ("train.log", "serve.log"))
        raise AssertionError(f"{error}\n{'; '.join(logs)}") from None


def campaign(folder: Path, faults: int, seed: int) -> None:
    draw, processes = random.Random(seed), Processes(folder, batches=10**6)
    history: list[str] = []
    try:
        until(lambda: bool(restore_points(processes.run)) if processes.run.exists() else False, "the run to save")
        for _ in range(faults):
            time.sleep(draw.uniform(0.1, 1.5))
            history.append(processes.hurt(draw))
        # Sometimes while the replica is not connected.
        processes.end_run()
        require_equal(processes, history)
        assert processes.answered > len(history), "it was asked all the time"
    finally:
        processes.close()
    _log.info("%s", ", ".join(f"{count} {what}" for what, count in sorted(Counter(history).items())))
    for name, seconds in processes.recoveries.items():
        _log.info("%s: back after %s s", name, ", ".join(f"{one:.1f}" for one in sorted(seconds)) or "-")


# In seconds, without processes: tests/unit/serve/test_follow_ended_run.py.
@pytest.mark.slow
def test_a_replica_that_hangs_while_the_run_ends_has_its_last_changes(tmp_path: Path) -> None:
    processes = Processes(tmp_path, batches=150)
    try:
        until(lambda: processes.step() > 0, "the run to be followed", limit=240)
        # The run waits some seconds for it, and then no longer.
        processes.replica.send_signal(signal.SIGSTOP)
        assert processes.trainer.wait(timeout=600) == 0
        processes.replica.send_signal(signal.SIGCONT)
        require_equal(processes, "a stop of the replica")
    finally:
        processes.close()


def test_a_replica_answers_as_the_trained_model_after_kills(tmp_path: Path) -> None:
    campaign(tmp_path, 3, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(1, SLOW_FAULTS // 10)))
def test_many_kills_and_stops(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, 10, seed=100 + seed)
