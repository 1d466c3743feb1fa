"""Danger: a dashboard with panels that stay empty, because a metric or a label has another name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monolith.serve.metrics import ServingMetrics
from page_replicas import SetLag, answer, replica, repository

ROOT = Path(__file__).parents[4]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "serving.json").read_text())
GUIDE = (ROOT / "docs" / "guide-page.md").read_text()


def exposed() -> dict[str, set[str]]:
    """The labels of each metric, by its name."""
    parser = pytest.importorskip("prometheus_client.parser", reason="needs the package prometheus-client")
    metrics = ServingMetrics(repository(replica(follower=SetLag())))
    metrics.answered(answer())
    metrics.answered(answer(shadow=True))
    body, _ = metrics.exposition()
    return {
        sample.name: set(sample.labels)
        for family in parser.text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [known["query"]["query"] for known in DASHBOARD["templating"]["list"] if known["type"] == "query"]
    assert len(panels) > 15
    return panels + variables


@pytest.mark.parametrize("expression", expressions())
def test_what_the_dashboard_asks_for_exists(expression: str) -> None:
    known = exposed()
    names = re.findall(r"monolith_\w+", expression)
    assert names
    for name in names:
        assert name in known
    labels = set(re.findall(r"(\w+)=~?\"", expression)) | {
        label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")
    }
    there = set.union(*(known[name] for name in names)) | {"instance"}
    assert labels <= there


def test_the_dashboard_shows_every_metric_and_the_guide_explains_it() -> None:
    shown = " ".join(expressions())
    for name in exposed():
        family = re.sub(r"_(bucket|sum|count|created)$", "", name)
        assert family in shown or family == "monolith_serving_dropped_series_total"
        assert family in GUIDE


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
