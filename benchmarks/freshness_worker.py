"""Processes of `freshness.py` that are no command of ours.

python benchmarks/freshness_worker.py redis EXPORT PORT       a model server over rows in Redis
python benchmarks/freshness_worker.py predict EXPORT RUN      follows a run, and predicts when it is asked to
"""

from __future__ import annotations

import json
import sys
import time

import torch

from freshness_job import COLUMNS
from monolith import load, set_num_threads
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.serve.repository import ModelRepository
from monolith.serve.server.model_server import ModelServer
from peers.freshness_redis import SharedStoreReplica


def say(answer: dict[str, object]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve_shared_store(export: str, port: int) -> None:
    """Answer until standard input ends."""
    repository = ModelRepository()
    repository.add(SharedStoreReplica("clicks", load(export), port))
    with ModelServer(repository) as server:
        say({"http": server.http_address})
        sys.stdin.read()


def predict_while_following(export: str, run: str) -> None:
    """For each line of standard input, {"calls", "pause"}: predict so often, and say how long each took."""
    predictor = load(export)
    follower = TrainingFollower.of_run(predictor, RunWriters(run))
    if not follower.wait_until_read(60):
        raise SystemExit(f"the run cannot be followed: {follower.describe()}")
    generator = torch.Generator().manual_seed(0)
    names = [*COLUMNS, "probe"]
    batches = [{name: torch.randint(0, 20_000, (1,), generator=generator) for name in names} for _ in range(64)]
    say({"ready": True})
    for line in sys.stdin:
        command, taken = json.loads(line), []
        first = follower.lag().sequence
        for turn in range(command["calls"]):
            start = time.perf_counter()
            predictor.predict(batches[turn % 64])
            taken.append(time.perf_counter() - start)
            time.sleep(command["pause"])
        say({"taken": taken, "segments": follower.lag().sequence - first, "lag": follower.lag().seconds})
    follower.close()


def main() -> None:
    """Do what the command line says."""
    torch.set_num_threads(1)
    set_num_threads(1)
    mode, export, source = sys.argv[1:]
    if mode == "redis":
        serve_shared_store(export, int(source))
    else:
        predict_while_following(export, source)


if __name__ == "__main__":
    main()
