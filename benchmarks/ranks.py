"""Measure synchronous training over ranks, and the exchange below it, next to TorchRec, DistributedDataParallel and gloo.

python benchmarks/ranks.py                                        all cases, about 40 minutes
python benchmarks/ranks.py --cases exchange
python benchmarks/ranks.py --cases training --models dlrm --batches 2048 --sides monolith,torchrec-table-wise

`exchange`: 16,384 and 65,536 ids of each rank to their owners, rows of dim 16 back, gradients to the owners, between two
processes of this machine. There is no table: transports only.
`training`: DeepFM and DLRM over 26 columns with one million distinct ids and dim 16, Adagrad for all weights, one thread a
rank. The examples are in memory, as ids for ours and as rows that were mapped in advance for peers. All sides start with
equal weights and must have equal losses before they are timed.

Every side is a group of processes. The groups alternate in one run, in an order that is shuffled for each round. A ratio is
the median of the ratios of the rounds. Processor time is that of all threads of a rank, system calls included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import machine
from click_models import FIELDS, MODELS, NUMBERS, TOWERS
from contestants import PeerFailedError, PeerUnavailableError, WorkerProcess, start_worker
from monolith.data.synthetic import CriteoLike, CriteoLikeConfig
from monolith.data.synthetic.clicks import mix48
from peers import OURS, PeerSpec
from rank_worker import EXAMPLES

CHECKED = 8  # batches whose losses are compared
TOLERANCE = 1e-5  # relative; other orders of summation cause about 1e-7
TURN = 65_536  # examples of a rank in a turn
IDS = (16_384, 65_536)
DIM = 16
EXCHANGES = 100  # of a turn
DENSE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    module: str
    side: str
    environment: str = ""
    world: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> PeerSpec:
        return PeerSpec(
            name=self.name,
            module=self.module,
            peer=self.side,
            environment=self.environment,
            note="",
            row_bytes=lambda dim: 8 * dim,
        )


SINGLE = f"{OURS}-one-process"
TRAINING = (
    Side(name=OURS, module="ranks_monolith", side="RanksTrainer"),
    Side(name=SINGLE, module="ranks_monolith", side="OneProcessTrainer", world=1),
    Side(name="torchrec-table-wise", module="ranks_torchrec", side="TableWiseTrainer", environment="torchrec"),
    Side(name="torchrec-row-wise", module="ranks_torchrec", side="RowWiseTrainer", environment="torchrec"),
    Side(name="torchrec-pipelined", module="ranks_torchrec", side="PipelinedTrainer", environment="torchrec"),
    Side(name="ddp-26-bags", module="ranks_torch", side="DdpTrainer"),
    Side(name="ddp-one-table", module="ranks_torch", side="DdpOneTableTrainer"),
)
GLOO = "gloo"
EXCHANGE = (
    Side(name=OURS, module="ranks_monolith", side="MeshExchange", options={"within_host": True}),
    Side(name=f"{OURS}-tcp", module="ranks_monolith", side="MeshExchange", options={"within_host": False}),
    Side(name=GLOO, module="ranks_torch", side="GlooExchange"),
    Side(name=f"{GLOO}-known-sizes", module="ranks_torch", side="GlooExchangeOfKnownSizes"),
)


def write_data(folder: Path) -> None:
    """Write the examples with ids and, for peers, their rows: the row of an id is its rank among the sorted ids of a column."""
    defaults = CriteoLikeConfig().cardinalities
    # Tables are dealt to ranks in the order of columns: large and small ones on both.
    cardinalities = (*defaults[::2], *defaults[1::2])
    source = CriteoLike(CriteoLikeConfig(batch_size=4096, batches=EXAMPLES // 4096, cardinalities=cardinalities))
    batches = list(source)

    def column(name: str) -> np.ndarray:
        return np.concatenate([batch[name].numpy() for batch in batches])

    ids = [column(f"C{place}") for place in range(1, FIELDS + 1)]
    every = [np.sort(mix48(np.arange(count), slot=slot)) for slot, count in enumerate(cardinalities, 1)]
    rows = [np.searchsorted(known, asked) for known, asked in zip(every, ids, strict=True)]
    np.save(folder / "numbers.npy", np.stack([column(name) for name in NUMBERS], axis=1))
    np.save(folder / "labels.npy", column("label"))
    np.save(folder / "ids.npy", np.stack(ids, axis=1))
    np.save(folder / "rows.npy", np.stack(rows, axis=1))
    np.save(folder / "cardinalities.npy", np.array(cardinalities))
    np.save(folder / "every_id.npy", np.concatenate(every))


@dataclass
class Turns:
    """By round: seconds of the slowest rank, processor seconds of a rank (mean), latencies of rank 0."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    latencies: list[list[float]] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    """Processor seconds of the dense layers and their optimizer alone, of a rank, in some of the rounds."""
    memory: int = 0

    @property
    def median_latencies(self) -> list[float]:
        return [statistics.median(latencies) for latencies in self.latencies]


class Group:
    """The processes of one side. A request goes to all of them."""

    def __init__(self, side: Side, config: dict[str, Any], folder: Path) -> None:
        self.turns = Turns()
        self.world = side.world
        self._processes: list[WorkerProcess] = []
        meeting = Path(tempfile.mkdtemp(prefix=f"{side.name}-", dir=folder))
        job = {"job": "ranks", "module": side.module, "side": side.side, "world": side.world, "meeting": str(meeting)}
        try:
            for rank in range(side.world):
                message = job | {"rank": rank, "options": side.options | config["options"]} | config["fixed"]
                self._processes.append(start_worker(side.spec(), message, threads=1, log=meeting / f"{rank}.log"))
            self.versions: dict[str, str] = [process.receive()["versions"] for process in self._processes][-1]
        except (PeerUnavailableError, PeerFailedError):
            self.close()
            raise

    def ask(self, command: str, count: int) -> list[dict[str, Any]]:
        for process in self._processes:
            process.send(json.dumps({"command": command, "count": count}))
        return [process.receive() for process in self._processes]

    def losses(self, batches: int) -> list[float]:
        """Sums over the ranks."""
        return [
            sum(losses) for losses in zip(*(answer["losses"] for answer in self.ask("losses", batches)), strict=True)
        ]

    def run(self, count: int, *, dense: bool) -> None:
        answers = self.ask("run", count)
        self.turns.seconds.append(max(answer["seconds"] for answer in answers))
        self.turns.cpu.append(statistics.mean(answer["cpu_seconds"] for answer in answers))
        self.turns.latencies.append(answers[0].get("latencies", []))
        if dense:
            alone = self.ask("dense", count)
            self.turns.dense.append(statistics.mean(answer["cpu_seconds"] for answer in alone))
        self.turns.memory = max(answer.get("memory", 0) for answer in answers)

    def close(self) -> None:
        for process in self._processes:
            process.end_input()
        for process in self._processes:
            process.close()


def contest(
    sides: Sequence[Side], config: dict[str, Any], *, checked: int, count: int, rounds: int, dense_rounds: int = 0
) -> dict[str, Group]:
    """All sides of a case, checked and timed. The groups are closed, and hold what was measured."""
    groups: dict[str, Group] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for side in sides:
                try:
                    groups[side.name] = Group(side, config, Path(folder))
                except (PeerUnavailableError, PeerFailedError) as error:
                    if side.name.startswith(OURS):
                        raise
                    progress(f"skipped {side.name}: {error}")
            check({name: group for name, group in groups.items() if name != SINGLE}, checked)
            order = random.Random(1)
            for turn in range(rounds + 1):
                names = list(groups)
                order.shuffle(names)
                for name in names:
                    groups[name].run(count, dense=0 < turn <= dense_rounds)
                    if turn == 0:  # to warm up
                        groups[name].turns = Turns()
    finally:
        for group in groups.values():
            group.close()
    return groups


def check(groups: dict[str, Group], batches: int) -> None:
    """Every side must do the same work: same losses, step by step."""
    found = {name: group.losses(batches) for name, group in groups.items()}
    reference, expected = next(iter(found.items()))
    for name, losses in found.items():
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        progress(f"{name}: {losses[0]:.6g} .. {losses[-1]:.6g}, at most {error:.1e} of that away from {reference}")
        if error > TOLERANCE:
            raise SystemExit(f"{name} and {reference} do different work: {losses} and {expected}")


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def training(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    if not (folder / "every_id.npy").exists():
        progress("writing the examples")
        write_data(folder)
    results = []
    for towers, model, batch in itertools.product(options.towers, options.models, options.batches):
        progress(f"{model}, {towers} towers, batches of {batch}")
        case = {"model": model, "towers": towers, "batch": batch}
        groups = contest(
            [side for side in TRAINING if side.name in options.sides],
            {"fixed": case | {"exchange": False, "folder": str(folder)}, "options": {}},
            checked=CHECKED,
            count=TURN // batch,
            rounds=options.rounds,
            dense_rounds=DENSE_ROUNDS,
        )
        results.append(case | {"groups": groups})
        progress("\n".join(training_lines(results[-1:])))
    return results


def exchange(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for ids in options.ids:
        progress(f"exchange of {ids} ids")
        fixed = {"exchange": True, "model": "", "towers": "", "folder": "", "batch": 0}
        groups = contest(
            [side for side in EXCHANGE if side.name in options.sides],
            {"fixed": fixed, "options": {"ids": ids, "dim": DIM}},
            checked=1,
            count=EXCHANGES,
            rounds=options.rounds,
        )
        results.append({"ids": ids, "groups": groups})
    return results


def training_lines(results: list[dict[str, Any]]) -> list[str]:
    head = "model | batch of a rank | side | examples/s | ours / it | processor ms | of them dense | it / ours | MiB"
    lines = [f"| {head} |", "|---|---:|---|" + "---:|" * 6]
    for result in results:
        groups: dict[str, Group] = result["groups"]
        ours = groups.get(OURS) or next(iter(groups.values()))
        for name, group in groups.items():
            turns = group.turns
            # Rates, because a round of one process has half of the examples.
            rates = [TURN * group.world / seconds for seconds in turns.seconds]
            our_rates = [TURN * ours.world / seconds for seconds in ours.turns.seconds]
            numbers = [
                f"{statistics.median(rates):,.0f}",
                f"{ratio(our_rates, rates):.2f}x",
                *(f"{1e3 * statistics.median(cpu) * result['batch'] / TURN:.1f}" for cpu in (turns.cpu, turns.dense)),
                f"{ratio(turns.cpu, ours.turns.cpu):.2f}x",
                f"{turns.memory / 2**20:,.0f}",
            ]
            case = f"{result['model']}, {result['towers']} towers | {result['batch']:,}"
            lines.append(f"| {case} | {name} | {' | '.join(numbers)} |")
    return lines


def exchange_lines(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| ids | transport | p10 µs | median µs | gloo / it, medians | processor µs | gloo / it |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        groups: dict[str, Group] = result["groups"]
        gloo = (groups.get(GLOO) or next(iter(groups.values()))).turns
        for name, group in groups.items():
            turns = group.turns
            numbers = [
                f"{1e6 * np.percentile(np.concatenate(turns.latencies), 10):,.0f}",
                f"{1e6 * statistics.median(turns.median_latencies):,.0f}",
                f"{ratio(gloo.median_latencies, turns.median_latencies):.2f}x",
                f"{1e6 * statistics.median(turns.cpu) / EXCHANGES:,.0f}",
                f"{ratio(gloo.cpu, turns.cpu):.2f}x",
            ]
            lines.append(f"| {result['ids']:,} | {name} | {' | '.join(numbers)} |")
    return lines


def progress(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    names = sorted({side.name for side in (*TRAINING, *EXCHANGE)})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, default=["exchange", "training"])
    parser.add_argument("--models", type=words, default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument("--towers", type=words, default=list(TOWERS), help=f"of {','.join(TOWERS)}")
    parser.add_argument("--batches", type=numbers, default=[1024, 2048, 4096], help="examples of a rank in a step")
    parser.add_argument("--ids", type=numbers, default=list(IDS), help="ids of an exchange")
    parser.add_argument("--sides", type=words, default=names, help=f"of {','.join(names)}")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side; at least 7 for a claim")
    parser.add_argument("--data", type=Path, help="folder to keep the examples in for the next run")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    described = machine.describe()
    report: list[str] = []
    cases: list[dict[str, Any]] = []
    if "exchange" in options.cases:
        cases += (found := exchange(options))
        report += [*exchange_lines(found), ""]
    if "training" in options.cases:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.data or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            cases += (found := training(options, folder))
        report += training_lines(found)
    print("\n".join(report))
    if options.json is not None:
        measured = [
            case
            | {
                "groups": {
                    name: vars(group.turns) | {"versions": group.versions} for name, group in case["groups"].items()
                }
            }
            for case in cases
        ]
        command = "python benchmarks/ranks.py " + " ".join(sys.argv[1:])
        options.json.write_text(json.dumps({"command": command, "machine": described, "results": measured}, indent=1))


if __name__ == "__main__":
    main()
