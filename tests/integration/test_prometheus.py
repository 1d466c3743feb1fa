"""Danger: alert rules that Prometheus does not load or that never fire, and panels of the dashboard that stay empty.

Each alert gets the series that our processes expose, with all their labels, and values that it is meant for.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metric_families import families
from monolith.serve.page import Page, PageServer
from monolith.testing.servers import LocalServer
from page_replicas import Clock, answer, busy_metrics
from real_servers import INSTALL, until

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/serving.json").read_text())
HOURS = 8

GROWS, STANDS, ONE, ZERO, PAST = "0+1000x600", "5+0x600", "1+0x600", "0+0x600", "1000000+0x600"
"""How series go on, minute by minute, as promtool writes it."""
FIRING: dict[str, dict[str, str]] = {
    "TrainingStalled": {"monolith_serving_applied_step": STANDS, "monolith_serving_connected": ONE},
    "ExamplesTooOld": {"monolith_serving_applied_event_time_seconds": "1+0x600"},
    "WriterUnreachable": {"monolith_serving_connected": ZERO},
    "TableGrowsFast": {"monolith_serving_table_rows": GROWS},
    "JoinerBehind": {"monolith_join_lag_records": "200000+1000x600"},
    "JoinerWatermarkStalled": {"monolith_join_watermark_lag_seconds": PAST},
    "JoinerRefusesRecords": {"monolith_join_bad_records_total": GROWS, "monolith_join_impressions_total": GROWS},
    "ClicksTooLate": {"monolith_join_late_actions_total": GROWS, "monolith_join_actions_total": GROWS},
    "ReplicaDown": {},
    "ReplicaBehind": {"monolith_serving_lag_seconds": PAST, "monolith_serving_default_version": ONE},
    "LastChangesMissing": {"monolith_serving_missing_changes": ONE},
    "RequestsFail": {"monolith_serving_requests_total{status='error'}": GROWS},
    "RequestsShed": {"monolith_serving_shed_requests_total": GROWS},
    "RequestsSlow": {
        "monolith_serving_request_duration_seconds_bucket{le='0.1'}": ZERO,
        "monolith_serving_request_duration_seconds_bucket{le='0.5'}": GROWS,
        "monolith_serving_request_duration_seconds_bucket{le='+Inf'}": GROWS,
    },
    "ShardReplicaUnhealthy": {"monolith_shard_replica_healthy": ZERO},
    "LabelsBehind": {"monolith_label_stream_records_behind": PAST},
    "RequestLogFull": {"monolith_request_log_rows_total{state='dropped'}": GROWS},
}


def program(name: str) -> str:
    found = shutil.which(name, path=ROOT / ".cache/servers") or shutil.which(name)
    if found is None:
        pytest.skip(f"Prometheus is not there without the program {name}; {INSTALL}")
    return found


class PrometheusServer(LocalServer):
    """One Prometheus that reads `target` every 200 ms."""

    def __init__(self, folder: Path, target: str) -> None:
        super().__init__(folder)
        self._program = program("prometheus")
        scrape = {"job_name": "monolith", "static_configs": [{"targets": [target]}]}
        config = {"global": {"scrape_interval": "200ms"}, "scrape_configs": [scrape], "rule_files": [str(RULES)]}
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(config))

    def command(self, ports: list[int]) -> list[str]:
        address = f"--web.listen-address=127.0.0.1:{ports[0]}"
        return [self._program, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", address]

    def answers(self) -> bool:
        try:
            return bool(self.get("/-/ready"))
        except OSError:
            return False

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return bytes(answer.read())

    def query(self, expression: str) -> list[Any]:
        """The series that an expression has now."""
        answer = json.loads(self.get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        assert answer["status"] == "success"
        result = answer["data"]["result"]
        assert isinstance(result, list)
        return result


def series(written: str) -> str:
    """A series with all labels that our processes give it, and those that Prometheus adds."""
    name, _, given = written.partition("{")
    set_here = dict(re.findall(r"(\w+)='([^']*)'", given))
    labels = {**dict.fromkeys(families()[name], "x"), "instance": "a:1", "job": "monolith", **set_here}
    return f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in sorted(labels.items()))}}}"


def checked(inputs: dict[str, str], firing: str) -> dict[str, object]:
    """A test of promtool: that the alert `firing` fires in the end, or with ".+", that none does."""
    return {
        "interval": "1m",
        "input_series": [{"series": series(name), "values": values} for name, values in inputs.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname=~"{firing}",alertstate="firing"}}) or vector(0)',
                "eval_time": f"{HOURS}h",
                "exp_samples": [{"labels": "{}", "value": int(firing != ".+")}],
            }
        ],
    }


def test_every_alert_fires_for_what_it_is_meant_for_and_none_without(tmp_path: Path) -> None:
    alerts = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert sorted(FIRING) == sorted(alerts)
    tests = [checked(inputs, alert) for alert, inputs in FIRING.items()]
    # No replica at all is one of the alerts.
    tests.append(checked({"monolith_serving_start_time_seconds": ONE}, ".+"))
    given = tmp_path / "tests.yaml"
    given.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests}))
    ran = subprocess.run([program("promtool"), "test", "rules", str(given)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    # Prometheus takes only samples of the present.
    metrics = busy_metrics(Clock(time.time() - 30), seconds=30)
    metrics.answered(answer(shadow=True))
    page = Page(metrics)
    with PageServer(page.routes()) as replica:
        target = replica.address.removeprefix("http://").rstrip("/")
        with PrometheusServer(tmp_path_factory.mktemp("prometheus"), target) as server:
            until(lambda: server.query("count_over_time(monolith_serving_lag_seconds[1m]) > 3"))
            yield server


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_panel_of_the_dashboard_shows_something(scraping: PrometheusServer) -> None:
    empty = []
    for expression in expressions():
        for variable, value in {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}.items():
            expression = expression.replace(variable, value)
        if not scraping.query(expression):
            empty.append(expression)
    assert empty == []


def test_prometheus_has_no_objection_to_our_metrics(scraping: PrometheusServer) -> None:
    (target,) = json.loads(scraping.get("/api/v1/targets"))["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    text = urllib.request.urlopen(target["scrapeUrl"], timeout=10).read()
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True)
    assert checked.returncode == 0, checked.stderr.decode()


def test_the_rules_are_loaded_by_a_running_server(scraping: PrometheusServer) -> None:
    groups = json.loads(scraping.get("/api/v1/rules"))["data"]["groups"]
    assert {rule["name"] for rule in itertools.chain(*(group["rules"] for group in groups))} == set(FIRING)
