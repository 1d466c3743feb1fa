"""Measure checkpoints: bytes and time of an incremental save, its effect on training, and a full save and restore compared
with the plain disk.

python benchmarks/checkpoints.py                     10 M rows, dim 16, 5% changed between two saves
python benchmarks/checkpoints.py --rows 500000       a short run; its numbers are not for quoting

Three kinds of turns are interleaved in random order: a table that is not saved, one whose changes are tracked, and the same while
its changes are written in the background. A turn has as many training steps as fit into one save. A ratio is the median of the
ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
import report
import workload
from disk import drop_from_cache, plain_read, plain_write, seconds_of
from growth import warm_memory
from monolith import EmbeddingTable
from monolith.log import ChangeLog
from monolith.state import restore_tables, write_checkpoint
from monolith.train import RunConfig
from peers.monolith_table import empty_table, filled_table, use_threads
from workload import BATCH, IdArray, offsets, pooled_gradient

RESULTS = Path(__file__).resolve().parent / "results"
BARS = {
    "bytes of an incremental save / of a full one": ("at most", 1 / 6),
    "training while it runs, slower by": ("at most", 0.03),
    "longest step while it runs, ms on the clock": ("at most", 20.0),
    "longest step while it runs, ms of its own work": ("at most", 20.0),
    "full save / plain write and fsync": ("at least", 0.6),
    "restore / plain cold read": ("at least", 0.6),
}


@dataclass
class Turn:
    """Seconds of every step of a turn: by the clock, and by CPU time of the training thread."""

    clock: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    def time(self, call: Callable[[], object]) -> object:
        start, worked = time.perf_counter(), time.thread_time()
        answer = call()
        self.clock.append(time.perf_counter() - start)
        self.work.append(time.thread_time() - worked)
        return answer


class Training:
    """One table and endless batches of ids that it has."""

    def __init__(self, ids: IdArray, dim: int) -> None:
        self.table = filled_table(ids, dim)
        self._ids = ids
        self._chance = np.random.default_rng(4)
        self._splits = torch.from_numpy(offsets())
        self._gradient = torch.from_numpy(pooled_gradient(dim))

    def step(self, turn: Turn, before: Callable[[], object] | None = None) -> object:
        """One training step; `before` is a part of it, as a save that begins between two steps is."""
        batch = torch.from_numpy(self._ids[self._chance.integers(0, self._ids.size, BATCH)])
        answer = None

        def call() -> None:
            nonlocal answer
            answer = before() if before else None
            self.table.lookup_pooled(batch, self._splits, mode="sum")
            self.table.apply_pooled_gradients(batch, self._splits, self._gradient, mode="sum")

        turn.time(call)
        return answer

    def change(self, rows: int) -> None:
        """Let exactly `rows` distinct rows be changed since the last save, untimed."""
        forgotten = self.table.cut_changes()
        for _ in forgotten:
            pass
        forgotten.commit()
        chosen = self._chance.choice(self._ids, rows, replace=False)
        zeros = torch.zeros(BATCH, self.table.dim)
        for first in range(0, rows, BATCH):
            part = torch.from_numpy(chosen[first : first + BATCH])
            self.table.apply_gradients(part, zeros[: part.numel()])


def incremental(
    plain: Training, tracked: Training, log: ChangeLog, changed: int, rounds: int, share: float
) -> tuple[dict[str, list[Turn]], list[int]]:
    """Turns of every kind, and the bytes of each segment."""
    turns: dict[str, list[Turn]] = {"nothing": [], "tracking": [], "saving": []}
    sizes, order, steps = [], random.Random(2), 0
    for number in range(rounds + 1):
        tracked.change(changed)
        saving = Turn()
        future = tracked.step(saving, lambda number=number: log.commit_in_background(step=number, share=share))
        assert isinstance(future, Future)
        while not future.done():
            tracked.step(saving)
        segment = log.folder / f"{future.result():020d}.segment"
        sizes.append(segment.stat().st_size)
        segment.unlink()
        steps = len(saving.clock)
        others = [("nothing", plain), ("tracking", tracked)]
        order.shuffle(others)
        for name, training in others:
            turn = Turn()
            for _ in range(steps):
                training.step(turn)
            turns[name].append(turn)
        turns["saving"].append(saving)
        progress(f"round {number}: {steps} steps while {sizes[-1] / 1e6:.0f} MB were written")
    # The first round warms everything up.
    return {name: kept[1:] for name, kept in turns.items()}, sizes[1:]


def full(table: EmbeddingTable, log: ChangeLog, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure full saves and restores, and a plain write and read of as many bytes."""
    result: dict[str, Any] = {"save": [], "write": [], "restore": [], "read": [], "cached_share": 0.0}
    plain = folder.parent / "plain.bench"
    for number in range(rounds):
        path = folder / f"model.ckpt-{number}"
        result["save"].append(
            seconds_of(
                lambda path=path, n=number: write_checkpoint(path, state={}, tables=[table], log=log, step=n, full=True)
            )
        )
        files = [file for file in folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        result["write"].append(seconds_of(lambda size=size: plain_write(plain, size)))
        fresh = empty_table(table.dim)
        warm_memory(2 * size)
        for file in [*files, plain]:
            if file.stat().st_size:
                result["cached_share"] = max(result["cached_share"], drop_from_cache(file))
        result["restore"].append(seconds_of(lambda path=path, fresh=fresh: restore_tables(path, [fresh])))
        assert len(fresh) == len(table), (len(fresh), len(table))
        result["read"].append(seconds_of(lambda: plain_read(plain)))
        plain.unlink()
        for made in [path, folder / "snapshots"]:
            shutil.rmtree(made)
    return result | {"bytes": size}


def ratio(turns: dict[str, list[Turn]], name: str, base: str, kind: str) -> float:
    """Return how much slower a step is in turns of kind `name` than of kind `base`: the median ratio of the rounds minus 1."""
    pairs = zip(turns[name], turns[base], strict=True)
    return (
        statistics.median(statistics.fmean(getattr(a, kind)) / statistics.fmean(getattr(b, kind)) for a, b in pairs) - 1
    )


def longest(turns: list[Turn], kind: str) -> float:
    return 1e3 * max(max(getattr(turn, kind)) for turn in turns)


def summary(turns: dict[str, list[Turn]], sizes: list[int], whole: dict[str, Any]) -> dict[str, float]:
    def share(ours: str, theirs: str) -> float:
        return statistics.median(b / a for a, b in zip(whole[ours], whole[theirs], strict=True))

    return {
        "bytes of an incremental save / of a full one": statistics.median(sizes) / whole["bytes"],
        "training while it runs, slower by": ratio(turns, "saving", "tracking", "clock"),
        "the same by work of the training thread": ratio(turns, "saving", "tracking", "work"),
        "tracking alone, slower by": ratio(turns, "tracking", "nothing", "clock"),
        "the same by work": ratio(turns, "tracking", "nothing", "work"),
        "longest step while it runs, ms on the clock": longest(turns["saving"], "clock"),
        "longest step while it runs, ms of its own work": longest(turns["saving"], "work"),
        "longest step without saving, ms on the clock": longest(turns["nothing"], "clock"),
        "longest step with the cut, ms on the clock": 1e3 * max(turn.clock[0] for turn in turns["saving"]),
        "median step, ms": 1e3 * statistics.median(s for turn in turns["nothing"] for s in turn.clock),
        "full save / plain write and fsync": share("save", "write"),
        "restore / plain cold read": share("restore", "read"),
        "full save, GB/s": whole["bytes"] / 1e9 / statistics.median(whole["save"]),
        "restore, GB/s": whole["bytes"] / 1e9 / statistics.median(whole["restore"]),
    }


def table_of(found: dict[str, float]) -> report.Table:
    rows = []
    for name, value in found.items():
        word, bar = BARS.get(name, ("", 0.0))
        reached = value <= bar if word == "at most" else value >= bar
        percent = "slower" in name or " / " in name or "the same" in name
        rows.append(
            [
                name,
                f"{value:.1%}" if percent else f"{value:.3g}",
                f"{word} {bar:.1%}" if word and percent else f"{word} {bar:g}" if word else "",
                "" if not word else "yes" if reached else "**no**",
            ]
        )
    return report.Table(title="Checkpoints", columns=["", "measured", "bar", "reached"], rows=rows)


def progress(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--changed", type=float, default=0.05, help="share of the rows changed between two saves")
    parser.add_argument(
        "--threads", type=int, default=1, help="of the training calls; the save has a thread of its own"
    )
    parser.add_argument(
        "--share", type=float, default=RunConfig().save_share, help="of a processor, for the thread that saves"
    )
    parser.add_argument("--rounds", type=int, default=15, help="saves; at least 7 for a claim")
    parser.add_argument("--full-rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=RESULTS / "disk", help="folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    described, versions = machine.describe(), use_threads(options.threads)
    folder = options.disk / "checkpoints.bench"
    shutil.rmtree(options.disk, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        progress(f"filling two tables with {options.rows:,} rows")
        ids = workload.random_ids(options.rows)
        plain, tracked = Training(ids, options.dim), Training(ids, options.dim)
        with ChangeLog(folder / "log", [tracked.table]) as log:
            turns, sizes = incremental(
                plain, tracked, log, int(options.changed * options.rows), options.rounds, options.share
            )
            del plain
            progress("full saves and restores")
            whole = full(tracked.table, log, folder, options.full_rounds)
    finally:
        shutil.rmtree(options.disk)
    found = summary(turns, sizes, whole)
    command = "python benchmarks/checkpoints.py " + " ".join(sys.argv[1:])
    print(f"`{command}`\n\n" + table_of(found).markdown())
    if options.json is not None:
        details = {name: [{"clock": turn.clock, "work": turn.work} for turn in kept] for name, kept in turns.items()}
        result = {"command": command, "machine": described, "versions": versions, "summary": found}
        options.json.write_text(
            json.dumps(result | {"turns": details, "segment_bytes": sizes, "full": whole}, indent=1)
        )


if __name__ == "__main__":
    main()
