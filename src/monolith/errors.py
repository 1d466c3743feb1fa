"""Every exception Monolith raises on purpose:

    MonolithError
    ├── CheckpointMismatchError (ValueError) a checkpoint and the model do not fit together
    ├── ConfigError (ValueError)             a configuration object cannot be built
    ├── InvalidArgumentError (ValueError)    a call's arguments do not fit the table or each other
    │   └── InvalidVariableError (RuntimeError)  a gradient belongs to a variable that was not expected
    ├── CorruptFileError                     a file is truncated, altered, too new, or made for another table
    ├── DiscoveryError (OSError)             a process cannot be announced or found: no answer, a refusal, no entry in time
    ├── DivergedError (ArithmeticError)      a loss or gradient is NaN or infinite
    ├── ForkedProcessError (RuntimeError)    a forked child uses threads or connections of its parent
    ├── LogGapError                          the change log does not lead from one sequence number to another
    ├── MissingPackageError (ImportError)    an optional package is needed and not installed
    ├── ModelNotFoundError (LookupError)     a server has no model of that name, or not that version of it
    ├── RankLostError                        a rank of a synchronous run died, fell silent or failed
    ├── RanksDisagreeError                   ranks of a synchronous run do not do the same thing at the same time
    ├── RepeatedFailureError                 a rank has failed again in the same step with the same error
    ├── RunInterruptedError                  a process of a run had to stop before its work was done
    ├── SchemaError (ValueError)             a record or table lacks requested columns
    ├── ServerError                          a parameter server failed to serve a request
    │   ├── AuthenticationError (PermissionError)  the token is missing or wrong
    │   ├── DeadlineExceededError (TimeoutError)   no answer came in time
    │   ├── FencedError                            another process has taken its folder
    │   ├── MemoryLimitError (MemoryError)         the request exceeds the memory limit
    │   ├── OwnershipChangedError                  it no longer owns these ids: refresh the routes
    │   ├── ProtocolError (ValueError)             a message is malformed, too large, or of another version
    │   │   └── MessageTooLargeError                   it is larger than the server or client accepts
    │   ├── ServerLostError                        it cannot restore its state, and the run does not accept that
    │   ├── ServerRestartedError                   it was restarted and has lost its state
    │   │   └── ServerRestoredError                it has restored itself: join again and continue
    │   ├── StalePushError                         a newer process has replaced the sender
    │   └── UnavailableError (ConnectionError)     it cannot be reached, or is stopping
    │       └── OverloadedError                    it has reached its limit of streams or requests: back off
    ├── WorkerLostError                      a worker ended, or hangs, before its work was done, and was not replaced
    ├── StreamGapError (LookupError)         a stream does not have the records at a position (any more)
    └── StorageError (OSError)               the operating system refused an open, read, write, fsync or rename
        └── SaveInterruptedError             a server was restarted while it wrote its part of a checkpoint

A message says where, what was expected, what it got, and what to do next. No operation is left half done by any of these.
"""

__all__ = [
    "AuthenticationError",
    "CheckpointMismatchError",
    "ConfigError",
    "CorruptFileError",
    "DeadlineExceededError",
    "DiscoveryError",
    "DivergedError",
    "FencedError",
    "ForkedProcessError",
    "InvalidArgumentError",
    "InvalidVariableError",
    "LogGapError",
    "MemoryLimitError",
    "MessageTooLargeError",
    "MissingPackageError",
    "ModelNotFoundError",
    "MonolithError",
    "OverloadedError",
    "OwnershipChangedError",
    "ProtocolError",
    "RankLostError",
    "RanksDisagreeError",
    "RepeatedFailureError",
    "RunInterruptedError",
    "SaveInterruptedError",
    "SchemaError",
    "ServerError",
    "ServerLostError",
    "ServerRestartedError",
    "ServerRestoredError",
    "StalePushError",
    "StorageError",
    "StreamGapError",
    "UnavailableError",
    "WorkerLostError",
]


class MonolithError(Exception):
    """Base of every error Monolith raises on purpose."""


class CheckpointMismatchError(MonolithError, ValueError):
    """A checkpoint does not fit what is to be restored from it. The message lists every difference."""


class ConfigError(MonolithError, ValueError):
    """A configuration object cannot be built: a field is unknown, of the wrong type, or out of range."""


class InvalidArgumentError(MonolithError, ValueError):
    """The arguments of a call do not fit the table or each other. Nothing was changed."""


