"""The results as Markdown, JSON and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

import numpy as np

from freshbench.simulation import BATCH_ONLY
from freshbench.verdict import Difference, Verdict, difference, verdict

COLOURS = ("#1f6fd0", "#d9601a", "#3a8f5d", "#8a4fbf", "#7b7b76", "#b8901f")


def duration(seconds: float) -> str:
    """Return a duration for people, with two digits."""
    for name, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 0.995 * size:
            return f"{seconds / size:.2g} {name}"
    return f"{seconds:.2g} s"


def span(share: float, online_secs: float) -> str:
    """Return a share of the online part for people: a duration, if it is known how long that is."""
    return duration(share * online_secs) if online_secs else f"{share:.2g} of the online part"


@dataclass
class Result:
    """What one system has reached on one data set: AUCs, float [seeds, slices], by number of syncs."""

    system: str
    by_time: dict[int, np.ndarray]
    shuffled: dict[int, np.ndarray] = field(default_factory=dict)
    own_shards: dict[int, list[float]] = field(default_factory=dict)
    """Mean AUC over the shards between two syncs, by number of syncs, for each seed: what the paper's table has."""

    def gain(self, syncs: int) -> Difference:
        """Compare with batch training alone."""
        return difference(self.by_time[syncs], self.by_time[BATCH_ONLY])

    def gain_shuffled(self, syncs: int) -> Difference:
        """The same on the events in random order."""
        return difference(self.shuffled[syncs], self.shuffled[BATCH_ONLY])

    @property
    def verdict(self) -> Verdict:
        """Whether the ordering of the paper holds."""
        return verdict(self.by_time, self.shuffled)


