"""Danger: an alert that never fires because its metric has another name, or that nobody knows how to answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from monolith.data.join.joiner import JoinStatus
from monolith.data.join.metrics import prometheus_text
from monolith.serve.metrics import ServingMetrics
from page_replicas import SetLag, answer, replica, repository

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
ALERTS = [alert for group in GROUPS for alert in group["rules"]]
RUNBOOK = (ROOT / "docs/operations-runbook.md").read_text()
FAMILY = re.compile(r"(Counter|Gauge)MetricFamily\(\s*\"(monolith_\w+)\",\s*\"[^\"]*\"(?:,\s*labels=([^)]*\)|\w+))?")


def families() -> dict[str, set[str]]:
    """The labels of each metric: of the exposition of a replica and a joiner, and of the sources of other collectors."""
    parser = pytest.importorskip("prometheus_client.parser", reason="needs the package prometheus-client")
    serving = ServingMetrics(repository(replica(follower=SetLag())))
    serving.answered(answer())
    serving.answered(answer(shadow=True))
    status = JoinStatus(units=1, counts={"bad_key": 1}, open_windows=0, memory_bytes=0, lag_records=0, watermark=1)
    known: dict[str, set[str]] = {}
    for text in (serving.exposition()[0].decode(), prometheus_text(status)):
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                known.setdefault(sample.name, set()).update(sample.labels)
    for path in sorted((ROOT / "src/monolith/serve").rglob("*.py")):
        for kind, name, labels in FAMILY.findall(path.read_text()):
            named = set(re.findall(r"\"(\w+)\"", labels))
            shared = {"model", "version"} if "*model" in labels or labels.startswith("replica") else set()
            own = {"shard", "address"} if labels.startswith("replica") else set()
            known.setdefault(name + "_total" * (kind == "Counter"), set()).update(named | shared | own)
    return known


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
