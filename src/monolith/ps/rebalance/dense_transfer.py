"""Dense parameters as a message: values and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.ps.protocol.bucket_messages import Giving, InstallBuckets
from monolith.ps.server.dense_parameters import DenseParameters
from monolith.ps.server.served_tables import require_count
from monolith.state_bytes import State, pack_state, unpack_state

__all__ = ["dense_piece", "packed_dense", "put_dense", "unpacked_dense"]


def dense_piece(sizes: Mapping[str, int], names: Iterable[str], limit: int) -> tuple[str, ...]:
    """The first of `names` that are held, as many as have about `limit` bytes; at least one, if there is one.

    Example:
        >>> dense_piece({"a": 4, "b": 4, "c": 4}, ["b", "c", "d"], 6)
        ('b',)
    """
    held = [name for name in names if name in sizes]
    # Values and, at most, two numbers of optimizer state for each.
    behind = np.cumsum([3 * sizes[name] for name in held])
    return tuple(held[: max(1, int(np.searchsorted(behind, limit, side="right")))])


def packed_dense(
    dense: DenseParameters, giving: Giving, *, giver: int, rebalance: int
) -> tuple[InstallBuckets, list[np.ndarray]]:
    """What the taker of dense parameters is sent: a text and arrays."""
    packed = pack_state(dense.state(giving.dense))
    install = InstallBuckets(
        giver=giver,
        number=giving.number,
        server=giving.server,
        rebalance=rebalance,
        dense=giving.dense,
        positions=giving.positions,
    )
    return install, [np.frombuffer(data, dtype=np.uint8) for data in (packed.structure, packed.tensor_bytes())]


def unpacked_dense(names: Sequence[str], arrays: Sequence[np.ndarray]) -> dict[str, State]:
    """The state of the parameters `names` that came as two arrays of bytes. `InvalidArgumentError` if it is not that."""
    require_count(arrays, 2)
    if any(array.dtype != np.uint8 or array.ndim != 1 for array in arrays):
        raise InvalidArgumentError("dense parameters: expected their structure and tensors as bytes")
    try:
        found = unpack_state(arrays[0].tobytes(), arrays[1].tobytes(), "dense parameters")
    except CorruptFileError as error:
        raise InvalidArgumentError(str(error)) from None
    if not isinstance(found, dict) or set(found) != set(names):
        raise InvalidArgumentError(f"dense parameters: expected the state of {', '.join(names)}")
    return found


def put_dense(dense: DenseParameters, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> None:
    """Train the parameters of a transfer here. On an error nothing has changed."""
    try:
        dense.take_over(unpacked_dense(install.dense, arrays))
    except CorruptFileError as error:
        raise InvalidArgumentError(str(error)) from None
