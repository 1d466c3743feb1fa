"""A model without tables that stands for an exported one, shared by the tests of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from monolith.serve import Client
from monolith.serve.manifest import InputSpec, OutputSpec, Signature
from monolith.serve.replica import Lag, Replica
from monolith.serve.server.model_server import ModelServer


class SumModel:
    """Stands for a predictor: the sum of the columns `a` and `b`, after `gate` was opened if there is one."""

    def __init__(self, version: int, *, scale: float = 1.0, gate: threading.Event | None = None) -> None:
        inputs = tuple(InputSpec(name=name, dtype="float32", shape=()) for name in ("a", "b"))
        outputs = (OutputSpec(name="sum", kind="regression", shape=()),)
        self.signature = Signature(version=version, step=7, inputs=inputs, outputs=outputs, collections=())
        self.stores: dict[str, Any] = {}
        self.scale, self.gate = scale, gate
        self.entered = threading.Semaphore(0)
        self.rows: list[int] = []

    def predict(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        self.rows.append(len(batch["a"]))
        self.entered.release()
        if self.gate is not None:
            assert self.gate.wait(30)
        return {"sum": self.scale * (batch["a"] + batch["b"])}


class Following:
    """Stands for a follower of a run."""

    def lag(self) -> Lag:
        return Lag(seconds=0.25, step=41, event_time=1_700_000_000, sequence=9, connected=True)

    def close(self) -> None:
        pass


def sum_replica(version: int = 1, *, name: str = "sums", **options: Any) -> Replica:  # noqa: ANN401
    """A replica of `SumModel`."""
    follower = Following() if options.pop("follows", False) else None
    on_close = options.pop("on_close", None)
    return Replica(name, SumModel(version, **options), follower=follower, on_close=on_close)  # type: ignore[arg-type]


def columns(*values: float) -> dict[str, Tensor]:
    """Columns of `SumModel`, whose sum is twice the values."""
    return {"a": torch.tensor(values), "b": torch.tensor(values)}


ServeSums = Callable[..., tuple[ModelServer, Client]]
"""The fixture `serve_sums`."""
