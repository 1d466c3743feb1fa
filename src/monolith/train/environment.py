"""The environment of a training process: its MONOLITH_ variables and the prefix of its metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

from monolith.cluster.launch.reporting import HEARTBEAT_VARIABLE
from monolith.config import nearest_name
from monolith.errors import ConfigError
from monolith.state.paths import RESTORE_ROOTS
from monolith.transport.tokens import TOKEN_VARIABLE

__all__ = ["OTHER_VARIABLES", "get_metric_prefix", "require_known_variables", "set_metric_prefix"]

_PREFIX = "MONOLITH_"
_METRIC_PREFIX = "MONOLITH_METRIC_PREFIX"

OTHER_VARIABLES = frozenset(
    {
        _METRIC_PREFIX,
        RESTORE_ROOTS,
        HEARTBEAT_VARIABLE,
        TOKEN_VARIABLE,
        "MONOLITH_ZK_HOSTS",
        "MONOLITH_ZK_HOSTS_IPV6",
    }
)
"""Every variable that Monolith reads and that is not a field of `RunnerConfig`."""

_log = logging.getLogger(__name__)


def require_known_variables(environ: Mapping[str, str], fields: Iterable[str]) -> None:
    """Refuse a MONOLITH_ variable that nothing reads and whose name is close to one that is read.

    `fields` are the variables of the configuration. A name that resembles none of them may be the user's own, so it is only
    logged as a warning. Kubernetes sets variables for every service, also for one called `monolith-...`; they are left alone.

    Raises:
        ConfigError: with the variable that was probably meant.

    Example:
        >>> require_known_variables({"MONOLITH_NUMPS": "2"}, ["MONOLITH_NUM_PS"])
        Traceback (most recent call last):
        monolith.errors.ConfigError: MONOLITH_NUMPS: no such variable; did you mean MONOLITH_NUM_PS?
    """
    known = {*fields, *OTHER_VARIABLES}
    services = tuple(name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST"))
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in known or name.startswith(services):
            continue
        if near := nearest_name(name.removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in known]):
            raise ConfigError(f"{name}: no such variable; did you mean {_PREFIX}{near}?")
        _log.warning(
            "%s: Monolith reads no such environment variable, so it has no effect; RunnerConfig lists those it reads",
            name,
        )


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
