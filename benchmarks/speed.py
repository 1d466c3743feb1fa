"""Measure lookups and training steps of all peers, interleaved: in a round each peer runs one turn on the same batches."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import machine
from contestants import Contestant, MemoryLimit, PeerFailedError, PeerUnavailableError, PythonPeer
from peers import OURS, PeerSpec
from workload import BATCH, DISTRIBUTIONS

OPERATIONS = ("lookup", "train")
WARM = 8  # untimed batches at the start of a turn, because the caches still hold the data of the previous peer
WORKER_BYTES = 600 << 20  # interpreter, libraries, ids and batches, without the rows
MEMORY_SHARE = 0.85  # of what is available now; the rest is for growth while a peer is filled
TOLERANCE = 2e-3  # a hot id sums over a thousand gradients in float32, in an order each peer chooses

DISTURBED = 0.03  # of the time of a turn without a core

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    rows: int
    dims: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    batches: int  # timed, per turn
    limit: bool
    peers: list[PeerSpec]

    def batches_needed(self) -> int:
        """Batch 0 is for the check; every turn of a round, and every round and operation, has its own after that."""
        return 1 + len(OPERATIONS) * self.rounds * (WARM + self.batches)


@dataclass(kw_only=True)
class Measurement:
    peer: str
    operation: str
    distribution: str
    dim: int
    threads: int
    m_ids_per_s: float
    slowest_m_ids_per_s: float
    fastest_m_ids_per_s: float
    ours_over_peer: float | None  # median over rounds of our speed / its speed in the same round
    rounds: int


@dataclass(kw_only=True)
class SpeedResult:
    measurements: list[Measurement] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    disturbed: list[bool] = field(default_factory=list)  # per turn with one thread

    def disturbed_share(self) -> float | None:
        """Share of the turns in which something else had the core for a while; None if it was not measured."""
        return sum(self.disturbed) / len(self.disturbed) if self.disturbed else None


def groups_that_fit(plan: SpeedPlan, dim: int, available: int) -> tuple[list[list[PeerSpec | None]], list[str]]:
    """Splits the peers so that each group fits in memory together with our table, which takes part in all of them.

    None stands for the memory limit. Also returns the peers that do not fit in memory together with ours.
    """

    def cost(spec: PeerSpec | None) -> int:
        return WORKER_BYTES + plan.rows * (spec.row_bytes(dim) if spec else 8 * dim + 32)

    ours = [spec for spec in plan.peers if spec.name == OURS]
    others: list[PeerSpec | None] = [spec for spec in plan.peers if spec.name != OURS]
    if plan.limit:
        others.insert(0, None)
    budget = available * MEMORY_SHARE - sum(cost(spec) for spec in ours)
    too_big = [spec for spec in others if cost(spec) > budget]
    groups: list[list[PeerSpec | None]] = [[]]
    for spec in sorted((spec for spec in others if spec not in too_big), key=cost, reverse=True):
        fitting = [group for group in groups if sum(map(cost, group)) + cost(spec) <= budget]
        if fitting:
            fitting[0].append(spec)
        else:
            groups.append([spec])
    names = [spec.name if spec else "limit" for spec in too_big]
    return [[*ours, *group] for group in groups if ours or group], names


@contextlib.contextmanager
def on_processors(threads: int) -> Iterator[None]:
    """As many processors as threads, for us and for every peer started meanwhile.

    A processor that idles between two turns lowers its clock and loses its caches and page tables, which hurts the
    memory-bound peers most. Peers that alternate on the same processors keep them busy for each other.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[-threads:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def start_group(
    plan: SpeedPlan,
    group: list[PeerSpec | None],
    dim: int,
    threads: int,
    directory: Path,
    result: SpeedResult,
    progress: Progress,
) -> list[Contestant]:
    logs = directory / "logs"
    started: list[Contestant] = []
    for spec in group:
        name = spec.name if spec else "limit"
        if name in result.skipped:
            continue
        progress(f"dim {dim}, {threads} thread(s): filling {name}")
        try:
            if spec is None:
                started.append(MemoryLimit(rows=plan.rows, dim=dim, threads=threads, logs=logs))
                continue
            config = {"workload": str(directory / "workload"), "dim": dim}
            peer = PythonPeer(spec, config, threads=threads, logs=logs)
            started.append(peer)
            result.versions[name] = peer.versions
            result.errors[name] = peer.check()
            if max(result.errors[name].values()) > TOLERANCE:
                raise PeerFailedError(f"its result is wrong: {result.errors[name]}")
        except (PeerUnavailableError, PeerFailedError) as error:
            result.skipped[name] = str(error)
            progress(f"skipped {name}: {error}")
            if started and isinstance(started[-1], PythonPeer) and started[-1].name == name:
                started.pop().close()
    return started


def rounds_of(
    plan: SpeedPlan, group: list[Contestant], operation: str, distribution: str, result: SpeedResult, progress: Progress
) -> dict[str, list[float]]:
    """Seconds of every peer in every round. A peer that dies on the way leaves the group, and no numbers."""
    seconds: dict[str, list[float]] = {}
    order = random.Random(6)
    turns = [(c, name) for c in group for name in c.names(operation) if name not in result.skipped]
    for number in range(plan.rounds):
        first = 1 + (OPERATIONS.index(operation) * plan.rounds + number) * (WARM + plan.batches)
        # A peer must not always follow the same neighbour, whose data it then finds in the caches.
        order.shuffle(turns)
        for contestant, name in list(turns):
            try:
                took = contestant.turn(name, operation, distribution, first, WARM, plan.batches)
            except PeerFailedError as error:
                result.skipped[name] = str(error)
                progress(f"{name} failed: {error}")
                turns.remove((contestant, name))
                seconds.pop(name, None)
                continue
            seconds.setdefault(name, []).append(took)
    return seconds


def summarise(
    seconds: dict[str, list[float]], *, plan: SpeedPlan, operation: str, distribution: str, dim: int, threads: int
) -> Iterator[Measurement]:
    ours = seconds.get(OURS)
    for name, times in seconds.items():
        speeds = [plan.batches * BATCH / time / 1e6 for time in times]
        yield Measurement(
            peer=name,
            operation=operation,
            distribution=distribution,
            dim=dim,
            threads=threads,
            m_ids_per_s=statistics.median(speeds),
            slowest_m_ids_per_s=min(speeds),
            fastest_m_ids_per_s=max(speeds),
            ours_over_peer=statistics.median(t / o for t, o in zip(times, ours, strict=True)) if ours else None,
            rounds=len(times),
        )


def measure_group(
    plan: SpeedPlan, contestants: list[Contestant], dim: int, threads: int, result: SpeedResult, progress: Progress
) -> Iterator[Measurement]:
    for distribution in DISTRIBUTIONS:
        for operation in OPERATIONS:
            progress(f"dim {dim}, {threads} thread(s): {operation}, {distribution}")
            seconds = rounds_of(plan, contestants, operation, distribution, result, progress)
            yield from summarise(
                seconds, plan=plan, operation=operation, distribution=distribution, dim=dim, threads=threads
            )


def measure(plan: SpeedPlan, directory: Path, progress: Progress) -> SpeedResult:
    result = SpeedResult()
    for dim, threads in itertools.product(plan.dims, plan.threads):
        groups, too_big = groups_that_fit(plan, dim, machine.available_bytes())
        for name in too_big:
            progress(f"skipped {name} at dim {dim}: {plan.rows:,} rows do not fit in memory together with ours")
        for number, group in enumerate(groups):
            with on_processors(threads):
                contestants = start_group(plan, group, dim, threads, directory, result, progress)
                try:
                    measured = list(measure_group(plan, contestants, dim, threads, result, progress))
                finally:
                    for contestant in contestants:
                        contestant.close()
            if threads == 1:  # with more, waiting may be the peer's own
                peers = [c for c in contestants if isinstance(c, PythonPeer)]
                result.disturbed += [share > DISTURBED for peer in peers for share in peer.waited]
            # Ours takes part in every group for the ratios; its own line in the table is that of the first.
            result.measurements += [m for m in measured if number == 0 or m.peer != OURS]
    return result
