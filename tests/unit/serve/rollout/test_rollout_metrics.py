"""Danger: a rollback or a dropped shadow that no dashboard shows."""

from __future__ import annotations

from pathlib import Path

from monolith.serve.metrics import ServingMetrics
from monolith.serve.rollout.plan import QualityBounds, RolloutPlan
from monolith.serve.rollout.routes import RolloutCollector
from monolith.serve.server.routing import Answered
from rollout_models import MODEL, replica, router_of, serve_and_label


def test_prometheus_sees_traffic_quality_rollbacks_and_dropped_shadows(tmp_path: Path) -> None:
    router = router_of(tmp_path, replica(7), replica(8, poisoned=True), replica(9))
    bounds = QualityBounds(min_labels=200)
    router.set_plan(RolloutPlan(model=MODEL, stable=7, candidate=9, share=0.25, bounds=bounds))
    metrics = ServingMetrics()
    metrics.collectors.append(RolloutCollector(router))
    text = metrics.exposition()[0].decode()
    assert 'monolith_rollout_share{model="clicks",version="7"} 0.75' in text
    assert 'monolith_rollout_share{model="clicks",version="9"} 0.25' in text
    serve_and_label(router, 100, seed=1)
    text = metrics.exposition()[0].decode()
    assert 'monolith_rollout_quality{model="clicks",number="auc",version="7"} 0.' in text
    router.set_plan(RolloutPlan(model=MODEL, stable=7, candidate=8, share=0.5, bounds=bounds))
    serve_and_label(router, 1000, seed=2)
    for status in ("overloaded", "error"):
        router.answered(
            Answered(
                model=MODEL,
                version=9,
                protocol="grpc",
                rows=1,
                seconds=0.0,
                status=status,  # type: ignore[arg-type]
                request_id="a",
                shadow=True,
            )
        )
    text = metrics.exposition()[0].decode()
    for line in (
        'monolith_rollout_events_total{model="clicks",version="8",what="rollbacks"} 1.0',
        'monolith_rollout_events_total{model="clicks",version="9",what="dropped_shadows"} 1.0',
        'monolith_rollout_events_total{model="clicks",version="9",what="failed_shadows"} 1.0',
        'monolith_rollout_events_total{model="",version="",what="labels_joined"} 1100.0',
    ):
        assert line in text
    assert 'monolith_rollout_share{model="clicks",version="7"} 1.0' in text
