"""Messages of `SumModel` over gRPC, shared by the tests of the server."""

from __future__ import annotations

import torch

from monolith.proto import open_inference_pb2 as messages

__all__ = ["INFER", "infer_message", "predictions"]

INFER = "/inference.GRPCInferenceService/ModelInfer"


def infer_message(*values: float, model: str = "sums", request_id: str = "") -> bytes:
    """A request whose answer is twice the values."""
    message = messages.ModelInferRequest(model_name=model, id=request_id)
    for name in ("a", "b"):
        message.inputs.add(name=name, datatype="FP32", shape=[len(values)])
        message.raw_input_contents.append(torch.tensor(values).numpy().tobytes())
    return message.SerializeToString()


def predictions(answer: bytes) -> list[float]:
    """The predictions in an answer."""
    (raw,) = messages.ModelInferResponse.FromString(answer).raw_output_contents
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist()  # type: ignore[no-any-return]
