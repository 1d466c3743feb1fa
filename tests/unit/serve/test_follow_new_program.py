"""Danger: a replica that follows a run is given a new program, and fails a request or stops following meanwhile."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import torch

from followed_run import HEADS, PROBE, Clicks, Run
from followed_tables import until
from monolith.cli.serve_replicas import following
from monolith.serve import Client, export_model
from monolith.serve.repository import ModelRepository
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.model_server import ModelServer
from monolith.serve.watch import VersionWatch


class Sharpened(Clicks):
    """Other operators over the tables and weights of a run."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return 3 * super().forward(batch)


def sharpened(model: Clicks) -> Sharpened:
    other = copy.copy(model)  # with the same tables and weights
    other.__class__ = Sharpened
    assert isinstance(other, Sharpened)
    return other


def test_a_new_program_replaces_the_old_one_while_both_follow(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").start()
    exports, asked, problems, done = tmp_path / "exports", threading.Semaphore(0), [], threading.Event()
    try:
        run.steps(2)
        export_model(run.model, PROBE, exports, heads=HEADS, now=lambda: 1)
        open_version = following(run.folder, None, None, None, None)
        repository = ModelRepository()
        repository.add(open_version("clicks", exports))
        watch = VersionWatch(
            repository,
            exports,
            current=1,
            open_version=lambda path: open_version("clicks", path),
            poll_secs=3600,
        )
        with ModelServer(repository, ServingConfig(http_port=0, grpc_port=0)) as server:

            def ask() -> None:
                with Client(server.http_address) as client:
                    while not done.is_set():
                        try:
                            client.infer(PROBE)
                        except Exception as error:
                            problems.append(repr(error))
                            return
                        asked.release()

            thread = threading.Thread(target=ask)
            thread.start()
            try:
                with Client(server.http_address) as client:

                    def answers(version: int, factor: float) -> bool:
                        run.model.eval()
                        with torch.no_grad():
                            wanted = torch.sigmoid(factor * run.model(PROBE))
                        run.model.train()
                        answer = client.infer(PROBE)
                        found = torch.tensor(answer["click"])
                        return answer.version == version and torch.allclose(found, wanted, atol=1e-6, rtol=0)

                    run.steps(3)
                    until(lambda: answers(1, 1.0), "the old program with the newest rows")
                    export_model(sharpened(run.model), PROBE, exports, heads=HEADS, now=lambda: 2)
                    run.steps(3)  # the export is older than the run when it is opened
                    assert watch.look()
                    until(lambda: answers(2, 3.0), "the new program with the newest rows")
                    run.steps(3)
                    until(lambda: answers(2, 3.0), "rows that were trained after the swap")
                    for _ in range(3):
                        assert asked.acquire(timeout=60)
            finally:
                done.set()
                thread.join()
        watch.close()
        repository.close()
    finally:
        run.finish()
    assert problems == []
