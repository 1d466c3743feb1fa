"""Every exception Monolith raises on purpose.

MonolithError
├── CheckpointMismatchError (ValueError) a checkpoint and the model do not fit together
├── ConfigError (ValueError)             a configuration object cannot be built as asked
├── InvalidArgumentError (ValueError)    a call's arguments do not fit the table or each other
├── CorruptFileError                     a file is truncated, altered, too new, or made for another table
├── DiscoveryError (OSError)             a process cannot be announced or found: no answer, a refusal, no entry in time
├── DivergedError (ArithmeticError)      training met a NaN or infinite loss or gradient
├── LogGapError                          the change log does not lead from one sequence number to another
├── MissingPackageError (ImportError)    an optional package is needed and not installed
├── SchemaError (ValueError)             a record or table does not have the columns asked for
└── StorageError (OSError)               the operating system refused an open, read, write, fsync or rename

A message says where, what was expected, what came, and what to do next. After any of these nothing has been half-changed.
"""

__all__ = [
    "CheckpointMismatchError",
    "ConfigError",
    "CorruptFileError",
    "DiscoveryError",
    "DivergedError",
    "InvalidArgumentError",
    "LogGapError",
    "MissingPackageError",
    "MonolithError",
    "SchemaError",
    "StorageError",
]


class MonolithError(Exception):
    """Base of every error Monolith raises on purpose."""


class CheckpointMismatchError(MonolithError, ValueError):
    """A checkpoint and what is to be restored do not fit together; the message lists everything that does not."""


class ConfigError(MonolithError, ValueError):
    """A configuration object cannot be built: a field is unknown, of the wrong type, or out of range."""


class InvalidArgumentError(MonolithError, ValueError):
    """The arguments of a call do not fit the table or each other; nothing was changed."""


class CorruptFileError(MonolithError):
    """A file is truncated, altered, of a newer version, or made for another table; nothing was changed."""


class DiscoveryError(MonolithError, OSError):
    """A process cannot be announced or found: the service did not answer, refused, or does not show the entry in time."""


class DivergedError(MonolithError, ArithmeticError):
    """Training met a loss or gradient that is NaN or infinite; the step changed no weight."""


class LogGapError(MonolithError):
    """The change log does not lead from one sequence number to another: start from a snapshot or checkpoint instead."""


class MissingPackageError(MonolithError, ImportError):
    """An optional package is needed and not installed; the message has the command that installs it."""


class SchemaError(MonolithError, ValueError):
    """A record or table does not have a column that was asked for, or has it with another type or length."""


class StorageError(MonolithError, OSError):
    """The operating system refused an open, read, write, fsync or rename; the message has path and reason."""
