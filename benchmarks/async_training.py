"""Measure the AUC of asynchronous training on parameter servers compared with the same model in one process.

python benchmarks/async_training.py            three seeds, 2 servers and 2 workers
python benchmarks/async_training.py --quick    one seed and little data; its numbers are not for quoting

Both sides train every batch of a synthetic stream once. The two workers train half of the batches each, without waiting for each
other. Then both models are loaded from their checkpoints into this process and score the next batches of the stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import machine
from async_job import DeepFM, stream
from monolith.train import Estimator, RunConfig

JOB = Path(__file__).with_name("async_job.py")
HELD_OUT = 100


def auc(model_dir: Path, seed: int, batches: int) -> float:
    """Of the model saved in `model_dir`, on the batches after those it was trained with."""
    data = stream(seed, batches)
    later = [data.batch(number) for number in range(batches, batches + HELD_OUT)]
    return Estimator(DeepFM(seed), RunConfig(model_dir=str(model_dir))).evaluate(later)["click/auc"]


def train(folder: Path, seed: int, batches: int, launch: list[str]) -> float:
    """Train in processes of their own; the AUC."""
    arguments = [str(JOB), "--seed", str(seed), "--batches", str(batches), "--model-dir", str(folder)]
    done = subprocess.run([sys.executable, *launch, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return auc(folder, seed, batches)


def main() -> None:
    """Print the AUCs of each seed, and their difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    seeds, batches = (1, 100) if arguments.quick else (3, 1000)
    launch = ["-m", "monolith.cli", "launch", "--ps", str(arguments.ps), "--workers", str(arguments.workers)]
    runs = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="monolith-async-") as folder:
            local = train(Path(folder) / "local", seed, batches, [])
            model_dir = Path(folder) / "servers"
            spread = train(model_dir, seed, batches, [*launch, "--model-dir", str(model_dir)])
        runs.append({"seed": seed, "local": local, "servers": spread, "difference": spread - local})
        print(json.dumps(runs[-1]), file=sys.stderr)
    differences = [run["difference"] for run in runs]
    result = {
        "machine": machine.describe(),
        "batches": batches,
        "runs": runs,
        "mean_difference": statistics.mean(differences),
        "worst_difference": min(differences),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
