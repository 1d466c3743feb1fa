"""The click model on LitServe: HTTP with JSON, one worker."""

from __future__ import annotations

from typing import Any

import litserve
from serving_model import ServedModel, ServingJob


class Click(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._model = ServedModel(ServingJob.of_command_line().folder)

    def predict(self, columns: dict[str, Any], **unused: Any) -> list[float]:  # noqa: ANN401
        found: list[float] = self._model.columns(columns).tolist()
        return found

    def encode_response(self, found: list[float], **unused: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"click": found}


if __name__ == "__main__":
    job = ServingJob.of_command_line()
    server = litserve.LitServer(Click(), accelerator="cpu", workers_per_device=1, disable_openapi_url=True)
    server.run(host="127.0.0.1", port=job.http_port, log_level="error", generate_client_file=False, access_log=False)
