"""The metrics that our processes expose, with their labels, for tests of alerts and dashboards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monolith.data.join.joiner import JoinStatus
from monolith.data.join.metrics import prometheus_text
from monolith.serve.metrics import ServingMetrics
from page_replicas import SetLag, answer, replica, repository

ROOT = Path(__file__).parents[1]
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
