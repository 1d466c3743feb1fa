"""`GrpcListener`: the Open Inference Protocol v2 over gRPC."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from google.protobuf.message import Message

from monolith.errors import AuthenticationError, InvalidArgumentError, ProtocolError, StorageError
from monolith.optional_packages import import_extra
from monolith.proto import open_inference_pb2 as messages
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.failures import failure_of
from monolith.serve.server.handler import Handler, PendingAnswer
from monolith.serve.server.limits import deadline_of
from monolith.serve.server.protocol import (
    InferRequest,
    InferResponse,
    checked_id,
    checked_parameters,
    usual_reader,
    usual_request,
)
from monolith.serve.server.tensors import WireTensor, from_elements, from_raw, inputs_of_ids, to_raw, torch_datatype
from monolith.transport.server import read_pem
from monolith.transport.tokens import reveal

if TYPE_CHECKING:
    import grpc

__all__ = [
    "CONTENTS",
    "GrpcListener",
    "SERVICE",
    "UsualMessage",
    "decode_message",
    "encode_message",
    "read_infer_message",
]

SERVICE = "inference.GRPCInferenceService"
"""The name of the service."""
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
_PUBLIC = {"ServerLive", "ServerReady"}


@dataclass(slots=True)
class UsualMessage:
    """What the core has read in a `ModelInferRequest`: columns of one id per row."""

    model_name: str
    model_version: str
    raw: bool
    request: InferRequest


def read_infer_message(data: bytes) -> UsualMessage | messages.ModelInferRequest:
    """Return the message in `data`, which grpcio refuses if this raises."""
    found = usual_reader.core.message(data)
    if found is None:
        return messages.ModelInferRequest.FromString(data)
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


class _Service:
    """The methods of the service. Each is called in a thread of the pool."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        token = reveal(handler.config.token)
        self._authorization = None if token is None else f"Bearer {token}".encode()

    def answer(self, method: str, message: Any, context: grpc.ServicerContext) -> Message:  # noqa: ANN401
        """Answer one call. Every error becomes a status."""
        try:
            if self._authorization is not None and method not in _PUBLIC:
                self._check_token(context)
            if method == "ModelInfer":
                return self._infer(message, context)
            answer: Message = getattr(self, f"_{method}")(message)
            return answer
        except Exception as error:
            grpc = _grpc()
            failure = failure_of(error)
            context.abort(getattr(grpc.StatusCode, failure.grpc), failure.message)
            raise AssertionError("abort raises") from error

    def _check_token(self, context: grpc.ServicerContext) -> None:
        given = dict(context.invocation_metadata()).get("authorization", "")
        given = given.encode() if isinstance(given, str) else given
        assert self._authorization is not None
        if not hmac.compare_digest(given, self._authorization):
            raise AuthenticationError("authorization: expected the token of this server, as in 'Bearer TOKEN'")

    def _infer(self, message: UsualMessage | messages.ModelInferRequest, context: grpc.ServicerContext) -> Message:
        handler, arrived = self._handler, time.monotonic()
        exchange = PendingAnswer("grpc", arrived, message.model_name)
        try:
            handler.admission.admit()
            try:
                return self._admitted(exchange, message, context.time_remaining())
            finally:
                handler.admission.leave()
        except Exception as error:
            handler.failure(exchange, error)
            raise
        finally:
            handler.observe(exchange)

    def _admitted(
        self, exchange: PendingAnswer, message: UsualMessage | messages.ModelInferRequest, remaining: float | None
    ) -> messages.ModelInferResponse:
        handler = self._handler
        limit = min(handler.config.deadline_secs, handler.config.deadline_secs if remaining is None else remaining)
        if not handler.batches:  # otherwise all requests that are predicted together take one turn
            handler.admission.start(exchange.arrived + limit)
        try:
            if isinstance(message, UsualMessage):
                request, raw = message.request, message.raw
            else:
                request, raw = decode_message(message), bool(message.raw_input_contents)
            deadline = deadline_of(exchange.arrived, limit, request.parameters.get("timeout"))
            response = handler.infer(exchange, request, message.model_version, deadline)
            return encode_message(response, raw=raw or request.binary_output)
        finally:
            if not handler.batches:
                handler.admission.finish()

    def _ServerLive(self, message: Message) -> Message:  # noqa: N802 - the protocol's name
        return messages.ServerLiveResponse(live=True)

    def _ServerReady(self, message: Message) -> Message:  # noqa: N802
        return messages.ServerReadyResponse(ready=self._handler.ready)

    def _ModelReady(self, message: messages.ModelReadyRequest) -> Message:  # noqa: N802
        return messages.ModelReadyResponse(ready=self._handler.model_ready(message.name, message.version))

    def _ServerMetadata(self, message: Message) -> Message:  # noqa: N802
        return messages.ServerMetadataResponse(**self._handler.server_metadata())  # type: ignore[arg-type]

    def _ModelMetadata(self, message: messages.ModelMetadataRequest) -> Message:  # noqa: N802
        found = self._handler.model_metadata(message.name, message.version)
        return messages.ModelMetadataResponse(**found)  # type: ignore[arg-type]

    def _RepositoryIndex(self, message: messages.RepositoryIndexRequest) -> Message:  # noqa: N802
        return messages.RepositoryIndexResponse(models=self._handler.repository_index())


_METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryIndex",
)


def _grpc() -> Any:  # noqa: ANN401 - a module
    return import_extra("grpc", extra="serve", purpose="serving over gRPC")


def _methods(service: _Service) -> grpc.GenericRpcHandler:
    def behaviour(method: str) -> Callable[[Any, grpc.ServicerContext], Message]:
        return lambda message, context: service.answer(method, message, context)

    grpc = _grpc()
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            method: grpc.unary_unary_rpc_method_handler(
                behaviour(method),
                request_deserializer=(
                    read_infer_message if method == "ModelInfer" else getattr(messages, f"{method}Request").FromString
                ),
                response_serializer=lambda message: message.SerializeToString(),
            )
            for method in _METHODS
        },
    )


class GrpcListener:
    """Serves a handler over gRPC until `close`. It has started when the constructor returns."""

    def __init__(self, handler: Handler, config: ServingConfig) -> None:
        grpc = _grpc()
        assert config.grpc_port is not None
        capacity = config.max_concurrency + config.max_queue
        self._pool = ThreadPoolExecutor(
            # One for each prediction: more threads only take the interpreter from each other, which doubled the time of a call.
            min(64, capacity) if handler.batches else config.max_concurrency,
            thread_name_prefix="monolith-grpc",
        )
        self._server = grpc.server(
            self._pool,
            handlers=(_methods(_Service(handler)),),
            # Calls that wait for a thread of the pool count too, and have not been admitted yet.
            maximum_concurrent_rpcs=capacity + 8,
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if config.tls_cert is None or config.tls_key is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                pair = (read_pem(config.tls_key, "tls_key", is_secret=True), read_pem(config.tls_cert, "tls_cert"))
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise StorageError(f"grpc_port: cannot listen on {address}: {error}") from None
        self._server.start()

    def close(self, grace: float) -> bool:
        """Refuse new calls and finish those that run. Returns whether all ended within `grace` seconds."""
        ended: bool = self._server.stop(grace).wait(grace + 5)
        self._pool.shutdown(wait=True)
        return ended
