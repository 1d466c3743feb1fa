"""Measure training of a click model with everything: reading Parquet, ids to rows, the dense layers, both optimizers.

python benchmarks/end_to_end.py                        DeepFM and DLRM, 1 and 2 threads, all sides
python benchmarks/end_to_end.py --models dlrm --threads 1 --peers embeddingbag

Criteo-like examples: 13 numbers, 26 columns of ids, one million distinct 64-bit ids, batches of 2048, dim 16, Adagrad for
all weights. Ours reads the ids; peers read row numbers that were mapped in advance. All sides are separate processes,
start with equal weights, and must have equal losses before they are timed. They alternate, and a turn is a row group of 32
batches. A ratio is the median of the ratios of the rounds. The dense layers of a side are also timed alone, and "without
dense" is the time of a turn minus that. They are the same for all sides with one exception: the products of pairs of
embeddings are computed by our layers on our side and by torch's operators elsewhere. A second run of ours uses torch's too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from click_models import BATCH, DATA_FILE, GROUP, IDS, IDS_FILE, MODELS, ROWS, TOWERS
from click_worker import CLOCKS
from contestants import PeerFailedError, PeerUnavailableError, start_job
from monolith.data.synthetic import CriteoLike, CriteoLikeConfig, write_parquet
from monolith.data.synthetic.clicks import mix48
from monolith.features import Batch
from peers import OURS, PeerSpec

TURN = GROUP // BATCH
GROUPS = 8
CHECKED = 16  # batches whose losses are compared
TOLERANCE = 1e-5  # relative; other orders of summation cause about 1e-7
PHASE_ROUNDS = 3
PHASES = ("read", "lookup", "forward and backward", "dense step", "sparse step")


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    module: str
    trainer: str
    environment: str = ""

    def spec(self) -> PeerSpec:
        return PeerSpec(
            name=self.name,
            module=self.module,
            peer=self.trainer,
            environment=self.environment,
            note="",
            row_bytes=lambda dim: 8 * dim,
        )


SIDES = (
    Side(name=OURS, module="click_monolith", trainer="MonolithTrainer"),
    Side(name="monolith-torch-pairs", module="click_monolith", trainer="TorchPairsTrainer"),
    Side(name="embeddingbag", module="click_embedding_bag", trainer="EmbeddingBagTrainer"),
    Side(name="embeddingbag-x26", module="click_embedding_bag", trainer="SeparateBagsTrainer"),
    Side(name="torchrec", module="click_torchrec", trainer="TorchRecTrainer", environment="torchrec"),
)


def write_data(folder: Path, groups: int) -> None:
    """Write the examples with ids and, for peers, their rows: the row of an id is its rank among all sorted ids."""
    config = CriteoLikeConfig(batch_size=BATCH, batches=groups * TURN)
    columns = [mix48(np.arange(count), slot=slot) for slot, count in enumerate(config.cardinalities, 1)]
    ids = np.sort(np.concatenate(columns))
    np.save(folder / IDS_FILE, ids)

    def with_rows(batches: Iterable[Batch]) -> Iterable[Batch]:
        for batch in batches:
            rows = {
                row: torch.from_numpy(np.searchsorted(ids, batch[c].numpy())) for c, row in zip(IDS, ROWS, strict=True)
            }
            yield batch | rows

    write_parquet(with_rows(CriteoLike(config)), folder / DATA_FILE, rows_per_group=GROUP)


@dataclass
class Times:
    """Seconds per turn, in the order of the rounds."""

    total: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    @property
    def sparse(self) -> list[float]:
        return [total - dense for total, dense in zip(self.total, self.dense, strict=True)]


class Contest:
    """All sides for one model and number of threads."""

    def __init__(self, sides: Sequence[Side], config: dict[str, Any], threads: int, logs: Path) -> None:
        self.times: dict[str, Times] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self._processes = {}
        for side in sides:
            job = {"job": "end_to_end", "module": side.module, "trainer": side.trainer, **config}
            try:
                process, ready = start_job(side.spec(), job, threads=threads, logs=logs)
            except (PeerUnavailableError, PeerFailedError) as error:
                if side.name == OURS:
                    raise
                progress(f"skipped {side.name}: {error}")
                continue
            self._processes[side.name] = process
            self.times[side.name] = Times()
            self.versions[side.name] = ready["versions"]

    def ask(self, name: str, command: str, batches: int = TURN) -> dict[str, Any]:
        return self._processes[name].ask(json.dumps({"command": command, "batches": batches}))

    def check(self) -> None:
        """Every side must do the same work: same losses, batch by batch."""
        ours = self.ask(OURS, "losses", CHECKED)["losses"]
        for name in [name for name in self._processes if name != OURS]:
            losses = self.ask(name, "losses", CHECKED)["losses"]
            error = max(abs(a - b) / b for a, b in zip(ours, losses, strict=True))
            progress(f"{name}: losses {losses[0]:.4f} .. {losses[-1]:.4f}, ours differ by at most {error:.1e} of that")
            if error > TOLERANCE:
                raise SystemExit(f"{name} and {OURS} train different models: {losses} and {ours}")
        for name in self._processes:
            self.ask(name, "train", TURN - CHECKED)

    def run(self, rounds: int) -> None:
        order = random.Random(1)
        for turn in range(rounds):
            names = list(self._processes)
            order.shuffle(names)
            for name in names:
                times = self.times[name]
                times.total.append(self.ask(name, "train")["seconds"])
                times.dense.append(self.ask(name, "dense", TURN // 2)["seconds"] * 2)
                if turn < PHASE_ROUNDS:
                    times.phases.append(self.ask(name, "phases")["phases"])

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def summary(times: dict[str, Times]) -> dict[str, dict[str, Any]]:
    ours = times[OURS]
    return {
        name: {
            "examples_per_s": GROUP / statistics.median(side.total),
            "ours_over_it": ratio(side.total, ours.total),
            "ours_over_it_without_dense": ratio(side.sparse, ours.sparse),
            "ms_per_batch": 1e3 / TURN * statistics.median(side.total),
            "ms_dense": 1e3 / TURN * statistics.median(side.dense),
            "ms_phases": {
                part: 1e3 / TURN * statistics.median(phases.get(part, 0.0) for phases in side.phases) for part in PHASES
            },
            "seconds": {"total": side.total, "dense": side.dense},
        }
        for name, side in times.items()
    }


def markdown(results: list[dict[str, Any]]) -> str:
    lines = [
        "| model | threads | side | examples/s | ours / it | without dense | ms a batch | dense alone | "
        + " | ".join(PHASES)
        + " |",
        "|---|---:|---|" + "---:|" * (5 + len(PHASES)),
    ]
    for result in results:
        for name, side in result["sides"].items():
            numbers = [
                f"{side['examples_per_s']:,.0f}",
                f"{side['ours_over_it']:.2f}x",
                f"{side['ours_over_it_without_dense']:.2f}x",
                *(f"{ms:.1f}" for ms in (side["ms_per_batch"], side["ms_dense"], *side["ms_phases"].values())),
            ]
            head = f"{result['model']}, {result['towers']} towers | {result['threads']} | {name}"
            lines.append(f"| {head} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def progress(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument("--towers", type=words, default=list(TOWERS), help=f"of {','.join(TOWERS)}")
    parser.add_argument("--threads", type=words, default=["1", "2"])
    parser.add_argument("--peers", type=words, default=[side.name for side in SIDES if side.name != OURS])
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side; at least 7 for a claim")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: of the process, for 1 thread on a machine that is not idle",
    )
    parser.add_argument("--data", type=Path, help="folder to keep the examples in for the next run")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    described = machine.describe()
    sides = [side for side in SIDES if side.name == OURS or side.name in options.peers]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / DATA_FILE).exists():
            progress("writing the examples")
            write_data(folder, GROUPS)
        for model in options.models:
            for towers in options.towers:
                for threads in map(int, options.threads):
                    progress(f"{model}, {towers} towers, {threads} thread(s)")
                    config = {"model": model, "towers": towers, "folder": str(folder), "clock": options.clock}
                    contest = Contest(sides, config, threads, Path(temporary, "logs"))
                    try:
                        contest.check()
                        contest.run(options.rounds)
                    finally:
                        contest.close()
                    case = {"model": model, "towers": towers, "threads": threads, "rounds": options.rounds}
                    results.append(case | {"sides": summary(contest.times), "versions": contest.versions})
    print(markdown(results))
    if options.json is not None:
        command = "python benchmarks/end_to_end.py " + " ".join(sys.argv[1:])
        options.json.write_text(json.dumps({"command": command, "machine": described, "results": results}, indent=1))


if __name__ == "__main__":
    main()
