"""The calls of a parameter server by number."""

from __future__ import annotations

from monolith.follow.calls import FollowCall
from monolith.transport.calls import CallNumber

__all__ = ["AUTHORITATIVE", "CHANGES", "Call", "READ_IN_PLACE"]


class Call(CallNumber):
    """The calls of a parameter server. A number never changes its meaning.

    64..79 are reserved for the log, 80..95 for saving and moving buckets, 96..111 for coordination.
    """

    JOIN = 2
    DECLARE_TABLES = 3
    CONFIGS = 4
    POSITIONS = 5
    LOOKUP = 16
    APPLY_GRADIENTS = 17
    ASSIGN = 18
    ASSIGN_ADD = 19
    REINITIALIZE = 20
    EVICT = 21
    STATS = 22
    READ_ROWS = 23
    READ_ENTRIES = 24
    COUNT_SLOTS = 25
    ERASE = 26
    DECLARE_DENSE = 32
    READ_DENSE = 33
    APPLY_DENSE = 34
    ASSIGN_DENSE = 35
    READ_DENSE_SETTINGS = 36
    LOAD_DENSE = 37
    IS_INITIALISED = 48
    MARK_INITIALISED = 49
    MEASURE = 50
    LOG_STATE = 64
    FLUSH = 65
    READ_LOG = 66
    SAVE = 80
    SAVED = 81
    RESTORE = 82
    COMMIT_RESTORE = 83
    OWN_BUCKETS = 84
    BUCKETS = 85
    MOVE_BUCKETS = 86
    INSTALL_BUCKETS = 87
    TAKE_BACK = 88
    REFUSE_TRANSFER = 89
    GREET = 96
    MEMBERS = 97
    PLACE_BARRIER = 99
    REMOVE_BARRIER = 100
    HOLD = 101
    READ_KEYS = 102
    SET_KEY = 103
    COUNT_FROM = 104
    GLOBAL_STEP = 105
    END_RUN = 106

    @property
    def changes_state(self) -> bool:
        """Whether the call changes what the server holds."""
        return self in CHANGES


CHANGES: frozenset[int] = frozenset(
    {
        Call.JOIN,
        Call.DECLARE_TABLES,
        Call.APPLY_GRADIENTS,
        Call.ASSIGN,
        Call.ASSIGN_ADD,
        Call.REINITIALIZE,
        Call.EVICT,
        Call.ERASE,
        Call.DECLARE_DENSE,
        Call.APPLY_DENSE,
        Call.ASSIGN_DENSE,
        Call.LOAD_DENSE,
        Call.MARK_INITIALISED,
        Call.COUNT_FROM,
        Call.OWN_BUCKETS,
        Call.MOVE_BUCKETS,
        Call.INSTALL_BUCKETS,
        Call.TAKE_BACK,
        Call.REFUSE_TRANSFER,
    }
)
"""Calls that change what a server holds. Only the owner of the server's folder acknowledges them, and a server that must not lose
anything does so after a durable commit."""

AUTHORITATIVE: frozenset[int] = frozenset(
    {
        Call.BUCKETS,
        Call.GREET,
        Call.MEMBERS,
        Call.PLACE_BARRIER,
        Call.REMOVE_BARRIER,
        Call.HOLD,
        Call.READ_KEYS,
        Call.SET_KEY,
        Call.GLOBAL_STEP,
        Call.END_RUN,
        *FollowCall,
    }
)
"""Calls that change no rows, and that a process which no longer owns the folder of its server must not answer."""

READ_IN_PLACE: frozenset[int] = frozenset({Call.APPLY_GRADIENTS})
"""Calls whose floats are neither checked nor kept. They are read from shared memory that the client can still write to."""
