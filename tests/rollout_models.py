"""Versions of a model whose predictions are known, and a server's work on a request without a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monolith.serve.manifest import InputSpec, OutputSpec, Signature
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.rollout.labels import PredictionMemory, ServedLabel
from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.server.routing import Answered

MODEL = "clicks"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class KnownPredictor:
    """Predicts the column `p`, or 1 - p if it is poisoned, for binary heads, and 100 p for the head stay."""

    def __init__(self, version: int, *, poisoned: bool = False, heads: tuple[str, ...] = ("click",)) -> None:
        outputs = [OutputSpec(name=head, kind="binary", shape=()) for head in heads]
        outputs.append(OutputSpec(name="stay", kind="regression", shape=()))
        inputs = (InputSpec(name="p", dtype="float32", shape=()),)
        self.signature = Signature(version=version, step=version, inputs=inputs, outputs=tuple(outputs), collections=())
        self.stores: dict[str, object] = {}
        self.poisoned, self._heads = poisoned, heads

    def predict(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        p = torch.as_tensor(batch["p"], dtype=torch.float32)
        p = 1 - p if self.poisoned else p
        return {**dict.fromkeys(self._heads, p), "stay": p * 100}


class Asker:
    """Sends requests in JSON to a server."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address, token

    def send(
        self, method: str, path: str, body: object = None, *, token: str | None = ""
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer. `token` is another one than usual, or None for none."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {} if token is None else {"authorization": f"Bearer {token or self._token}"}
        request = urllib.request.Request(f"http://{self.address}{path}", data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


def replica(version: int, *, poisoned: bool = False, heads: tuple[str, ...] = ("click",)) -> Replica:
    return Replica(MODEL, KnownPredictor(version, poisoned=poisoned, heads=heads))  # type: ignore[arg-type]


def repository_of(*replicas: Replica) -> ModelRepository:
    repository = ModelRepository()
    for one in replicas:
        repository.add(one)
    return repository


def router_of(folder: Path, *replicas: Replica, clock: Clock | None = None, **options: Any) -> RolloutRouter:  # noqa: ANN401
    clock = clock or Clock()
    options.setdefault("memory", PredictionMemory(clock=clock))
    return RolloutRouter(repository_of(*replicas), folder, clock=clock, now=lambda: 1e9 + clock.at, **options)


def ask(router: RolloutRouter, request_id: str, p: float | list[float], key: str | None = None) -> int:
    """Answer a request as the handler does, and return the version that answered."""
    columns = {"p": [p] if isinstance(p, float) else p}
    route = router.route(MODEL, None, request_id if key is None else key)
    for one in (route.primary, *route.shadows):
        router.answered(
            Answered(
                model=MODEL,
                version=one.version,
                protocol="python",
                rows=len(columns["p"]),
                seconds=0.001,
                status="ok",
                request_id=request_id,
                columns=columns,
                outputs=one.predict(columns),
                shadow=one is not route.primary,
            )
        )
    return route.primary.version


def clicks(count: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Return probabilities and labels drawn with them, so that a model which predicts them is perfect."""
    random = np.random.default_rng(seed)
    p = random.beta(1.5, 6, count)
    return p.tolist(), (random.random(count) < p).astype(float).tolist()


def serve_and_label(router: RolloutRouter, count: int, *, seed: int = 0, batch: int = 50) -> list[int]:
    """Ask `count` requests and send their labels in batches. Returns the versions that answered."""
    versions, labels = [], []
    for number, (p, label) in enumerate(zip(*clicks(count, seed), strict=True)):
        versions.append(ask(router, f"{seed}-{number}", p))
        labels.append(ServedLabel(request_id=f"{seed}-{number}", label=label))
        if len(labels) == batch:
            router.add_labels(labels)
            labels = []
    router.add_labels(labels)
    return versions
