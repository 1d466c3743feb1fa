"""Being part of a Ray cluster: joining one, or starting one on this machine, and leaving it again."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType
from typing import Any

from monolith.cluster.extras import import_extra
from monolith.cluster.net import check_port, split_address
from monolith.errors import DiscoveryError, InvalidArgumentError

__all__ = ["NAMESPACE", "RaySession", "import_ray"]

NAMESPACE = "monolith"
"""Where the actors of jobs have their names."""

_ANSWER_SECS = 10.0
_lock = threading.Lock()


def import_ray() -> ModuleType:
    """The package `ray`; `MissingPackageError` if it is not installed."""
    return import_extra("ray", extra="ray", purpose="a job on Ray")


class RaySession:
    """This process as part of a Ray cluster, until `close`. If it was part of one already, it stays so.

    Ray hands over actors and their arguments as pickles: whoever is let into a Ray cluster can run code on it. One that is
    started here listens on the machine's own address, as Ray always does, and lets in only who has its token.
    """

    def __init__(self, address: str | None, **options: Any) -> None:  # noqa: ANN401 - what ray.init takes
        """Join the cluster at `address`; None starts one of this machine, with `options`."""
        # A program says no more to the outside than it was asked to.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address is None and "ray" not in sys.modules:
            # Read when Ray is imported. Newer releases ask for a token by themselves, older ones if told so.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        self._ray = import_ray()
        _require_someone(address)
        where = {"address": address} if address else {"include_dashboard": False}
        with _lock:
            self._is_ours = not self._ray.is_initialized()
            if self._is_ours:
                try:
                    self._ray.init(
                        **where, namespace=NAMESPACE, log_to_driver=False, logging_level="warning", **options
                    )
                except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                    raise DiscoveryError(
                        f"cannot join the Ray cluster at {address or 'this machine'}: {error}"
                    ) from error

    @property
    def address(self) -> str:
        """Where other processes join the same cluster."""
        return str(self._ray.get_runtime_context().gcs_address)

    def close(self) -> None:
        """Leave, if this is what joined; a cluster that was started here ends."""
        with _lock:
            if self._is_ours and self._ray.is_initialized():
                self._ray.shutdown()
            self._is_ours = False


def _require_someone(address: str | None) -> None:
    """Ray takes minutes to find out that there is nobody, and ends the process."""
    try:
        host, port = split_address(address or "")
    except InvalidArgumentError:
        return  # "auto", and the like
    if not check_port(host, port, timeout=_ANSWER_SECS):
        raise DiscoveryError(
            f"cannot join the Ray cluster at {address}: nobody answers there; is it the address of its head?"
        )
