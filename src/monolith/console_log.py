"""What a process of ours logs, shown to a person who has not configured logging."""

from __future__ import annotations

import logging

__all__ = ["log_to_stderr"]


def log_to_stderr() -> None:
    """Show our messages from level INFO on, and warnings of other libraries, on stderr.

    Does nothing if the program has configured logging itself. Programs of ours and the roles of a job over several processes call
    it; importing never does.

    Example:
        >>> log_to_stderr()
    """
    if logging.getLogger().handlers:
        return
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("monolith").setLevel(logging.INFO)
