"""Danger: a number that changes between the client and the model because of its datatype or encoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.proto import open_inference_pb2 as messages
from monolith.serve.server.grpc_messages import CONTENTS, decode_message
from monolith.serve.server.tensors import DATATYPES, from_elements, from_raw, join_strings, to_raw

WHOLE = [name for name in DATATYPES if "INT" in name]
FRACTIONS = ["FP16", "FP32", "FP64", "BF16"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("offset", [0, 3])
def test_whole_numbers_keep_their_value(name: str, offset: int) -> None:
    kind = DATATYPES[name]
    limits = np.iinfo(kind.numpy)
    values = [0, 1, int(limits.min), min(int(limits.max), 2**63 - 1)]
    raw = np.array(values, kind.numpy).tobytes()
    data = bytearray(bytes(offset) + raw)
    assert from_raw("x", name, [2, 2], data, offset, len(raw)).data.tolist() == [values[:2], values[2:]]
    assert from_elements("x", name, [4], values).data.tolist() == values
    message = messages.ModelInferRequest()
    tensor = message.inputs.add(name="x", datatype=name, shape=[4])
    getattr(tensor.contents, CONTENTS[name]).extend(values)
    assert decode_message(message).inputs["x"].data.tolist() == values


@pytest.mark.parametrize("name", FRACTIONS)
@pytest.mark.parametrize("offset", [0, 3])
def test_fractions_keep_their_bits(name: str, offset: int) -> None:
    kind = DATATYPES[name].torch
    tensor = torch.tensor([0.5, -1.25, torch.inf, 3.0], dtype=kind)
    raw = to_raw(tensor)
    found = from_raw("x", name, [4], bytearray(bytes(offset) + raw), offset, len(raw)).data
    assert found.dtype is kind
    assert torch.equal(found, tensor)
    assert torch.equal(from_elements("x", name, [2], [0.5, -1.25]).data, tensor[:2])


def test_booleans_and_strings() -> None:
    assert from_raw("x", "BOOL", [3], bytearray(b"\x00\x01\x02"), 0, 3).data.tolist() == [False, True, True]
    assert from_elements("x", "BOOL", [2], [True, False]).data.tolist() == [True, False]
    strings = [b"", b"ab", "ä".encode()]
    raw = join_strings(strings)
    assert from_raw("x", "BYTES", [3], bytearray(raw), 0, len(raw)).data == strings
    assert from_elements("x", "BYTES", [3, 1], [[""], ["ab"], ["ä"]]).data == strings


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "message"),
    [
        ("INT64", [1], bytes(7), "expected 8 bytes for INT64 [1], got 7"),
        ("INT64", [2**39, 2**39], bytes(8), "expected 2,417,851,639,229,258,349,412,352 bytes"),
        (
            "BYTES",
            [2],
            b"\x01\x00\x00\x00a",
            "expected 2 elements of BYTES, each after its length in 4 bytes, got 5 bytes",
        ),
        ("BYTES", [1], b"\xff\xff\xff\xffa", "element 0 of BYTES ends after the 5 bytes there are"),
        ("BYTES", [1], b"\x00\x00\x00\x00a", "1 bytes are left after 1 elements of BYTES"),
        ("BYTES", [2**39], b"\x00\x00\x00\x00", "expected 549,755,813,888 elements of BYTES"),
        ("UINT64", [1], b"\xff" * 8, "ids are below 2**63"),
    ],
)
def test_bytes_that_do_not_fit_are_an_error(datatype: str, shape: list[int], raw: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        from_raw("x", datatype, shape, bytearray(raw), 0, len(raw))
    assert "inputs['x']" in str(error.value)
    assert message in str(error.value)


def test_grpc_contents_must_fit_the_inputs() -> None:
    message = messages.ModelInferRequest()
    message.inputs.add(name="x", datatype="FP16", shape=[1])
    with pytest.raises(InvalidArgumentError, match=r"inputs\['x'\]: 'FP16' has no typed contents"):
        decode_message(message)
    message.raw_input_contents.extend([b"", b""])
    with pytest.raises(ValueError, match="raw_input_contents: expected 1, one for each input, got 2"):
        decode_message(message)
