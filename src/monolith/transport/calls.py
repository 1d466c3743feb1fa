"""The calls by number: one list for all servers of the project, so that a frame sent to the wrong one is refused."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["AUTHORITATIVE", "CHANGES", "Call", "READ_ONCE"]


class Call(IntEnum):
    """The calls. A number keeps its meaning for ever; 64..79 are kept for the log, 80..95 for saving and
    moving buckets, 96..111 for coordination, 112..127 for the data service."""

    ERROR = 0
    """Only in answers: `{"error": class, "message": text}`."""
    HEALTH = 1
    JOIN = 2
    DECLARE_TABLES = 3
    CONFIGS = 4
    LOOKUP = 16
    APPLY_GRADIENTS = 17
    ASSIGN = 18
    ASSIGN_ADD = 19
    REINITIALIZE = 20
    EVICT = 21
    STATS = 22
    DECLARE_DENSE = 32
    READ_DENSE = 33
    APPLY_DENSE = 34
    ASSIGN_DENSE = 35
    READ_DENSE_SETTINGS = 36
    LOAD_DENSE = 37
    IS_INITIALISED = 48
    MARK_INITIALISED = 49
    MEASURE = 50
    SHUTDOWN = 51
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
    REGISTER_DATASET = 112
    JOIN_JOB = 113
    NEXT_SPLIT = 114
    DESCRIBE_SPLIT = 115
    FIND_WORKER = 116
    DATA_HEARTBEAT = 117
    LEAVE_JOB = 118
    READ_BATCH = 120


CHANGES: frozenset[int] = frozenset(
    {
        Call.JOIN,
        Call.DECLARE_TABLES,
        Call.APPLY_GRADIENTS,
        Call.ASSIGN,
        Call.ASSIGN_ADD,
        Call.REINITIALIZE,
        Call.EVICT,
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
"""Calls that change what a server holds: acknowledged by its owner only, and in a durable commit if it loses nothing."""

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
    }
)
"""Calls that change no rows and that only the owner of a server's folder may answer: a process that was replaced must not."""

READ_ONCE: frozenset[int] = frozenset({Call.APPLY_GRADIENTS})
"""Calls whose floats may be read where the client can still write to them: they are not checked, and not kept."""
