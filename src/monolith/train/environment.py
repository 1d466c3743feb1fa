"""What a training process is called: the prefix of its metrics, the address of its machine."""

from __future__ import annotations

import os
import platform
import socket

__all__ = ["get_local_host", "get_metric_prefix", "set_metric_prefix"]

_METRIC_PREFIX = "MONOLITH_METRIC_PREFIX"


def get_metric_prefix() -> str:
    """What names of metrics begin with in systems that collect those of many processes.

    Example:
        >>> get_metric_prefix()
        'monolith.training'
    """
    return os.environ.get(_METRIC_PREFIX, "monolith.training")


def set_metric_prefix(prefix: str) -> None:
    """Set the prefix for this process and those it starts, by the environment variable MONOLITH_METRIC_PREFIX."""
    os.environ[_METRIC_PREFIX] = prefix


def get_local_host() -> str:
    """The IPv4 address that this machine's own name stands for; OSError if it stands for none."""
    # Elsewhere, on macOS above all, the bare name of a machine is known to no resolver.
    ending = "" if platform.system() in ("Linux", "Windows") else ".local"
    return socket.gethostbyname(socket.gethostname() + ending)
