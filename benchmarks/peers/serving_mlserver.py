"""The click model on MLServer: Open Inference Protocol over HTTP (JSON) and gRPC.

By default it predicts in another process. Tuned, it predicts in its own, which is faster, without metrics and log.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving_model import ServedModel, ServingJob


class Click(MLModel):
    async def load(self) -> bool:
        parameters = self.settings.parameters
        assert parameters is not None
        assert parameters.uri is not None
        self._model = ServedModel(Path(parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        found = self._model.columns({given.name: NumpyCodec.decode_input(given) for given in payload.inputs})
        output = NumpyCodec.encode_output("click", found)
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[output])


async def main() -> None:
    job = ServingJob.of_command_line()
    quiet = {"logging_settings": {"version": 1, "disable_existing_loggers": True}, "metrics_endpoint": None}
    settings = Settings(
        host="127.0.0.1",
        http_port=job.http_port,
        grpc_port=job.grpc_port,
        metrics_port=job.http_port + 1,
        metrics_dir=tempfile.mkdtemp(),
        parallel_workers=0 if job.tuned else 1,
        **(quiet if job.tuned else {}),
    )
    parameters = ModelParameters(uri=str(job.folder))
    # By its name: its other processes import it.
    await MLServer(settings).start(
        [ModelSettings(name="click", implementation="serving_mlserver.Click", parameters=parameters)]
    )


if __name__ == "__main__":
    asyncio.run(main())
