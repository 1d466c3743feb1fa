"""The click model on KServe: Open Inference Protocol over HTTP (JSON and binary) and gRPC."""

from __future__ import annotations

import logging
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from serving_model import ServedModel, ServingJob


class Click(Model):
    def __init__(self, model: ServedModel) -> None:
        super().__init__("click")
        self._model = model
        self.ready = True

    async def predict(self, payload: InferRequest, *unused: Any, **options: Any) -> InferResponse:  # noqa: ANN401
        found = self._model.columns({given.name: given.as_numpy() for given in payload.inputs})
        output = InferOutput(name="click", shape=list(found.shape), datatype="FP32")
        output.set_data_from_numpy(found, binary_data=payload.use_binary_outputs)
        return InferResponse(
            response_id=payload.id or "",
            model_name=self.name,
            infer_outputs=[output],
            use_binary_outputs=payload.use_binary_outputs,
        )


def main() -> None:
    job = ServingJob.of_command_line()
    if job.tuned:
        logging.disable(logging.INFO)
    server = ModelServer(
        http_port=job.http_port, grpc_port=job.grpc_port, workers=1, enable_latency_logging=not job.tuned
    )
    server.start([Click(ServedModel(job.folder))])


if __name__ == "__main__":
    main()
