"""Measure how fast `ClickStream` makes batches, at its start and after many of them, next to the training that reads them.

python benchmarks/click_stream.py                     batches 0, 10,000 and 100,000
python benchmarks/click_stream.py --at 0 1000000

Rounds go through all cases in turn, on one thread. Each number is the median of the rounds, in batches of 2,048 impressions per
second of processor time. Training is the model of examples/02_trainer.py on batches that were made before.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from monolith.data.synthetic import ClickStream
from monolith.train import Trainer

BATCHES = 100


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def training() -> Iterator[None]:
    """Train `BATCHES` more batches, each time it is asked for the next item."""
    path = Path(__file__).parents[1] / "examples" / "02_trainer.py"
    spec = importlib.util.spec_from_file_location("trainer_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    stream, model = ClickStream(), example.ClickModel()
    batches = [stream.batch(number) for number in range(BATCHES)]
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), heads=model.heads)
    trainer.fit(batches)  # inserts the rows
    while True:
        yield None
        trainer.fit(batches)


def main(at: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    stream, train = ClickStream(), training()
    next(train)
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for start in at:
            stream.batch(start)
            numbers = range(start, start + BATCHES)
            case = f"from batch {start:,}"
            times.setdefault(case, []).append(seconds(lambda numbers=numbers: [stream.batch(n) for n in numbers]))
        times.setdefault("training", []).append(seconds(lambda: next(train)))
    print(f"{'batches per second of processor time':<40} {'median':>8} {'min':>8} {'max':>8}")
    for case, measured in times.items():
        speeds = sorted(BATCHES / value for value in measured)
        print(f"{case:<40} {statistics.median(speeds):>8,.0f} {speeds[0]:>8,.0f} {speeds[-1]:>8,.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--at", type=int, nargs="+", default=[0, 10_000, 100_000], help="numbers of batches")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    main(arguments.at, arguments.rounds)
