"""`monolith data-worker`: reads splits for trainers, until it is asked to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monolith.cli.given_files import named
from monolith.cli.options import Json
from monolith.cli.serving import (
    Grace,
    Host,
    MaxMessage,
    MaxStreams,
    Port,
    TlsCert,
    TlsKey,
    TokenFile,
    serve_until_asked,
)
from monolith.cli.sizes import size_in_bytes
from monolith.errors import ConfigError
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.dataservice.dataset import MakeSource

__all__ = ["data_worker"]


def data_worker(
    dispatcher: Annotated[str, typer.Option(help="host:port of the dispatcher.")],
    host: Host = "127.0.0.1",
    port: Port = 0,
    advertise: Annotated[
        str | None, typer.Option(help="host:port that trainers reach it by; default: where it listens.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="A source that datasets may name, as clicks=my_package.data:read. May be repeated."),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(help="Folder or URL that files must be below. May be repeated; '*' allows any."),
    ] = None,
    read_ahead: Annotated[
        int, typer.Option(help="Batches of each split that are read before they are asked for.", min=1)
    ] = 4,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="Whom the dispatcher's certificate is signed by, PEM.")
    ] = None,
    token_file: TokenFile = None,
    max_message: MaxMessage = "256MiB",
    max_streams: MaxStreams = 256,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Read, parse and transform splits for the trainers they were handed to; end on SIGTERM, SIGINT, or when a client asks.

    The first line of the output tells the address. The token is also what it sends to the dispatcher.
    """
    from monolith.dataservice import DataClientConfig, DataWorker, DataWorkerConfig

    token = read_token(token_file)
    server = DataWorker(
        DataWorkerConfig(
            dispatcher=dispatcher.removeprefix("grpc://"),
            host=host,
            port=port,
            advertise=advertise,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token=token,
            client=DataClientConfig(token=token, tls_root_certs=tls_root_certs),
            roots=tuple(root or ()),
            read_ahead=read_ahead,
            max_message_bytes=size_in_bytes(max_message, "--max-message"),
            max_streams=max_streams,
        ),
        dict(map(_kind, kind or ())),
    )
    serve_until_asked(server, grace=grace, as_json=as_json)


def _kind(text: str) -> tuple[str, MakeSource]:
    name, equals, function = text.partition("=")
    if not equals or not name.isidentifier() or ":" not in function:
        raise ConfigError(f"--kind: expected name=module:function, got {text!r}")
    return name, named(function)
