"""`TouchedKeySet`: a bounded set of the ids written since it was last read."""

from __future__ import annotations

import torch

from monolith import _core
from monolith.table.arrays import Ids, id_array

__all__ = [
    "TOUCHED_KEY_SET_CAPACITY",
    "TOUCHED_KEY_SET_CONCURRENCY_LEVEL",
    "TouchedKeySet",
    "create_touched_key_set",
]

TOUCHED_KEY_SET_CAPACITY = 64 * 1024 * 1024 // (8 * 4)
"""Default `capacity` of a `TouchedKeySet`, ids."""
TOUCHED_KEY_SET_CONCURRENCY_LEVEL = 1024
"""Default `concurrency_level` of a `TouchedKeySet`, lock stripes."""


class TouchedKeySet:
    """Ids written since the last `steal`, at most `capacity` + 1 of them. Thread-safe.

    When an id arrives and the set holds more than `capacity` ids, the whole set is cleared first: information is lost
    by design, as back-pressure, and `insert` says how much. What never forgets is `EmbeddingTable.track_changes`.

    Example:
        >>> touched = TouchedKeySet(capacity=1000, concurrency_level=4)
        >>> touched.insert(range(1005))
        1001
        >>> sorted(touched.steal().tolist())
        [1001, 1002, 1003, 1004]
        >>> len(touched)
        0
    """

    def __init__(
        self,
        capacity: int = TOUCHED_KEY_SET_CAPACITY,
        concurrency_level: int = TOUCHED_KEY_SET_CONCURRENCY_LEVEL,
        name_suffix: str = "",
    ) -> None:
        self.name = "MonolithTouchedKeySet" + name_suffix
        self.capacity = capacity
        self.concurrency_level = concurrency_level
        self.core = _core.TouchedKeySet(capacity, concurrency_level)

    def insert(self, ids: Ids) -> int:
        """Add int64 ids of any shape in row-major order. Returns the number of ids that were dropped."""
        return self.core.insert(id_array(ids).reshape(-1))

    def steal(self) -> torch.Tensor:
        """Return all ids, int64 [n] in no particular order, and empty the set."""
        return torch.from_numpy(self.core.steal())

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, almost none before the first insert."""
        return self.core.nbytes

    def __len__(self) -> int:
        return len(self.core)

    def __repr__(self) -> str:
        return (
            f"TouchedKeySet(capacity={self.capacity}, concurrency_level={self.concurrency_level}, "
            f"name={self.name!r}, size={len(self)})"
        )


def create_touched_key_set(capacity: int, concurrency_level: int, name_suffix: str = "") -> TouchedKeySet:
    """Return a new `TouchedKeySet` named "MonolithTouchedKeySet" + `name_suffix`. Sets are never shared by name.

    Example:
        >>> create_touched_key_set(1000, 1, "_user")
        TouchedKeySet(capacity=1000, concurrency_level=1, name='MonolithTouchedKeySet_user', size=0)
    """
    return TouchedKeySet(capacity, concurrency_level, name_suffix)
