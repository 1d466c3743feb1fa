"""Runs all systems on a data set, for all seeds, on the events in the order of time and in random order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from freshbench.adapters import Factory, factory
from freshbench.examples import DataSet
from freshbench.report import DataReport, Result
from freshbench.simulation import BATCH_SHARE, Run, simulate
from freshbench.verdict import SLICES, stacked

Tell = Callable[[str, float], None]
"""Called with what is being done, and the share of the data set that is done."""


@dataclass(frozen=True)
class Plan:
    """What is run."""

    systems: tuple[str, ...]
    syncs: tuple[int, ...]
    seeds: int
    control: bool = True
    """Whether everything is repeated with the events in random order."""
    through_feed: bool = False
    """Whether the scores of `monolith` are compared with those of `monolith-feed`."""


def measure(make: Callable[[int], DataSet], plan: Plan, tell: Tell = lambda what, share: None) -> DataReport:
    """Return what all systems reach on the data that `make` returns for a seed."""
    factories: Mapping[str, Factory] = {name: factory(name) for name in plan.systems}
    runs: dict[str, list[Run]] = {name: [] for name in factories}
    shuffled: dict[str, list[Run]] = {name: [] for name in factories}
    total, done = plan.seeds * len(factories) * (1 + plan.control), 0
    for seed in range(plan.seeds):
        data = make(seed)
        orders = [(runs, data), *([(shuffled, data.shuffled(seed))] if plan.control else [])]
        for name, system in factories.items():
            for found, ordered in orders:
                tell(f"{data.name}, seed {seed}, {name}", done / total)
                found[name].append(simulate(system, ordered, seed, plan.syncs))
                done += 1
        if plan.through_feed and seed == 0:
            tell(f"{data.name}, through the feed", done / total)
            require_equal(runs["monolith"][0], simulate(factory("monolith-feed"), data, 0, plan.syncs))
    report = DataReport(
        name=data.name,
        drifts=data.drifts,
        events=len(data.examples),
        seeds=plan.seeds,
        online_secs=online_secs(data),
        about=data.about,
    )
    report.results = [_result(name, runs[name], shuffled[name]) for name in factories]
    return report


def require_equal(copied: Run, followed: Run) -> None:
    """Refuse scores that differ in one bit: a follower must have what a plain copy has."""
    for syncs, scores in copied.scores.items():
        wrong = int((scores != followed.scores[syncs]).sum())
        if wrong:
            raise ValueError(
                f"{wrong} of {len(scores)} scores with {syncs} syncs over the feed are not those of a copy"
            )


def online_secs(data: DataSet) -> float:
    """Return how long the online part takes in the time of its events."""
    times = data.examples.times[round(len(data.examples) * BATCH_SHARE) :]
    return float(times[-1] - times[0]) if data.has_times else 0.0


def _result(name: str, runs: list[Run], shuffled: list[Run]) -> Result:
    own = {syncs: [float(np.nanmean(run.auc(syncs, syncs))) for run in runs] for syncs in runs[0].scores}
    return Result(name, _stacked(runs), _stacked(shuffled), own)


def _stacked(runs: list[Run]) -> dict[int, np.ndarray]:
    return stacked([{syncs: run.auc(syncs, SLICES) for syncs in run.scores} for run in runs])
