"""What many features cost: the lookup of a collection against the core alone, and a training step by layout of its tables.

python benchmarks/wide.py                               both parts, one thread
python benchmarks/wide.py --threads 2
python benchmarks/wide.py --cpu-time                    time on the processor instead of time passed, for a machine in use
python benchmarks/wide.py --parts step --features 1000  one part, one width

Forward: 26 features with a table each, one id per row. "Core" is the same lookup by calls of the core on arrays that are
ready, table by table. Step: forward, a dense layer over all vectors, backward and Adagrad, batches of 256 rows, dim 16, ids
drawn from 5,000 per feature. "A table each" gives a tensor per feature, which the model concatenates; with a stack it gives
one tensor, as a single table with slots does. `nn.EmbeddingBag` is torch's, one module per feature, with sparse gradients.

All sides take turns in one process; a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

import monolith
from monolith.features import Batch, Feature
from monolith.nn import EmbeddingBagCollection
from monolith.table import Adagrad, LocalStore

DIM = 16
IDS = 5000
FIELDS = 26
ROWS = (4, 256, 2048)
STEP_ROWS = 256
WIDTHS = (26, 500, 1000)
BATCHES = 8
RATE = 0.05

Step = Callable[[int], None]


def batches(features: int, rows: int) -> list[Batch]:
    random = torch.Generator().manual_seed(features * rows)
    drawn = torch.randint(0, IDS, (BATCHES, features, rows), generator=random)
    return [{f"f{i}": column.clone() for i, column in enumerate(batch)} for batch in drawn]


def feature(number: int, **fields: object) -> Feature:
    return Feature(name=f"f{number}", dim=DIM, optimizer=Adagrad(learning_rate=RATE), **fields)  # type: ignore[arg-type]


def train(embed: Callable[[Batch], torch.Tensor], apply: Callable[[], None], width: int, data: list[Batch]) -> Step:
    weight = torch.linspace(-1, 1, width * DIM)

    def step(number: int) -> None:
        (embed(data[number % BATCHES]) @ weight).square().mean().backward()
        apply()

    return step


def ours(width: int, data: list[Batch], *, slots: bool, stack: bool) -> Step:
    fields: dict[str, object] = {"stack": "all"} if stack else {}
    features = [feature(i, **fields, **({"slot": i} if slots else {})) for i in range(width)]
    collection = EmbeddingBagCollection(features)

    def embed(batch: Batch) -> torch.Tensor:
        outputs = collection(batch)
        return outputs["all"].flatten(1) if stack else torch.cat(list(outputs.values()), dim=1)  # type: ignore[union-attr,arg-type]

    return train(embed, collection.step, width, data)


def theirs(width: int, data: list[Batch]) -> Step:
    modules = [nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True) for _ in range(width)]
    optimizer = torch.optim.Adagrad([module.weight for module in modules], lr=RATE)
    offsets = torch.arange(STEP_ROWS)

    def embed(batch: Batch) -> torch.Tensor:
        return torch.cat([module(batch[f"f{i}"], offsets) for i, module in enumerate(modules)], dim=1)

    def apply() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(embed, apply, width, data)


def forward_sides(rows: int) -> dict[str, Step]:
    data = batches(FIELDS, rows)
    collection = EmbeddingBagCollection([feature(i) for i in range(FIELDS)])
    for batch in data:
        sum(out.sum() for out in collection(batch).values()).backward()  # type: ignore[union-attr]
        collection.step()
    assert isinstance(collection.store, LocalStore)
    tables = [collection.store.tables[f"f{i}"]._core for i in range(FIELDS)]
    splits, sum_up = np.arange(rows + 1), monolith._core.Pooling.SUM
    ids = [[batch[f"f{i}"].numpy() for i in range(FIELDS)] for batch in data]  # type: ignore[union-attr]
    outs = [np.empty((rows, DIM), dtype=np.float32) for _ in range(FIELDS)]

    def core(number: int) -> None:
        for table, column, out in zip(tables, ids[number % BATCHES], outs, strict=True):
            table.lookup_pooled(column, splits, sum_up, out)

    def forward(number: int) -> None:
        collection(data[number % BATCHES])

    return {"core": core, "forward": forward}


def step_sides(width: int, peer: bool) -> dict[str, Step]:
    data = batches(width, STEP_ROWS)
    sides = {
        "one table, one stack": ours(width, data, slots=True, stack=True),
        "a table each, one stack": ours(width, data, slots=False, stack=True),
        "a table each": ours(width, data, slots=False, stack=False),
        "one table": ours(width, data, slots=True, stack=False),
    }
    return {**sides, "nn.EmbeddingBag": theirs(width, data)} if peer else sides


def measure(sides: Mapping[str, Step], rounds: int, repeat: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each round of each side. The first rounds, which insert the rows, are not among them."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    number = 0
    for round_ in range(rounds + BATCHES):
        for name, side in sides.items():
            begin = clock()
            for i in range(repeat):
                side(number + i)
            if round_ >= BATCHES:
                seconds[name].append((clock() - begin) / repeat)
        number += repeat
    return seconds


def report(title: str, seconds: Mapping[str, list[float]], against: str) -> None:
    print(title)
    for name, taken in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(taken, seconds[against], strict=True))
        print(f"  {name:28} {statistics.median(taken) * 1e6:10,.0f} us   {ratio:6.2f} x {against}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="forward,step")
    parser.add_argument("--features", default=",".join(map(str, WIDTHS)), help="widths of the training step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-peer", action="store_true", help="without nn.EmbeddingBag")
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    monolith.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if "forward" in arguments.parts:
        for rows in ROWS:
            seconds = measure(forward_sides(rows), 40, max(1, 4000 // rows), clock)
            report(f"forward, {FIELDS} features x {rows} rows", seconds, "core")
    if "step" in arguments.parts:
        for width in map(int, arguments.features.split(",")):
            seconds = measure(step_sides(width, not arguments.no_peer), arguments.rounds, max(1, 50 // width), clock)
            report(f"step, {width} features x {STEP_ROWS} rows", seconds, "one table, one stack")


if __name__ == "__main__":
    main()
