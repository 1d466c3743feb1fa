"""The demo's report: one HTML page, with the curves inside."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from svg_chart import line_chart

OFFERS = "What the export would show three users next"
OFFER_COLUMNS = ("user", "item", "rank", "predicted", "true chance")
INTRODUCTION = (
    "Trained on a synthetic stream in which new items keep appearing and tastes drift. Every event is scored before the model "
    "learns from it. Popularity ranks by the click rate of the item so far, learned from the same stream; no ranking can "
    "beat that by the true chances."
)

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1a; --soft: #62625e; --line: #e3e2de; --page: #fcfcfa;
        --s0: #1f6fd0; --s1: #d9601a; --s2: #7b7b76; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f0f0ec; --soft: #a5a59e; --line: #34342f; --page: #171716; --s0: #5aa0f2; --s1: #f08a4b; --s2: #98988f; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 800px; margin: 40px auto; padding: 0 20px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 8px; } h2 { font-size: 18px; margin: 40px 0 4px; }
p { color: var(--soft); margin: 0 0 12px; }
.figures { display: flex; flex-wrap: wrap; gap: 12px 36px; margin: 24px 0; }
.figures div { color: var(--soft); font-size: 14px; }
.figures b { display: block; color: var(--ink); font-size: 24px; line-height: 1.25; font-weight: 600; }
svg { width: 100%; height: auto; display: block; } text { font: 13px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--line); } .name { fill: var(--ink); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dot { stroke: var(--page); stroke-width: 2; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 400; }
td, th { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
"""


@dataclass(frozen=True)
class Point:
    """A point of the curves. Each AUC is that of the events since the previous point, scored before they were trained on."""

    impressions: int
    rows: int
    auc: float
    popularity: float
    best: float


def write_report(path: Path, points: Sequence[Point], offers: Sequence[Sequence[str]]) -> None:
    """Write the page: the results, the curves, and `offers` in the order of OFFER_COLUMNS."""
    last, xs = points[-1], [point.impressions for point in points]
    curves = {
        "Monolith": [point.auc for point in points],
        "popularity": [point.popularity for point in points],
        "best possible": [point.best for point in points],
    }
    aucs = {f"AUC, {name}": f"{curve[-1]:.3f}" for name, curve in curves.items()}
    path.write_text(
        page(
            "Monolith demo",
            heading("A click model on ids that never collide", INTRODUCTION, level=1),
            figures({**aucs, "impressions": f"{last.impressions:,}", "rows": f"{last.rows:,}"}),
            heading("AUC on unseen events", "Each point covers the events since the one before."),
            line_chart("impressions", xs, curves, form=".3f"),
            heading("Rows in the tables", "Every user, item, category and tag has one of its own."),
            line_chart("impressions", xs, {"rows": [point.rows for point in points]}, form=",.0f"),
            heading(
                OFFERS,
                "Ids are 64-bit, written in hexadecimal. The true chance is known because the data are synthetic.",
            ),
            table(OFFER_COLUMNS, offers),
        )
    )


def page(title: str, *parts: str) -> str:
    """Return an HTML document of `parts`, which are HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def heading(title: str, text: str, *, level: int = 2) -> str:
    """Return a heading with a sentence below it."""
    return f"<h{level}>{html.escape(title)}</h{level}>\n<p>{html.escape(text)}</p>"


def figures(values: Mapping[str, str]) -> str:
    """Return the main numbers in large type, with captions."""
    cells = (f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>" for name, value in values.items())
    return f'<div class="figures">{"".join(cells)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with two columns of text and further ones of numbers."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
