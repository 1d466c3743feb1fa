"""The click model on BentoML: HTTP with JSON, one worker. `BENTOML_FOLDER` has the weights: its server imports this module by
name, without a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bentoml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving_model import ServedModel, ServingJob


@bentoml.service(workers=1, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class Click:
    def __init__(self) -> None:
        self._model = ServedModel(Path(os.environ["BENTOML_FOLDER"]))

    @bentoml.api
    async def predict(self, columns: dict[str, Any]) -> dict[str, Any]:
        return {"click": self._model.columns(columns).tolist()}


if __name__ == "__main__":
    job = ServingJob.of_command_line()
    command = [str(Path(sys.executable).parent / "bentoml"), "serve", "serving_bentoml:Click", "--host", "127.0.0.1"]
    sys.exit(
        subprocess.run(
            [*command, "--port", str(job.http_port), "--working-dir", str(Path(__file__).resolve().parent)],
            env={**os.environ, "BENTOML_FOLDER": str(job.folder), "BENTOML_DO_NOT_TRACK": "true"},
            check=False,
        ).returncode
    )
