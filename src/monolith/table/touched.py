"""Sets that remember which ids were written: the bounded `TouchedKeySet` and the lossless `ChangedIdSet`."""

from __future__ import annotations

import torch

from monolith import _core
from monolith.table.arrays import Ids, id_array

__all__ = [
    "ChangedIdSet",
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
    """Ids written since the last `steal`, at most `capacity` + 1 of them; thread safe.

    When an id arrives and the set holds more than `capacity` ids, the whole set is cleared first: information is lost
    by design, as back-pressure, and `insert` says how much. `ChangedIdSet` is the set that never does this.

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
        """Add int64 ids of any shape in row-major order; return how many ids were dropped."""
        return self.core.insert(id_array(ids).reshape(-1))

    def steal(self) -> torch.Tensor:
        """All ids, int64 [n] in no particular order; the set is empty afterwards."""
        return torch.from_numpy(self.core.steal())

    @property
    def nbytes(self) -> int:
        """Memory held now; next to nothing before the first insert."""
        return self.core.nbytes

    def __len__(self) -> int:
        return len(self.core)

    def __repr__(self) -> str:
        return (
            f"TouchedKeySet(capacity={self.capacity}, concurrency_level={self.concurrency_level}, "
            f"name={self.name!r}, size={len(self)})"
        )


def create_touched_key_set(capacity: int, concurrency_level: int, name_suffix: str = "") -> TouchedKeySet:
    """A new `TouchedKeySet` named "MonolithTouchedKeySet" + `name_suffix`; sets are never shared by name.

    Example:
        >>> create_touched_key_set(1000, 1, "_user")
        TouchedKeySet(capacity=1000, concurrency_level=1, name='MonolithTouchedKeySet_user', size=0)
    """
    return TouchedKeySet(capacity, concurrency_level, name_suffix)


class ChangedIdSet:
    """Ids changed and not yet durable; an id leaves only by `steal` and then `commit`. Thread safe.

    `steal` puts the waiting ids into flight. When their rows are durable call `commit`; when writing them failed call
    `rollback`, and they wait again. Ids inserted while a flight is under way wait for the next steal.

    Example:
        >>> changed = ChangedIdSet()
        >>> changed.insert([1, 2])
        >>> sorted(changed.steal().tolist())
        [1, 2]
        >>> changed.insert([2, 3])
        >>> changed.rollback()
        >>> sorted(changed.steal().tolist())
        [1, 2, 3]
        >>> changed.commit()
        >>> len(changed), changed.in_flight
        (0, 0)
    """

    def __init__(self) -> None:
        self.core = _core.ChangedIdSet()

    def insert(self, ids: Ids) -> None:
        """Add int64 ids of any shape."""
        self.core.insert(id_array(ids).reshape(-1))

    def steal(self) -> torch.Tensor:
        """Put every waiting id into flight and return them, int64 [n]; refused while a flight is under way."""
        return torch.from_numpy(self.core.steal())

    def commit(self) -> None:
        """The ids in flight are durable: forget them."""
        self.core.commit()

    def rollback(self) -> None:
        """The ids in flight are not durable: let them wait again, merged with newer ones."""
        self.core.rollback()

    @property
    def in_flight(self) -> int:
        """Ids stolen and neither committed nor rolled back."""
        return self.core.in_flight

    @property
    def nbytes(self) -> int:
        """Memory held now, ids in flight included."""
        return self.core.nbytes

    def __len__(self) -> int:
        """Ids waiting for the next steal."""
        return len(self.core)

    def __repr__(self) -> str:
        return f"ChangedIdSet(waiting={len(self)}, in_flight={self.in_flight})"
