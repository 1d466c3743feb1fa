"""The servers of a data service for processes that the MLP scheduler gave their roles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monolith.dataservice.dataset import EVERYTHING, Kinds
from monolith.dataservice.dispatcher import DataDispatcher, DispatcherConfig
from monolith.dataservice.protocol import DataClientConfig
from monolith.dataservice.worker import DataWorker, DataWorkerConfig
from monolith.errors import InvalidArgumentError
from monolith.transport.server import FrameServer, ListenConfig

__all__ = ["MlpDataServers"]


class _Closing:
    """A server as `mlp_pass` closes it."""

    def __init__(self, server: FrameServer) -> None:
        self.server = server

    def close(self) -> None:
        """Stop serving."""
        self.server.close()


class MlpDataServers:
    """Starts what `mlp_pass` asks for: `mlp_pass(data_servers=MlpDataServers(listen=..., folder=...))`.

    `listen` has host, TLS and token, `client` how data workers reach the dispatcher; ports are the scheduler's.
    `roots` are the folders or URLs that may be read; by default any file, as all processes are of one job.

    Example:
        >>> servers = MlpDataServers()
        >>> dispatcher = servers.start_dispatcher(0)
        >>> worker = servers.start_worker("127.0.0.1:0", f"grpc://{dispatcher.server.address}")
        >>> worker.close(), dispatcher.close()
        (None, None)
    """

    def __init__(
        self,
        *,
        listen: ListenConfig | None = None,
        client: DataClientConfig | None = None,
        folder: Path | None = None,
        kinds: Kinds | None = None,
        roots: Sequence[str] = (EVERYTHING,),
    ) -> None:
        self._listen = listen or ListenConfig()
        self._client = client or DataClientConfig(token=self._listen.token)
        self._folder, self._kinds, self._roots = folder, kinds, tuple(roots)

    def start_dispatcher(self, port: int) -> _Closing:
        """Hand out splits, on `port`; the journal is in `folder`."""
        fields = {**self._fields(), "port": port, "max_message_bytes": 2**22}
        return _Closing(DataDispatcher(DispatcherConfig(**fields, folder=self._folder, roots=self._roots)))

    def start_worker(self, address: str, dispatcher: str) -> _Closing:
        """Read for `dispatcher`, which may be a URL, at the port of `address`, under which trainers reach it."""
        port = address.rpartition(":")[2]
        if not port.isdecimal():
            raise InvalidArgumentError(f"address: expected host:port, got {address!r}")
        config = DataWorkerConfig(
            **{**self._fields(), "port": int(port)},
            dispatcher=dispatcher.removeprefix("grpc://"),
            # A port of 0 is known when the server has it.
            advertise=address if int(port) else None,
            client=self._client,
            roots=self._roots,
        )
        return _Closing(DataWorker(config, self._kinds))

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self._listen, name) for name in ListenConfig.model_fields}
