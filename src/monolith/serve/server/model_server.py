"""`ModelServer`: answers the Open Inference Protocol v2 over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from monolith.errors import ConfigError
from monolith.features.batch import Batch
from monolith.process_bound import ProcessBound
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.grpc_app import GrpcApp
from monolith.serve.server.grpc_connection import OpenGrpcConnections
from monolith.serve.server.handler import Handler
from monolith.serve.server.http import HttpRoute
from monolith.serve.server.http_app import HttpApp
from monolith.serve.server.http_connection import OpenConnections
from monolith.serve.server.listener import Listener, require_packages
from monolith.serve.server.routing import Observer, Router
from monolith.transport.server import read_pem, require_safe, short_switch_interval

__all__ = ["ModelServer", "warm_up"]

_WARM_UP_ROWS = (1, 64, 1)


def warm_up(replica: Replica) -> None:
    """Predict a few times, so that the first requests do not wait for what is only done once.

    Call it before a version is added to a repository.
    """
    for rows in _WARM_UP_ROWS:
        columns: Batch = {name: torch.zeros(rows, dtype=torch.int64) for name in replica.signature.columns}
        for spec in replica.signature.inputs:
            columns[spec.name] = torch.zeros(rows, *spec.shape, dtype=getattr(torch, spec.dtype))
        with torch.inference_mode():
            replica.predict(columns)


class ModelServer:
    """Serves the models of a repository until `close`. It is ready when the constructor returns.

    Args:
        repository: The models. Versions may be added and removed meanwhile. It is not closed with the server.
        config: Where to listen, and limits. By default free ports of this machine.
        router: Chooses the version of each request. By default the one that was asked for, else the default version.
        observers: Hear of every answer.
        extra_routes: Paths of HTTP beyond the protocol.
        assigns_ids: Give an id to requests without one, and return it with the answer, so that labels can name it.

    Raises:
        ConfigError: other machines could reach it without TLS and a token.
        MissingPackageError: the packages of the extra `serve` are not installed.

    Example:
        >>> from monolith.serve.repository import ModelRepository
        >>> with ModelServer(ModelRepository()) as server:
        ...     server.http_address.startswith("127.0.0.1:")
        True
    """

    def __init__(
        self,
        repository: ModelRepository,
        config: ServingConfig | None = None,
        *,
        router: Router | None = None,
        observers: Sequence[Observer] = (),
        extra_routes: Sequence[HttpRoute] = (),
        assigns_ids: bool = False,
    ) -> None:
        self.config = config or ServingConfig()
        _check(self.config)
        self._bound = ProcessBound("the model server")
        self._stop_asked = threading.Event()
        self._running = contextlib.ExitStack()
        self.handler = Handler(repository, self.config, router=router, observers=observers, assigns_ids=assigns_ids)
        self.handler.warm = False
        self._http: Listener | None = None
        self._grpc: Listener | None = None
        capacity = self.config.max_concurrency + self.config.max_queue
        self._pool = ThreadPoolExecutor(
            min(64, capacity) if self.handler.batches else self.config.max_concurrency,
            thread_name_prefix="monolith-predict",
        )
        try:
            self._start(extra_routes)
        except BaseException:
            self.close(grace=0.0)
            raise

    def _start(self, extra_routes: Sequence[HttpRoute]) -> None:
        self._running.enter_context(short_switch_interval())
        config, handler = self.config, self.handler
        if config.http_port is not None:
            http = OpenConnections(application=HttpApp(handler, self._pool, extra_routes), config=config)
            self._http = Listener(http, config, config.http_port, "http")
        if config.grpc_port is not None:
            grpc = OpenGrpcConnections(application=GrpcApp(handler, self._pool), config=config)
            self._grpc = Listener(grpc, config, config.grpc_port, "grpc", alpn="h2")
        repository = handler.repository
        for name in repository.names():
            for version in repository.versions(name):
                with repository.hold(name, version) as replica:
                    warm_up(replica)
        self.handler.warm = True

    @property
    def http_address(self) -> str:
        """host:port of HTTP. Empty if there is none."""
        return "" if self._http is None else self._address(self._http.port)

    @property
    def grpc_address(self) -> str:
        """host:port of gRPC. Empty if there is none."""
        return "" if self._grpc is None else self._address(self._grpc.port)

    def _address(self, port: int) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{host}:{port}"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `ask_to_stop` is called. Returns whether that happened in time."""
        return self._stop_asked.wait(timeout)

    def ask_to_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler."""
        self._stop_asked.set()

    def close(self, *, grace: float = 5.0) -> bool:
        """Say that it is not ready, refuse new requests, finish running ones, stop listening.

        Returns whether all ended within `grace` seconds. In a forked child it does nothing. Calling it twice is harmless.
        """
        if not self._bound.is_here:
            return True
        idle = self.handler.admission.drain(grace)
        http, self._http = self._http, None
        rpc, self._grpc = self._grpc, None
        ended = [listener.close(grace) for listener in (http, rpc) if listener is not None]
        self._pool.shutdown(wait=idle, cancel_futures=True)
        self.handler.close()
        self._running.close()
        return idle and all(ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ModelServer(http={self.http_address!r}, grpc={self.grpc_address!r})"


def _check(config: ServingConfig) -> None:
    require_packages()
    require_safe(config)
    if config.http_port is None and config.grpc_port is None:
        raise ConfigError("ServingConfig: expected http_port, grpc_port or both, got none of them")
    if config.tls_cert is not None and config.tls_key is not None:
        read_pem(config.tls_cert, "tls_cert")
        read_pem(config.tls_key, "tls_key", is_secret=True)
