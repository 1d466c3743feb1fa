"""Danger: records of the log that the joiner cannot join, or examples of the joiner that are not found to be labels."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import torch
import yaml

from monolith.data.join import JoinConfig, Joiner
from monolith.serve.request_log import RequestLog
from monolith.serve.rollout.label_stream import LabelStream
from monolith.serve.server.routing import Answered
from monolith.streams import open_stream
from rollout_models import MODEL, replica, router_of

GUIDE = (Path(__file__).parents[4] / "docs/guide-serving.md").read_text()


def served(number: int) -> Answered:
    p = torch.tensor([0.25, 0.75])
    given = {"columns": {"p": p}, "outputs": {"click": p, "stay": 100 * p}}
    fields = {"model": MODEL, "version": 7, "protocol": "grpc", "rows": 2, "seconds": 0.01, "status": "ok"}
    return Answered(**fields, **given, request_id=f"r-{number}")  # type: ignore[arg-type]


def test_actions_with_served_requests_are_labels_of_their_predictions(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(impressions:.*?)```", GUIDE, re.DOTALL)
    impressions = yaml.safe_load(block)["impressions"] | {"stream": str(tmp_path / "served")}
    router = router_of(tmp_path / "rollout", replica(7))
    log = RequestLog(open_stream(impressions["stream"], partitions=1))
    for number in range(3):
        router.answered(served(number))
        log.answered(served(number))
    log.close()
    with open_stream(tmp_path / "actions", partitions=1).writer() as actions:
        action = {"request_id": "r-1", "row": 1, "action": "click", "time_ms": round(time.time() * 1000)}
        actions.append(json.dumps(action).encode(), key=b"r-1")
    examples = open_stream(tmp_path / "examples", partitions=1)
    labels = LabelStream(examples, router.add_labels, tmp_path / "at.json", columns={"clicked": "click"})
    config = {
        "impressions": impressions,
        "actions": impressions | {"stream": str(tmp_path / "actions")},
        "window_secs": 60,
        "labels": [{"name": "clicked", "actions": {"click": 1}}],
        "output": {"stream": str(tmp_path / "examples")},
        "state": {"folder": str(tmp_path / "state")},
    }
    with Joiner(JoinConfig.from_json(json.dumps(config))) as joiner:
        joiner.run(until_end=True)
    for _ in range(6000):
        if labels.counts()["read"] == 6 and router.memory.counts["labels_joined"] == 6:
            break
        threading.Event().wait(0.005)
    labels.close()
    assert (labels.counts()["bad"], router.memory.counts["labels_joined"]) == (0, 6)
    quality = router.quality()[MODEL][7]
    assert quality["labels"] == 6
    router.close()
