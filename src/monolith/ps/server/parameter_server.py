"""`ParameterServer`: tables and dense parameters for many workers, over streams that stay open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from monolith.ps.rebalance.moves import PIECE_BYTES
from monolith.ps.server.dispatch import PEER_SECONDS, Dispatcher
from monolith.state.restore_points import Moment
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig, read_pem, require_safe
from monolith.transport.tokens import reveal
from monolith.urls import LocalPath, Location

__all__ = ["ParameterServer", "ServerConfig"]


class ServerConfig(ListenConfig):
    """Where a server listens, whom it lets in, how much it takes, and what it keeps.

    Example:
        >>> ServerConfig(memory_limit=8 * 2**30).host
        '127.0.0.1'
    """

    config_group: ClassVar[str] = "run"

    memory_limit: Annotated[int | None, Field(gt=0)] = None
    """Bytes that the server may hold: tables, dense parameters, positions of workers, coordination, requests and answers. What
    would need more is refused. None: no limit but 1 GiB for requests and answers."""
    folder: LocalPath | None = None
    """Where it keeps what it holds: a log of the changes, snapshots and checkpoints, on a disk that survives it. A server that is
    started on a folder with a log restores itself from it. None: in memory only."""
    log_flush_secs: Annotated[float | None, Field(ge=0)] = 0.0
    """Seconds between two commits to the log in `folder`, which is what a crash loses at most. 0: a push is answered when it is
    durable, so nothing that was acknowledged is lost. None: the log is written with checkpoints only."""
    take_over: bool = False
    """Take `folder` from a process that still holds it, such as one that hangs; that one is fenced and ends."""
    restore_to: Moment | None = None
    """Restore step=N, time=UNIX_SECONDS or sequence=N of the log in `folder` and discard everything later. For a log that has
    lost a segment. The server does so once for each value."""
    restore_roots: tuple[Location, ...] = ()
    """Folders and URLs that clients may let the server restore checkpoints from, in addition to its own model_dir: `folder`,
    or, if it is called <model_dir>/ps/<number>, that model_dir."""
    tls_root_certs: Path | None = None
    """PEM of whom the certificates of other servers are signed by, for moving buckets to them; None: `tls_cert`, its own."""
    move_piece_bytes: Annotated[int, Field(gt=0)] = PIECE_BYTES
    """Rows given to another server at a time; changes to a piece wait while it is on its way."""


class ParameterServer(FrameServer):
    """Serves until `close`. It has started when the constructor returns.

    Requests are handled by the transport's threads, which unpack arrays and call the core; nothing else runs here.

    Example:
        >>> from monolith.ps import ParameterServer, RemoteStore
        >>> from monolith.testing import sgd_table_config
        >>> with ParameterServer() as server, RemoteStore(server.address) as store:
        ...     store.declare([sgd_table_config(2, name="item")])
        ...     store.stats()["item"].rows
        0
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        require_safe(self.config)
        self._dispatcher = Dispatcher(
            memory_limit=self.config.memory_limit,
            max_frame_bytes=self.config.max_message_bytes,
            folder=self.config.folder,
            log_flush_secs=self.config.log_flush_secs,
            take_over=self.config.take_over,
            restore_to=self.config.restore_to,
            restore_roots=self.config.restore_roots,
            connect=self._connect,
            move_piece_bytes=self.config.move_piece_bytes,
        )
        try:
            super().__init__(self.config, self._dispatcher)
        except BaseException:
            self._dispatcher.close()
            raise

    @property
    def silence(self) -> float:
        """Seconds since the last call of a client, other than a health check."""
        return self._dispatcher.silence

    def _connect(self, address: str) -> Link:
        """The way to another server of the same group, which asks for the same token."""
        certificates = self.config.tls_root_certs or self.config.tls_cert
        return Link(
            address,
            timeout=PEER_SECONDS,
            token=reveal(self.config.token),
            tls_root_certs=None if certificates is None else read_pem(certificates, "tls_root_certs"),
            transport=self.config.transport,
        )

    def close(self, *, grace: float = 5.0) -> bool:
        """Finish what is under way, refuse what comes, stop listening; whether all ended within `grace` seconds.

        A stream whose client neither sends nor closes cannot be ended from here: it goes with the process.
        """
        clean = super().close(grace=grace)
        if self._bound.is_here:
            self._dispatcher.close()
        return clean