class InvalidVariableError(InvalidArgumentError, RuntimeError):
    """A gradient belongs to a variable that is not in the set of valid ones. Nothing was changed."""


class CorruptFileError(MonolithError):
    """A file is truncated, altered, of a newer version, or made for another table. Nothing was changed."""


class DiscoveryError(MonolithError, OSError):
    """A process cannot be announced or found: the service did not answer, refused, or does not show the entry in time."""


class DivergedError(MonolithError, ArithmeticError):
    """A loss or gradient is NaN or infinite. The step changed no weight."""


class ForkedProcessError(MonolithError, RuntimeError):
    """A forked child used threads, connections or a log of its parent process. Make new ones in the child."""


class LogGapError(MonolithError):
    """The change log does not lead from one sequence number to another: start from a snapshot or checkpoint instead."""


class MissingPackageError(MonolithError, ImportError):
    """An optional package is needed and not installed. The message has the command that installs it."""


class ModelNotFoundError(MonolithError, LookupError):
    """A server has no model of that name, or not that version of it. The message lists those it has."""


class RankLostError(MonolithError):
    """A rank of a synchronous run died, fell silent or failed.

    Example:
        >>> error = RankLostError("rank 1 closed its connection in step 7", rank=1, step=7)
        >>> error.rank, error.step
        (1, 7)
    """

    def __init__(self, text: str, *, rank: int = -1, step: int = 0) -> None:
        super().__init__(text)
        self.rank = rank
        """The rank that was lost. -1 if it is not known."""
        self.step = step
        """The step in which it was noticed."""


class RanksDisagreeError(MonolithError):
    """Ranks of a synchronous run do not do the same thing at the same time, or have declared different tables."""


class RepeatedFailureError(MonolithError):
    """A rank has failed again in the same step with the same error, so another restart would not help."""


class RunInterruptedError(MonolithError):
    """This process of a run had to stop before its work was done. Its successor continues with the next batch."""


class WorkerLostError(MonolithError):
    """A worker of the run ended, hangs or never joined, and was not replaced in time: some of the data is not trained."""


class SchemaError(MonolithError, ValueError):
    """A record or table lacks a requested column, or has it with another type or length."""


class StreamGapError(MonolithError, LookupError):
    """A stream does not have the records at a position: they were removed by its retention, or it has never had them."""


class ServerError(MonolithError):
    """A parameter server failed to serve a request. Without a more specific class, the fault is the server's."""


class AuthenticationError(ServerError, PermissionError):
    """The server requires a token, and none or another one was sent. Nothing was changed."""


class DeadlineExceededError(ServerError, TimeoutError):
    """No answer came in time. A push may have been applied or not. Sent again with its number it counts once."""


class FencedError(ServerError):
    """Another process has taken over the folder of this one. The request is not acknowledged, and this process should end."""


class MemoryLimitError(ServerError, MemoryError):
    """The request would exceed the server's memory limit. Nothing was changed, and reads are still served."""


class OwnershipChangedError(ServerError):
    """The server no longer owns some of the buckets, or is moving them. Nothing was changed."""


class ProtocolError(ServerError, ValueError):
    """A message is malformed, larger than allowed, or of another version of the protocol. Nothing was changed."""


class MessageTooLargeError(ProtocolError):
    """A message is larger than the server or the client accepts. Nothing was changed."""


class ServerLostError(ServerError):
    """A server cannot restore its state, and the run does not accept that loss. Nothing was changed."""


class ServerRestartedError(ServerError):
    """The server was restarted and has lost its state. Nothing was changed."""


class ServerRestoredError(ServerRestartedError):
    """The server was restarted and has restored itself from its folder. Join it again and continue. Nothing was changed."""


class StalePushError(ServerError):
    """A newer process has replaced the sender, or the push is older than the server remembers. Nothing was changed."""


class UnavailableError(ServerError, ConnectionError):
    """The server cannot be reached, has closed the connection, or is stopping."""


class OverloadedError(UnavailableError):
    """The server has reached its limit of streams or requests. Nothing was changed. Clients back off and retry."""


class StorageError(MonolithError, OSError):
    """The operating system refused an open, read, write, fsync or rename. The message has path and reason."""


class SaveInterruptedError(StorageError):
    """A server does not know the save in question: it was restarted, or has begun another. Save again."""
