"""States that ranks send each other: dense parameters, optimizers, positions in the data. Nothing in them can run code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monolith.ranks.mesh import Arrays, Kind, Mesh
from monolith.state_bytes import State, pack_state, unpack_state

__all__ = ["broadcast_state", "gather_states"]


def broadcast_state(mesh: Mesh, state: State = None, *, source: int = 0, step: int = 0) -> State:
    """Send `state` of rank `source` to all ranks, which call this together. Returns it on each of them.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> run_ranks(2, lambda mesh: broadcast_state(mesh, {"step": 3} if mesh.rank == 0 else None))
        [{'step': 3}, {'step': 3}]
    """
    own = _packed(state) if mesh.rank == source else ()
    found = mesh.exchange(Kind.STATE, [own] * mesh.size, step=step)
    return state if mesh.rank == source else _unpacked(found[source], source)


def gather_states(mesh: Mesh, state: State, *, step: int = 0) -> list[State]:
    """Return the `state` of every rank, by rank. All ranks call this together.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> run_ranks(2, lambda mesh: gather_states(mesh, {"rank": mesh.rank}))[0]
        [{'rank': 0}, {'rank': 1}]
    """
    found = mesh.exchange(Kind.STATE, [_packed(state)] * mesh.size, step=step)
    return [state if rank == mesh.rank else _unpacked(arrays, rank) for rank, arrays in enumerate(found)]


def _packed(state: State) -> Sequence[np.ndarray]:
    packed = pack_state(state)
    return [np.frombuffer(part, dtype=np.uint8) for part in (packed.structure, packed.tensor_bytes())]


def _unpacked(arrays: Arrays, rank: int) -> State:
    structure, tensors = (array.tobytes() for array in arrays)
    return unpack_state(structure, tensors, f"the state of rank {rank}")
