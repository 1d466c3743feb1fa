"""`ServingConfig`: where a model server listens, which clients it accepts, and its limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from monolith.config import Config
from monolith.transport.tokens import Token

__all__ = ["ServingConfig"]


def _processors() -> int:
    return max(2, os.cpu_count() or 2)


class ServingConfig(Config):
    """Where a model server listens, which clients it accepts, and its limits.

    Example:
        >>> ServingConfig(http_port=8000).host
        '127.0.0.1'
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on. One that other machines can reach needs TLS and a token."""
    http_port: Annotated[int, Field(ge=0, lt=65536)] | None = 0
    """0 takes a free one. None: no HTTP."""
    grpc_port: Annotated[int, Field(ge=0, lt=65536)] | None = 0
    """0 takes a free one. None: no gRPC."""
    tls_cert: Path | None = None
    """The server's certificate chain, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    token: Token = None
    """The secret that a client must send as a bearer token, at least 16 characters. Health checks need none."""
    max_message_bytes: Annotated[int, Field(ge=4096, lt=2**31)] = 2**26
    """Larger requests are refused before they are read."""
    max_json_bytes: Annotated[int, Field(ge=4096, lt=2**31)] = 2**23
    """Larger JSON, which takes many times its size in memory, is refused. Binary data is not counted."""
    max_rows: Annotated[int, Field(gt=0, lt=2**31)] = 2**16
    """Requests with more rows are refused."""
    max_concurrency: Annotated[int, Field(gt=0)] = Field(default_factory=_processors)
    """Predictions at the same time. By default one per processor, and at least 2."""
    max_queue: Annotated[int, Field(ge=0)] = 128
    """Requests that may wait for their turn. Further ones are refused at once, so that those accepted keep their latency."""
    max_connections: Annotated[int, Field(gt=0)] = 1024
    """Open connections of HTTP, and as many of gRPC. Requests on further ones are refused."""
    deadline_secs: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Seconds that a request may take from its arrival if it states no deadline, and at most if it does."""
    max_batch_rows: Annotated[int, Field(ge=0)] = 0
    """Join requests that wait at the same time into one prediction of up to so many rows. 0: every request by itself."""
    batch_wait_ms: Annotated[float, Field(ge=0, le=60000)] = 1.0
    """How long a request waits for others to join it, if `max_batch_rows` is set."""
