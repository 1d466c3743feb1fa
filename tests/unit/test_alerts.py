"""Danger: an alert that never fires because its metric has another name, or that nobody knows how to answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from metric_families import families

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
ALERTS = [alert for group in GROUPS for alert in group["rules"]]
RUNBOOK = (ROOT / "docs/operations-runbook.md").read_text()


def test_all_kinds_of_processes_have_alerts() -> None:
    assert {group["name"] for group in GROUPS} == {
        f"monolith-{kind}" for kind in ("trainer", "servers", "joiner", "replica")
    }
    assert all(len(group["rules"]) >= 2 for group in GROUPS)
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS) >= 10


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_what_an_alert_asks_for_exists(alert: dict[str, str]) -> None:
    known = families()
    expression = alert["expr"]
    names = re.findall(r"monolith_\w+", expression)
    assert names
    assert [name for name in names if name not in known] == []
    there = set.union(*(known[name] for name in names)) | {"instance"}
    asked = set(re.findall(r"(\w+)=~?\"", expression)) | set(
        re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
    )
    assert asked <= there
    assert expression.count("(") == expression.count(")")
    assert alert["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_an_entry_in_the_runbook(alert: dict[str, str]) -> None:
    assert alert["annotations"]["runbook"] == f"operations-runbook.md#{alert['alert'].lower()}"
    _, _, entry = RUNBOOK.partition(f"\n## {alert['alert']}\n")
    entry = entry.partition("\n## ")[0]
    for part in ("**Means:**", "**Look:**", "**Do:**"):
        assert part in entry


def test_the_runbook_has_no_entry_of_an_alert_that_is_gone() -> None:
    assert set(re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)) == {alert["alert"] for alert in ALERTS}


def test_every_metric_is_explained() -> None:
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("operations-monitoring.md", "guide-page.md"))
    named = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in families()}
    assert len(named) > 40
    assert sorted(name for name in named if f"`{name}`" not in pages) == []
