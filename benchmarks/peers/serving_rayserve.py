"""The click model on Ray Serve: HTTP with JSON, one replica."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray import serve
from serving_model import ServedModel, ServingJob
from starlette.requests import Request

job = ServingJob.of_command_line()


@serve.deployment(num_replicas=1, max_ongoing_requests=64, logging_config={"enable_access_log": False})
class Click:
    def __init__(self, folder: str) -> None:
        from pathlib import Path

        self._model = ServedModel(Path(folder))

    async def __call__(self, request: Request) -> dict[str, Any]:
        return {"click": self._model.columns(await request.json()).tolist()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": job.http_port})
    serve.run(Click.bind(str(job.folder)), name="click", route_prefix="/predict")
    while True:
        time.sleep(3600)
