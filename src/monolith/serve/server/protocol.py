"""Requests and responses of the Open Inference Protocol v2 over HTTP: JSON, and JSON with binary tensor data after it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch

from monolith._core import InferRequestReader
from monolith.config import nearest_name
from monolith.errors import InvalidArgumentError, MessageTooLargeError, ProtocolError
from monolith.features.batch import IdMatrix
from monolith.serve.server.tensors import (
    MatrixInputs,
    WireTensor,
    from_elements,
    from_raw,
    ids_of_lists,
    inputs_of_ids,
    to_raw,
    torch_datatype,
)

__all__ = [
    "BINARY_HEADER",
    "InferRequest",
    "InferResponse",
    "PARAMETERS",
    "checked_id",
    "checked_parameters",
    "decode_infer",
    "encode_infer",
    "parse_json",
    "to_json",
]

BINARY_HEADER = "inference-header-content-length"
"""The HTTP header with the length of the JSON part. Binary data follows it."""
_MAX_TENSORS = 4096
PARAMETERS = {
    "binary_data_output": bool,
    "output": str,
    "route_key": str,
    "timeout": int,
    "top_k": int,
}
"""The parameters of a request that mean something here, and their types. Others are ignored unless they look misspelt."""


@dataclass(slots=True)
class InferRequest:
    """A request for predictions, of any protocol."""

    id: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    inputs: Mapping[str, WireTensor] = field(default_factory=dict)
    outputs: Mapping[str, bool] = field(default_factory=dict)
    """The outputs that are wanted, all if empty, and whether each is to be binary."""

    @property
    def binary_output(self) -> bool:
        """Whether outputs are binary that do not say otherwise."""
        return self.parameters.get("binary_data_output") is True


@dataclass(slots=True)
class InferResponse:
    """The answer to a request, for any protocol."""

    model: str
    version: str
    id: str
    parameters: Mapping[str, int | float | str]
    outputs: Mapping[str, torch.Tensor]


class _UsualReader(threading.local):
    """Reads usual requests in the core. Each thread has its own, because what is found stays in its memory."""

    def __init__(self) -> None:
        self.core = InferRequestReader()


usual_reader = _UsualReader()


def usual_request(
    names: tuple[str, ...], ids: bytearray, rows: int, request_id: str, parameters: Mapping[str, object]
) -> InferRequest:
    """Return the request that the core has found: columns of one id per row."""
    matrix = torch.frombuffer(ids, dtype=torch.int64).view(len(names), rows)
    return InferRequest(request_id, parameters, MatrixInputs(IdMatrix(names, matrix)), {})


def parse_json(data: bytes | memoryview, limit: int) -> dict[str, Any]:
    """Return the object in `data`.

    Raises:
        MessageTooLargeError: it has more than `limit` bytes.
        ProtocolError: it is not JSON, too deeply nested, or not an object.

    Example:
        >>> parse_json(b'{"id": "7"}', 1000)
        {'id': '7'}
    """
    if len(data) > limit:
        raise MessageTooLargeError(
            f"JSON: expected at most {limit:,} bytes, got {len(data):,}; send tensors as binary data"
        )
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ProtocolError(f"JSON: expected an object, got {type(tree).__name__}")
    return tree


def to_json(tree: Mapping[str, object] | Sequence[object]) -> bytes:
    """Return `tree` as JSON. NumPy arrays become lists, numbers that are not finite null.

    Example:
        >>> to_json({"live": True})
        b'{"live":true}'
    """
    return orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_infer(body: bytes, json_bytes: str | None, *, max_json_bytes: int) -> InferRequest:
    """Return the request in the body of an HTTP request.

    Args:
        body: JSON, or JSON and then binary data.
        json_bytes: Value of the header that gives the length of the JSON part. None: all of it is JSON.
        max_json_bytes: A longer JSON part is refused.

    Raises:
        InvalidArgumentError: an input has other bytes or elements than its datatype and shape say.
        ProtocolError: the request as a whole cannot be read.
    """
    if json_bytes is None:
        usual = usual_reader.core.json(body) if len(body) <= max_json_bytes else None
        if usual is not None:
            return usual_request(*usual)
        # NumPy would take a boolean among numbers for one, so such requests are read input by input.
        packs = b"true" not in body and b"false" not in body
        return _request(parse_json(body, max_json_bytes), bytearray(), packs=packs)
    length = int(json_bytes) if json_bytes.isdecimal() and len(json_bytes) < 12 else -1
    if not 0 <= length <= len(body):
        raise ProtocolError(
            f"{BINARY_HEADER}: expected a number up to {len(body)}, the length of the body, got {json_bytes!r:.40}"
        )
    usual = usual_reader.core.binary(body, length) if length <= max_json_bytes else None
    if usual is not None:
        return usual_request(*usual)
    view = memoryview(body)
    # A copy at an address that is a multiple of 8, whatever the length of the JSON: tensors share its memory.
    return _request(parse_json(view[:length], max_json_bytes), bytearray(view[length:]))


def _request(tree: Mapping[str, Any], data: bytearray, *, packs: bool = False) -> InferRequest:
    entries = _named(tree, "inputs")
    packed, at = _packed_ids(entries, data) if data or packs else ({}, 0)
    if len({name for name, _ in entries}) < len(entries):
        name, _ = next(entry for number, entry in enumerate(entries) if entry[0] in dict(entries[:number]))
        raise ProtocolError(f"inputs[{name!r}]: is given twice")
    inputs: dict[str, WireTensor] = {} if len(packed) == len(entries) else dict(packed)
    for name, entry in entries:
        if name in packed:
            continue
        size = _parameters(entry, "inputs").get("binary_data_size") if "parameters" in entry else None
        if size is None:
            inputs[name] = from_elements(name, entry.get("datatype"), entry.get("shape"), entry.get("data"))
            continue
        if type(size) is not int or not 0 <= size <= len(data) - at:
            raise InvalidArgumentError(
                f"inputs[{name!r}].binary_data_size: expected up to {len(data) - at:,}, the bytes that are left, got {size!r:.40}"
            )
        inputs[name] = from_raw(name, entry.get("datatype"), entry.get("shape"), data, at, size)
        at += size
    if at != len(data):
        raise ProtocolError(f"body: {len(data) - at:,} bytes are left after the binary data of all inputs")
    parameters = checked_parameters(_parameters(tree, ""))
    binary = parameters.get("binary_data_output") is True
    outputs: dict[str, bool] = {}
    for name, entry in _named(tree, "outputs"):
        wanted = _parameters(entry, "outputs").get("binary_data", binary)
        outputs[name] = wanted is True
    return InferRequest(checked_id(tree.get("id", "")), parameters, inputs or packed, outputs)


def _packed_ids(
    entries: Sequence[tuple[str, Mapping[str, Any]]], data: bytearray
) -> tuple[Mapping[str, WireTensor], int]:
    """Read most inputs of most requests at once: those of INT64 [n], in JSON or at the beginning of `data`.

    Returns them by name, and how many bytes of `data` they take. Whatever is unusual about an input is left to others, who also
    say what is wrong with it.
    """
    names: list[str] = []
    lists: list[list[Any]] = []
    sizes: list[int] = []
    for name, entry in entries:
        shape: Any = entry.get("shape")
        if entry.get("datatype") != "INT64" or type(shape) is not list or len(shape) != 1 or type(shape[0]) is not int:
            is_plain = False
        elif data:
            is_plain = shape[0] >= 0 and entry.get("parameters") == {"binary_data_size": 8 * shape[0]}
        else:
            elements: Any = entry.get("data")
            is_plain = type(elements) is list and len(elements) == shape[0] and "parameters" not in entry
            if is_plain:
                lists.append(elements)
        if is_plain:
            names.append(name)
            sizes.append(shape[0])
        elif data:
            break
    size = 8 * sum(sizes) if data else 0
    if len(names) < 2 or size > len(data) or (data and not size):
        return {}, 0
    ids = torch.frombuffer(data, dtype=torch.int64, count=size // 8) if data else ids_of_lists(lists)
    return ({}, 0) if ids is None else (inputs_of_ids(names, ids, sizes), size)


def _named(tree: Mapping[str, Any], kind: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
    entries = tree.get(kind) or []
    if not isinstance(entries, list) or len(entries) > _MAX_TENSORS:
        raise ProtocolError(f"{kind}: expected a list of at most {_MAX_TENSORS} tensors")
    found = []
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if type(name) is not str:
            raise ProtocolError(f"{kind}: expected objects with a name, got {entry!r:.80}")
        found.append((name, entry))
    return found


def _parameters(entry: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        where = f"{kind}[{entry['name']!r}]" if kind else "request"
        raise ProtocolError(f"{where}.parameters: expected an object, got {type(parameters).__name__}")
    if "shared_memory_region" in parameters:
        raise ProtocolError(f"{kind}: this server has no shared memory; send the tensor in the request")
    return parameters


def checked_id(value: object) -> str:
    """Return the id of a request."""
    if not isinstance(value, str) or len(value) > 1024:
        raise ProtocolError(f"id: expected a string of at most 1,024 characters, got {value!r:.80}")
    return value


def checked_parameters(parameters: Mapping[str, object]) -> Mapping[str, object]:
    """Return the parameters of a request, after a check of those that mean something here."""
    for name, value in parameters.items():
        kind = PARAMETERS.get(name)
        if kind is None:
            near = nearest_name(name, PARAMETERS)
            if near is not None:
                raise InvalidArgumentError(f"parameters[{name!r}]: is not known; did you mean {near!r}?")
        elif type(value) is not kind:
            raise InvalidArgumentError(f"parameters[{name!r}]: expected {kind.__name__}, got {value!r:.80}")
    return parameters


def encode_infer(response: InferResponse, request: InferRequest) -> tuple[bytes, int | None]:
    """Return the body of the HTTP response, and the length of its JSON part if binary data follows."""
    outputs: list[dict[str, object]] = []
    parts: list[bytes] = []
    for name, tensor in response.outputs.items():
        entry: dict[str, object] = {"name": name, "datatype": torch_datatype(tensor.dtype), "shape": list(tensor.shape)}
        if request.outputs.get(name, request.binary_output):
            raw = to_raw(tensor)
            parts.append(raw)
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            half = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
            entry["data"] = (tensor.float() if half else tensor).contiguous().numpy().reshape(-1)
        outputs.append(entry)
    tree: dict[str, object] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        tree["id"] = response.id
    tree["parameters"] = response.parameters
    tree["outputs"] = outputs
    head = to_json(tree)
    return (b"".join((head, *parts)), len(head)) if parts else (head, None)
