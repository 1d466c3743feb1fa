"""From the tensors of a request to the columns of a model: ids, ragged ids, dense columns, and the original's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from monolith.config import nearest_name
from monolith.data.sources.records import parse_records
from monolith.data.sources.source import Column
from monolith.errors import CorruptFileError, InvalidArgumentError, SchemaError
from monolith.features import Ragged
from monolith.features.batch import Batch, BatchColumn
from monolith.serve.manifest import InputSpec, Signature
from monolith.serve.server.tensors import MatrixInputs, WireTensor, torch_datatype

__all__ = ["ColumnReader", "MESSAGES", "SPLITS"]

MESSAGES: dict[str, Literal["instance", "example", "example_batch"]] = {
    "instances": "instance",
    "examples": "example",
    "example_batch": "example_batch",
}
"""Inputs of serialized messages, as the original's servers take them, and the message of each."""
SPLITS = ".splits"
"""What follows the name of an input to name the row splits of its values."""
_TEXT_IDS = "monolith.features.hash_strings, or its formula in docs/formats.md, Ids of features, in any language"
_RECORD_TYPES: dict[str, Literal["int64", "float32", "float64"]] = {
    "int64": "int64",
    "float32": "float32",
    "float64": "float64",
}


class ColumnReader:
    """Reads the columns that a model needs from the inputs of requests. Others are ignored."""

    def __init__(self, signature: Signature, *, max_rows: int) -> None:
        self._specs = {spec.name: (spec, getattr(torch, spec.dtype)) for spec in signature.inputs}
        self._names = signature.columns
        # If there are dense columns, or the original's messages could be meant, inputs are looked at one by one.
        self._matrix_names = None if self._specs else tuple(self._names)
        ids = [(name, name + SPLITS, torch.int64, None) for name in self._names if name not in self._specs]
        dense = [(name, name + SPLITS, dtype, spec.shape) for name, (spec, dtype) in self._specs.items()]
        self._plain: list[tuple[str, str, torch.dtype, tuple[int, ...] | None]] = [*ids, *dense]
        self._messages = {name: kind for name, kind in MESSAGES.items() if name not in self._names}
        self._max_rows = max_rows

    def read(self, inputs: Mapping[str, WireTensor]) -> Mapping[str, BatchColumn]:
        """Return the columns.

        Raises:
            InvalidArgumentError: an input is missing or does not fit its column.
        """
        if isinstance(inputs, MatrixInputs):
            matrix = inputs.matrix
            if matrix.names == self._matrix_names and matrix.rows <= self._max_rows:
                return matrix
        if not inputs.keys().isdisjoint(self._messages):
            name = next(name for name in self._messages if name in inputs)
            return self._parsed(name, self._messages[name], inputs)
        columns: Batch = {}
        for name, splits, dtype, shape in self._plain:
            given = inputs.get(name)
            # Most columns in a fraction of the time. All others are read, or refused, by `_column`.
            if (
                given is not None
                and given.data.__class__ is torch.Tensor
                and given.data.dtype is dtype
                and (shape is None or given.shape[1:] == shape)
                and given.shape[0] <= self._max_rows
                and splits not in inputs
            ):
                columns[name] = given.data
            else:
                columns[name] = self._column(name, inputs)
        return columns

    def _column(self, name: str, inputs: Mapping[str, WireTensor]) -> BatchColumn:
        given = inputs.get(name)
        if given is None:
            raise InvalidArgumentError(
                f"inputs[{name!r}]: expected {self._wanted(name)}, but it is missing; {self._sent(name, inputs)}"
            )
        if isinstance(given.data, list):
            hint = f"; convert texts to ids: {_TEXT_IDS}" if name not in self._specs else ""
            raise InvalidArgumentError(f"inputs[{name!r}]: expected {self._wanted(name)}, got BYTES{hint}")
        spec = self._specs.get(name)
        if spec is not None:
            if name + SPLITS in inputs or given.shape[1:] != spec[0].shape:
                got = f"{_got(given)} and {name + SPLITS!r}" if name + SPLITS in inputs else _got(given)
                raise InvalidArgumentError(f"inputs[{name!r}]: expected {self._wanted(name)}, got {got}")
            return self._rows(name, self._dense(*spec, given.data))
        if given.data.dtype is not torch.int64:
            raise InvalidArgumentError(f"inputs[{name!r}]: expected {self._wanted(name)}, got {_got(given)}")
        splits = inputs.get(name + SPLITS)
        return self._rows(name, given.data) if splits is None else self._ragged(name, given, splits)

    def _sent(self, name: str, inputs: Mapping[str, WireTensor]) -> str:
        # Inputs of other columns are no misspelling of this one.
        spare = [other for other in inputs if other.removesuffix(SPLITS) not in self._names]
        near = nearest_name(name, spare)
        if near:
            return f"you sent {near!r}; call it {name!r}"
        return f"got {', '.join(map(repr, list(inputs)[:20])) or 'no inputs'}"

    def _ragged(self, name: str, given: WireTensor, splits: WireTensor) -> Ragged:
        offsets, values = splits.data, given.data
        if isinstance(offsets, list) or offsets.dtype is not torch.int64 or offsets.ndim != 1 or not len(offsets):
            raise InvalidArgumentError(f"inputs[{name + SPLITS!r}]: expected INT64 [rows + 1], got {_got(splits)}")
        assert isinstance(values, torch.Tensor)
        if values.ndim != 1:
            raise InvalidArgumentError(
                f"inputs[{name!r}]: expected INT64 [n] with {name + SPLITS!r}, got {_got(given)}"
            )
        self._check_rows(name + SPLITS, len(offsets) - 1)
        try:
            return Ragged(values, offsets)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"inputs[{name + SPLITS!r}]: {error}") from None

    def _dense(self, spec: InputSpec, wanted: torch.dtype, data: torch.Tensor) -> torch.Tensor:
        if data.dtype is wanted:
            return data
        if data.dtype.is_floating_point and wanted.is_floating_point:
            return data.to(wanted)
        if data.dtype is torch.int64 and not wanted.is_floating_point and wanted is not torch.bool:
            limits = torch.iinfo(wanted)
            if not data.numel() or (data.min() >= limits.min and data.max() <= limits.max):
                return data.to(wanted)
        raise InvalidArgumentError(
            f"inputs[{spec.name!r}]: expected {self._wanted(spec.name)}, got {torch_datatype(data.dtype)} {list(data.shape)}"
        )

    def _rows(self, name: str, data: torch.Tensor) -> torch.Tensor:
        self._check_rows(name, data.shape[0])
        return data

    def _check_rows(self, name: str, rows: int) -> None:
        if rows > self._max_rows:
            raise InvalidArgumentError(f"inputs[{name!r}]: expected at most {self._max_rows:,} rows, got {rows:,}")

    def _wanted(self, name: str) -> str:
        if name not in self._specs:
            return f"INT64 [rows], [rows, k], or INT64 [n] and {name + SPLITS!r}"
        spec, dtype = self._specs[name]
        return f"{torch_datatype(dtype)} [rows{''.join(f', {size}' for size in spec.shape)}]"

    def _parsed(
        self, name: str, kind: Literal["instance", "example", "example_batch"], inputs: Mapping[str, WireTensor]
    ) -> Batch:
        given = inputs[name]
        if not isinstance(given.data, list):
            raise InvalidArgumentError(f"inputs[{name!r}]: expected BYTES, serialized messages, got {_got(given)}")
        if kind != "example_batch":
            self._check_rows(name, len(given.data))
        columns = [Column(name=column) for column in self._names if column not in self._specs]
        for spec, _ in self._specs.values():
            dtype = _RECORD_TYPES.get(spec.dtype)
            if dtype is None:
                raise InvalidArgumentError(
                    f"inputs[{name!r}]: messages have no {spec.dtype}, as {spec.name!r} needs; send tensors"
                )
            columns.append(Column(name=spec.name, dtype=dtype, shape=spec.shape))
        try:
            batch = parse_records(given.data, columns, format=kind)
        except (CorruptFileError, SchemaError) as error:
            raise InvalidArgumentError(f"inputs[{name!r}]: {error}") from None
        for column in batch.values():
            self._check_rows(name, len(column))
        return batch


def _got(tensor: WireTensor) -> str:
    return f"{tensor.datatype} {list(tensor.shape)}"
