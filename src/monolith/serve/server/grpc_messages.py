"""Messages of the Open Inference Protocol v2 over gRPC: from bytes to requests for predictions, and from responses to bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError

from monolith.errors import InvalidArgumentError, ProtocolError
from monolith.proto import open_inference_pb2 as messages
from monolith.serve.server.protocol import (
    InferRequest,
    InferResponse,
    checked_id,
    checked_parameters,
    usual_reader,
    usual_request,
)
from monolith.serve.server.tensors import WireTensor, from_elements, from_raw, inputs_of_ids, to_raw, torch_datatype

__all__ = ["CONTENTS", "UsualMessage", "decode_message", "encode_message", "read_infer_message", "stated_model"]

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of typed contents for each datatype that has one."""


@dataclass(slots=True)
class UsualMessage:
    """What the core has read in a `ModelInferRequest`: columns of one id per row."""

    model_name: str
    model_version: str
    raw: bool
    request: InferRequest


def stated_model(data: bytes) -> str:
    """Return the model that a message begins with, as it does if its fields are in their order. Otherwise "".

    Example:
        >>> stated_model(messages.ModelInferRequest(model_name="clicks", id="7").SerializeToString())
        'clicks'
    """
    if len(data) < 2 or data[0] != 0x0A or data[1] > 0x7F:
        return ""
    return data[2 : 2 + data[1]].decode("utf-8", "replace")


def read_infer_message(data: bytes) -> UsualMessage | messages.ModelInferRequest:
    """Return the message in `data`.

    Raises:
        ProtocolError: it is no such message.
    """
    found = usual_reader.core.message(data)
    if found is None:
        try:
            return messages.ModelInferRequest.FromString(data)
        except DecodeError as error:
            raise ProtocolError(f"ModelInferRequest: {error}") from None
    names, ids, rows, request_id, parameters, model, version, raw = found
    return UsualMessage(model, version, raw, usual_request(names, ids, rows, request_id, parameters))


def decode_message(message: messages.ModelInferRequest) -> InferRequest:
    """Return the request in a message.

    Raises:
        InvalidArgumentError: an input has other bytes or elements than its datatype and shape say.
        ProtocolError: the request as a whole cannot be read.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise ProtocolError(f"raw_input_contents: expected {len(message.inputs)}, one for each input, got {len(raw)}")
    packed = _packed_ids(message.inputs, raw)
    inputs: dict[str, WireTensor] = {} if len(packed) == len(message.inputs) else dict(packed)
    for number, given in enumerate(message.inputs[len(packed) :], len(packed)):
        name = given.name
        if name in inputs:
            raise ProtocolError(f"inputs[{name!r}]: is given twice")
        if "shared_memory_region" in given.parameters:
            raise ProtocolError(f"inputs[{name!r}]: this server has no shared memory; send the tensor in the request")
        if raw:
            data = bytearray(raw[number])
            inputs[name] = from_raw(name, given.datatype, list(given.shape), data, 0, len(data))
            continue
        field = CONTENTS.get(given.datatype)
        if field is None:
            raise InvalidArgumentError(
                f"inputs[{name!r}]: {given.datatype!r:.40} has no typed contents; send it in raw_input_contents"
            )
        elements = list(getattr(given.contents, field))
        inputs[name] = from_elements(name, given.datatype, list(given.shape), elements)
    parameters = checked_parameters(_parameters(message.parameters)) if message.parameters else {}
    return InferRequest(
        checked_id(message.id), parameters, inputs or packed, {one.name: True for one in message.outputs}
    )


def _packed_ids(
    given: Sequence[messages.ModelInferRequest.InferInputTensor], raw: Sequence[bytes]
) -> Mapping[str, WireTensor]:
    """Read the inputs of INT64 [n] that a message begins with, in raw contents, at once. Others say what is wrong with one."""
    found: dict[str, int] = {}
    for one, data in zip(given, raw, strict=False):
        shape = one.shape
        is_plain = one.datatype == "INT64" and len(shape) == 1 and 8 * shape[0] == len(data) and not one.parameters
        if not is_plain or one.name in found:
            break
        found[one.name] = shape[0]
    if len(found) < 2 or not any(found.values()):
        return {}
    ids = torch.frombuffer(bytearray().join(raw[: len(found)]), dtype=torch.int64)
    return inputs_of_ids(list(found), ids, list(found.values()))


def _parameters(given: Mapping[str, messages.InferParameter]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(parameter, choice)
    return found


def encode_message(response: InferResponse, *, raw: bool) -> messages.ModelInferResponse:
    """Return the message of a response, with its outputs as raw or as typed contents."""
    message = messages.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    for name, value in response.parameters.items():
        if isinstance(value, int):
            message.parameters[name].int64_param = value
        elif isinstance(value, float):
            message.parameters[name].double_param = value
        else:
            message.parameters[name].string_param = value
    for name, tensor in response.outputs.items():
        datatype = torch_datatype(tensor.dtype)
        output = message.outputs.add(name=name, datatype=datatype, shape=list(tensor.shape))
        if raw or datatype not in CONTENTS:
            message.raw_output_contents.append(to_raw(tensor))
        else:
            getattr(output.contents, CONTENTS[datatype]).extend(tensor.reshape(-1).tolist())
    return message