@dataclass
class DataReport:
    """All systems on one data set."""

    name: str
    drifts: bool
    events: int
    seeds: int
    online_secs: float
    """0: not known."""
    about: Mapping[str, float | str]
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the first system has the ordering of the paper, or on a control rightly has not."""
        return (self.results[0].verdict.outcome == "holds") == self.drifts

    def interval(self, syncs: int) -> str:
        """Return the time between two syncs, for people."""
        if syncs == BATCH_ONLY:
            return "no online training"
        if not self.online_secs:
            return f"1/{syncs} of the online part"
        return duration(self.online_secs / syncs)

    def markdown(self) -> str:
        """Return the table and what it shows."""
        about = "".join(
            f", {name} {value if isinstance(value, str) else f'{value:.4f}'}" for name, value in self.about.items()
        )
        lines = [
            f"### {self.name}",
            "",
            f"{self.events:,} events, {self.seeds} seeds{about}.",
            "",
            "| system | syncs | interval | AUC | points against no online training | the same, events in random order |"
            " AUC of its own shards |",
            "|---|---:|---|---:|---:|---:|---:|",
        ]
        lines += [line for result in self.results for line in self._rows(result)]
        for result in self.results:
            lines += ["", *self._judged(result)]
        return "\n".join(lines)

    def _rows(self, result: Result) -> list[str]:
        rows = []
        for syncs, aucs in result.by_time.items():
            gain = shuffled = ""
            if syncs != BATCH_ONLY:
                gain = str(result.gain(syncs))
                shuffled = str(result.gain_shuffled(syncs)) if result.shuffled else ""
            own = np.mean(result.own_shards[syncs])
            cells = (
                result.system,
                syncs,
                self.interval(syncs),
                f"{np.nanmean(aucs):.4f}",
                gain,
                shuffled,
                f"{own:.4f}",
            )
            rows.append(f"| {' | '.join(map(str, cells))} |")
        return rows

    def _judged(self, result: Result) -> list[str]:
        judged = result.verdict
        expected = "" if self.drifts else " (a control: nothing depends on time here, so it must not hold)"
        lines = [f"**{result.system}: the ordering of the paper {_sentence[judged.outcome]}**{expected}", ""]
        return [*lines, *(f"- {claim.text}: {claim.outcome} ({claim.because})" for claim in judged.claims)]

    def as_json(self) -> dict[str, object]:
        """Return everything that was measured."""
        return {
            "data": self.name,
            "drifts": self.drifts,
            "events": self.events,
            "seeds": self.seeds,
            "online_secs": self.online_secs,
            "about": dict(self.about),
            "passed": self.passed,
            "systems": [
                {
                    "system": one.system,
                    "outcome": one.verdict.outcome,
                    "claims": [vars(claim) for claim in one.verdict.claims],
                    "slice_aucs": {str(syncs): aucs.tolist() for syncs, aucs in one.by_time.items()},
                    "slice_aucs_shuffled": {str(syncs): aucs.tolist() for syncs, aucs in one.shuffled.items()},
                    "own_shard_aucs": {str(syncs): aucs for syncs, aucs in one.own_shards.items()},
                }
                for one in self.results
            ],
        }


_sentence = {"holds": "holds", "not shown": "is not shown", "contradicted": "is contradicted"}


@dataclass(frozen=True)
class Line:
    """A line of a plot: (x, y, error)."""

    label: str
    points: Sequence[tuple[float, float, float]]
    colour: str
    is_dashed: bool = False


def panel(title: str, x_labels: Sequence[str], lines: Sequence[Line], *, y_label: str) -> str:
    """Draw lines over equidistant places 0, 1, ... as SVG."""
    width, height, left, top, right, bottom = 640.0, 380.0, 70.0, 40.0, 20.0, 110.0
    values = [value for line in lines for _, y, error in line.points for value in (y - error, y + error)]
    low, high = min(values), max(values)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (x + 0.5) / len(x_labels) * (width - left - right)
        return across, top + (high - y) / (high - low) * (height - top - bottom)

    parts = [f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>']
    for tick in np.linspace(low, high, 5):
        _, y = place(0, tick)
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#e3e2de"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
    for number, label in enumerate(x_labels):
        x, _ = place(number, low)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 20:.1f}" text-anchor="middle">{escape(label)}</text>')
    parts.append(
        f'<text x="14" y="{(top + height - bottom) / 2:.1f}" transform="rotate(-90 14 '
        f'{(top + height - bottom) / 2:.1f})" text-anchor="middle">{escape(y_label)}</text>'
    )
    for number, line in enumerate(lines):
        at = [(*place(x, y), place(x, y - error)[1], place(x, y + error)[1]) for x, y, error in line.points]
        stroke = f'stroke="{line.colour}"' + (' stroke-dasharray="5 4"' if line.is_dashed else "")
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in at)
        parts.append(f'<polyline points="{path}" fill="none" {stroke} stroke-width="2"/>')
        for x, y, below, above in at:
            parts.append(f'<path d="M{x:.1f} {below:.1f}V{above:.1f}" stroke="{line.colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>')
        x, y = left + number % 2 * 270, height - 46 + number // 2 * 18
        parts.append(f'<path d="M{x} {y - 4}h24" {stroke} stroke-width="3"/>')
        parts.append(f'<text x="{x + 30}" y="{y}">{escape(line.label)}</text>')
    return f'<g font-family="sans-serif" font-size="12" fill="#333">{"".join(parts)}</g>'


def plot(reports: Sequence[DataReport]) -> str:
    """Draw what online training gains against the interval, a panel for each data set, dashed for the events in random order."""
    panels = []
    for report in reports:
        every = sorted({syncs for result in report.results for syncs in result.by_time})
        lines = []
        for result, colour in zip(report.results, COLOURS * len(report.results), strict=False):
            gains = _gains(result.by_time, result.gain, every)
            lines.append(Line(f"{result.system}, in order of time", gains, colour))
            if result.shuffled:
                gains = _gains(result.shuffled, result.gain_shuffled, every)
                lines.append(Line(f"{result.system}, in random order", gains, colour, is_dashed=True))
        labels = ["never" if n == BATCH_ONLY else report.interval(n) for n in every]
        title = f"{report.name}: points of AUC against no online training, by sync interval"
        panels.append(panel(title, labels, lines, y_label="points"))
    return svg(panels)


def _gains(
    aucs: Mapping[int, np.ndarray], gain: Callable[[int], Difference], every: Sequence[int]
) -> list[tuple[float, float, float]]:
    found = {number: gain(number) for number in aucs if number != BATCH_ONLY}
    return [
        (every.index(BATCH_ONLY), 0.0, 0.0),
        *((every.index(number), 100 * one.mean, 100 * _finite(one.error)) for number, one in found.items()),
    ]


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def svg(panels: Sequence[str]) -> str:
    """Put panels below each other."""
    placed = "".join(f'<g transform="translate(0 {380 * number})">{one}</g>' for number, one in enumerate(panels))
    size = f'width="640" height="{380 * len(panels)}" viewBox="0 0 640 {380 * len(panels)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="#fff"/>{placed}</svg>\n'
    )
