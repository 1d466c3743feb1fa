"""Danger: a batch that arrives as something else, and a message that makes its reader crash."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monolith.dataservice.protocol import ColumnHead, arrays_of, batch_of
from monolith.errors import InvalidArgumentError, ProtocolError
from monolith.features import Ragged
from monolith.transport.frames import decode, encode

DTYPES = [
    torch.int64,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 0), (0,), (0, 4)])
def test_columns_of_every_dtype_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    dense = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    values = torch.tensor([[1, 0], [2, 1], [0, 3]]).to(dtype)
    splits = [0, 0, 2, 3] if shape[0] else [0]
    batch = {"dense": dense, "ragged": Ragged(values if shape[0] else values[:0], splits)}
    heads, arrays = arrays_of(batch)
    frame = decode(encode(call=120, request=1, text="{}", arrays=arrays))
    back = batch_of(heads, frame.arrays)
    assert list(back) == ["dense", "ragged"]
    assert back["dense"].dtype == back["ragged"].values.dtype == dtype
    assert torch.equal(back["dense"], dense)
    assert back["ragged"].to_lists() == batch["ragged"].to_lists()
    for array in frame.arrays:
        array.flags.writeable = False  # as arrays are that Flight handed over
    batch_of(heads, frame.arrays)["dense"].fill_(1)  # memory of its own, that a model may write to
    assert torch.equal(batch_of(heads, frame.arrays)["dense"], dense)


def test_a_view_of_another_batch_travels_alone() -> None:
    whole = torch.arange(20).reshape(10, 2)
    _, (array,) = arrays_of({"x": whole[::3, 1:]})
    assert array.tolist() == [[1], [7], [13], [19]]


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ({"x": torch.ones(1, dtype=torch.int16)}, r"batch\['x'\]: expected one of int64.*got torch.int16"),
        ({"x": torch.ones(1), "y": torch.ones(2)}, "expected 1 rows"),
        ({"x": torch.tensor(1)}, "expected one number per row as a tensor"),
    ],
)
def test_what_is_no_batch_is_refused_where_it_was_made(batch: dict[str, torch.Tensor], complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        arrays_of(batch)  # type: ignore[arg-type]


INT = {"ragged": False, "dtype": "int64"}
RAGGED = {"ragged": True, "dtype": "int64"}


@pytest.mark.parametrize(
    ("heads", "arrays"),
    [
        ([{"name": "x", **INT}], []),
        ([{"name": "x", **RAGGED}], [np.arange(2)]),
        ([], [np.arange(2)]),
        ([{"name": "x", **INT}], [np.arange(2), np.arange(2)]),
        ([{"name": "x", **INT}] * 2, [np.arange(2), np.arange(2)]),
        ([{"name": "x", **INT}], [np.ones(2, dtype=np.float32)]),
        ([{"name": "x", **INT}], [np.array(3)]),
        ([{"name": "x", **INT}, {"name": "y", **INT}], [np.arange(2), np.arange(3)]),
        ([{"name": "x", **RAGGED}], [np.arange(2), np.array([0, 3])]),
        ([{"name": "x", **RAGGED}], [np.arange(2), np.array([0, 2**62])]),
        ([{"name": "x", **RAGGED}], [np.arange(2), np.array([0, -1, 2])]),
        ([{"name": "x", **RAGGED}], [np.arange(2), np.array([], dtype=np.int64)]),
        ([{"name": "x", **RAGGED}], [np.arange(2), np.ones(2, dtype=np.float64)]),
        ([{"name": "x", **RAGGED}], [np.array(2), np.array([0, 1])]),
    ],
)
def test_arrays_that_do_not_fit_their_columns_are_a_protocol_error(
    heads: list[dict[str, object]], arrays: list[np.ndarray]
) -> None:
    with pytest.raises(ProtocolError, match="batch"):
        batch_of([ColumnHead(**head) for head in heads], arrays)
