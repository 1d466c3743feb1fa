"""What `06_live.py` says of the numbers of the site: in the view, in a line, and in the report at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_report import figures, heading, page
from svg_chart import line_chart

BARS = " ▁▂▃▄▅▆▇█"
LABEL, GAP = 21, 2
"""Columns of the labels, so that they stay where they are while the curves grow."""
MOST_BARS = 60
INTRODUCTION = (
    "Users' tastes drift, and new items keep appearing. Each item shown at random is scored by three models before anybody knows "
    "whether it is clicked: by the one that learns from every click, by the same model as it was when the site opened, and by "
    "the true chances, which nobody can beat."
)
AUCS = {"online": "learns on", "frozen": "as at the start", "best": "true chances"}


def rows(reports: list[dict[str, Any]], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the view: a label, and what is said in `width` columns."""
    now, before = reports[-1], reports[max(len(reports) - 6, 0)]
    secs = max(now["time"] - before["time"], 1e-9)
    speed = [f"{(now[name] - before[name]) / secs:,.0f} {name}/s" for name in ("impressions", "clicks")]
    yield "site", "   ".join([*speed, f"{now['impressions']:,} so far"])
    yield "click to answer", f"{milliseconds(now['fresh_ms'])}   joined, trained and served; median"
    yield "replica behind by", milliseconds(now["lag_ms"])
    if now["auc"]:
        yield "AUC of ten seconds", f"same impressions for all; tastes have turned by {now['turned']:.0f}°"
        # "0.812 ", the bars, and what the curve is.
        bars = min(width - 6 - GAP - max(map(len, AUCS.values())), MOST_BARS)
        for name, said in AUCS.items():
            line = sparkline([report["auc"].get(name) for report in reports], bars)
            yield f"  {name}", f"{now['auc'][name]:.3f} {line}{' ' * GAP}{said}"
    rates = now["click_rate"]
    yield "clicks/impression", f"{rates['ranked']:.1%} ranked   {rates['random']:.1%} at random"


def sparkline(values: Sequence[float | None], most: int, low: float = 0.5, high: float = 1.0) -> str:
    """Draw the last values as bars, `most` at most."""
    known = [value for value in values if value is not None][-max(most, 1) :]
    steps = [round((len(BARS) - 1) * (min(max(value, low), high) - low) / (high - low)) for value in known]
    return "".join(BARS[step] for step in steps)


def milliseconds(value: float | None) -> str:
    """Return a duration as text."""
    return "-" if value is None else f"{value:,.0f} ms"


def favourite(now: Mapping[str, Any]) -> tuple[str, str]:
    """Say which new item is recommended most, in two lines."""
    new = now["new_item"]
    if new is None:
        return "no item of the last minute was on offer often enough yet", ""
    return (
        f"item {new['item']} did not exist {new['age_secs']:.0f} s ago:",
        f"of {new['offers']} users who could get it, {new['wins'] / new['offers']:.0%} are shown it first "
        f"(by chance {1 / 20:.0%})",
    )


def plain(now: Mapping[str, Any]) -> str:
    """Return the state as one line."""
    aucs = ", ".join(f"{name} {value:.3f}" for name, value in now["auc"].items())
    return (
        f"{now['impressions']:,} impressions, {now['clicks']:,} clicks; a click is in the answers after "
        f"{milliseconds(now['fresh_ms'])}; AUC {aucs}; {' '.join(favourite(now)).rstrip()}"
    )


def write_report(path: Path, reports: list[dict[str, Any]]) -> bool:
    """Write the curves of the run as one HTML page. Returns False if it was too short for curves."""
    measured = [report for report in reports if report["auc"] and report["fresh_ms"] is not None]
    if len(measured) < 2:
        return False
    last = reports[-1]
    seconds = [report["time"] - reports[0]["time"] for report in measured]
    curves = {name: [report["auc"][name] for report in measured] for name in ("online", "frozen", "best")}
    path.write_text(
        page(
            "Monolith, live",
            heading("A model that learns while it serves", INTRODUCTION, level=1),
            figures(
                {
                    **{f"AUC, {name}": f"{value:.3f}" for name, value in last["auc"].items()},
                    "from a click to the next answer": milliseconds(last["fresh_ms"]),
                    "impressions": f"{last['impressions']:,}",
                }
            ),
            heading("AUC", "Of the ten seconds before, on items shown at random."),
            line_chart("seconds", seconds, curves, form=".3f"),
            heading("From a click to an answer that has learnt from it", "Milliseconds, median of the last 30."),
            line_chart("seconds", seconds, {"ms": [report["fresh_ms"] for report in measured]}, form=",.0f"),
            heading("New items", " ".join(favourite(last))),
        )
    )
    return True
