"""Holds the real table against the oracle, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from monolith import EmbeddingTable, TableConfig
from oracle import DictTable, Floats

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def int64(values: Iterable[int]) -> torch.Tensor:
    """A one-dimensional tensor of ids."""
    return torch.tensor(list(values), dtype=torch.int64)


def float32(values: Any) -> torch.Tensor:  # noqa: ANN401 - whatever NumPy makes an array of
    """A tensor of float32, never sharing memory with `values`."""
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def fid(slot: int, signature: int) -> int:
    """The id with this feature slot in its v2 bits, 48..62."""
    return slot << 48 | signature


def initial_rows(config: TableConfig) -> Callable[[int], Floats]:
    """What a new row of such a table is stored with, asked from a table of its own."""
    source = EmbeddingTable(config)
    known: dict[int, Floats] = {}

    def initial(id_: int) -> Floats:
        if id_ not in known:
            source.reinitialize(int64([id_]))
            known[id_] = source.lookup_entry(int64([id_])).values[0].numpy().copy()
        return known[id_]

    return initial


def pair(config: TableConfig) -> tuple[EmbeddingTable, DictTable]:
    """A fresh table and its model."""
    return EmbeddingTable(config), DictTable(config, initial_rows(config))


def assert_same_rows(
    table: EmbeddingTable,
    oracle: DictTable,
    ids: Iterable[int],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Both hold the same ids with the same stored weights, slots and times, and read the same."""
    wanted = np.array(list(ids), np.int64)
    actual, expected = table.lookup_entry(torch.from_numpy(wanted)), oracle.lookup_entry(wanted)
    assert len(table) == len(oracle)
    assert_equal(actual.ids, expected.ids, "ids")
    assert_equal(actual.found, expected.found, "found")
    assert_equal(actual.times, expected.times, "times")
    assert_close(actual.values, expected.values, "values", rtol, atol)
    assert sorted(actual.slots) == sorted(expected.slots)
    for name, slot in expected.slots.items():
        assert actual.slots[name].numpy().dtype == slot.dtype, name
        assert_close(actual.slots[name], slot, f"slot {name}", rtol, atol)
    # Reading is checked against the table's own weights: a weight a hair off the oracle's may quantise to another code.
    stored = actual.values.numpy()
    read = np.array(
        [oracle.read(row) if found else oracle.unseen(id_) for id_, row, found in _rows(wanted, stored, actual.found)]
    ).reshape(-1, oracle.config.dim)
    assert_close(table.lookup(torch.from_numpy(wanted)), read, "lookup", 2e-6, 1e-9)


def array(values: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - tensors, arrays and lists
    """The values as a NumPy array."""
    return values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def assert_equal(actual: Any, expected: Any, what: str = "") -> None:  # noqa: ANN401 - tensors and arrays
    """Every element is the same."""
    np.testing.assert_array_equal(array(actual), array(expected), err_msg=what)


def assert_close(
    actual: Any,  # noqa: ANN401 - tensors and arrays
    expected: Any,  # noqa: ANN401
    what: str = "",
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Every element is within atol + rtol * |expected|; the shapes agree."""
    actual, expected = array(actual), array(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, err_msg=what)


def snapshot(table: EmbeddingTable) -> dict[str, bytes]:
    """Everything the table holds, in id order, bit for bit: two tables with equal snapshots are the same table."""
    ids = np.sort(np.concatenate([np.empty(0, np.int64), *(batch.ids.numpy() for batch in table.iter_batches())]))
    entries = table.lookup_entry(torch.from_numpy(ids))
    columns = {"ids": entries.ids, "values": entries.values, "times": entries.times, **entries.slots}
    columns["lookup"] = table.lookup(torch.from_numpy(ids))
    return {name: column.numpy().tobytes() for name, column in columns.items()}


def _rows(ids: npt.NDArray[np.int64], stored: Floats, found: torch.Tensor) -> Iterable[tuple[int, Floats, bool]]:
    return zip(ids.tolist(), stored, found.tolist(), strict=True)
