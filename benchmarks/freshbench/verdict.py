"""Whether the ordering of the paper holds: paired differences of AUC, their standard errors, and what they allow to say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from freshbench.simulation import BATCH_ONLY

SLICES = 10
"""AUC is the mean over this many consecutive slices of the online part, the same for all intervals: the paper's widest shards."""
ERRORS = 2.0
"""A difference is shown if it is greater than this many standard errors."""
MARGIN = 0.0005
"""And greater than this, for what the paper found is 0.0024 to 0.0037."""

Outcome = Literal["holds", "not shown", "contradicted"]


@dataclass(frozen=True)
class Difference:
    """A mean difference of AUC and its standard error."""

    mean: float
    error: float

    @property
    def is_shown(self) -> bool:
        return self.mean > max(MARGIN, ERRORS * self.error)

    @property
    def is_contradicted(self) -> bool:
        return self.mean < -max(MARGIN, ERRORS * self.error)

    def __str__(self) -> str:
        return f"{100 * self.mean:+.3f} ± {100 * self.error:.3f}"


def difference(some: np.ndarray, others: np.ndarray) -> Difference:
    """Compare two AUCs of the same seeds and slices, float [seeds, slices].

    The error is the greater of two: that over the seeds, and that over the slices of time. If all seeds have the same data, only
    the second contains the chance of which events there were.
    """
    found = some - others
    by_seed, by_slice = np.nanmean(found, axis=1), np.nanmean(found, axis=0)
    errors = [values.std(ddof=1) / math.sqrt(len(values)) for values in (by_seed, by_slice) if len(values) > 1]
    return Difference(float(found.mean()), float(max(errors, default=math.inf)))


@dataclass(frozen=True)
class Claim:
    """A part of the paper's result, and whether the numbers show it."""

    text: str
    outcome: Outcome
    because: str


@dataclass(frozen=True)
class Verdict:
    """All claims about one system on one data set."""

    claims: tuple[Claim, ...]

    @property
    def outcome(self) -> Outcome:
        outcomes = {claim.outcome for claim in self.claims}
        if "contradicted" in outcomes:
            return "contradicted"
        return "not shown" if "not shown" in outcomes else "holds"


def verdict(by_time: Mapping[int, np.ndarray], shuffled: Mapping[int, np.ndarray]) -> Verdict:
    """Judge AUCs, float [seeds, slices] by number of syncs, of events in the order of time and in random order."""
    online = sorted(number for number in by_time if number != BATCH_ONLY)
    gains = {number: difference(by_time[number], by_time[BATCH_ONLY]) for number in online}
    claims = [_all_shown("online training is better than batch training alone", gains)]
    steps = {shorter: difference(by_time[shorter], by_time[longer]) for longer, shorter in itertools.pairwise(online)}
    if steps:
        claims.append(_never_worse("a shorter interval is not worse than the next longer one", steps))
        ends = {online[-1]: difference(by_time[online[-1]], by_time[online[0]])}
        claims.append(_all_shown("the shortest interval is better than the longest", ends))
    if shuffled:
        gained = by_time[online[-1]] - by_time[BATCH_ONLY]
        without_time = shuffled[online[-1]] - shuffled[BATCH_ONLY]
        # Slices of shuffled data are not those of the same time, so only their mean is compared.
        without_time = np.broadcast_to(np.nanmean(without_time, axis=1, keepdims=True), gained.shape)
        fresh = {online[-1]: difference(gained, without_time)}
        claims.append(
            _all_shown("this is freshness: the gain is greater than on the same events in random order", fresh)
        )
    return Verdict(tuple(claims))


def _all_shown(text: str, differences: Mapping[int, Difference]) -> Claim:
    if any(one.is_contradicted for one in differences.values()):
        return Claim(text, "contradicted", _listed(differences))
    shown = all(one.is_shown for one in differences.values())
    return Claim(text, "holds" if shown else "not shown", _listed(differences))


def _never_worse(text: str, differences: Mapping[int, Difference]) -> Claim:
    worse = any(one.is_contradicted for one in differences.values())
    return Claim(text, "contradicted" if worse else "holds", _listed(differences))


def _listed(differences: Mapping[int, Difference]) -> str:
    return ", ".join(f"{number} syncs {one}" for number, one in differences.items())


def stacked(aucs: Sequence[Mapping[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """Join the AUCs of the slices, by number of syncs, of all seeds: float [seeds, slices]."""
    return {number: np.stack([one[number] for one in aucs]) for number in (aucs[0] if aucs else ())}
