"""`monolith ps`: a parameter server, until it is asked to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from monolith.cli.options import Json
from monolith.cli.serving import (
    Grace,
    TlsCert,
    TlsKey,
    TokenFile,
    serve_until_asked,
)
from monolith.cli.sizes import size_in_bytes
from monolith.errors import ConfigError
from monolith.transport.tokens import read_token

__all__ = ["ps"]

MaxStreams = Annotated[int | None, typer.Option(help="Streams open at the same time, by default 256.", min=1)]
MaxRequests = Annotated[
    int | None,
    typer.Option(help="Requests in progress at the same time, by default one per stream; others are refused.", min=1),
]
IdleSecs = Annotated[
    float | None,
    typer.Option(help="Close a stream after this many seconds without a request, by default 900.", min=1),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads that share the work of one request, by default one per processor.", min=1),
]
TransportName = Annotated[
    Literal["socket", "flight"] | None,
    typer.Option(help="Transport of requests; by default Flight with a certificate, plain sockets without one."),
]
LogFlushSecs = Annotated[
    str | None,
    typer.Option(
        help="Seconds between commits to the log in --folder. By default 0: a push is acknowledged when it is durable. "
        "'off' writes with checkpoints only, and a crash loses everything since the last one."
    ),
]
RestoreTo = Annotated[
    str | None,
    typer.Option(
        help="Restore step=N, time=UNIX_SECONDS or sequence=N of the log in --folder and discard everything later. "
        "For a log that has lost a segment."
    ),
]
RestoreRoots = Annotated[
    list[str] | None,
    typer.Option(
        "--restore-root",
        help="Folder or URL that clients may restore from, in addition to the run's model_dir. May be repeated.",
    ),
]


def ps(
    host: Annotated[
        str | None,
        typer.Option(help="Listen here, by default 127.0.0.1; other than loopback needs TLS and a token."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="By default, or 0, a free one.", min=0, max=65535)] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Refuse updates that would take more, as 8GiB or 500MB.")
    ] = None,
    max_message: Annotated[str | None, typer.Option(help="Refuse larger messages, by default than 256MiB.")] = None,
    max_streams: MaxStreams = None,
    max_requests: MaxRequests = None,
    idle_secs: IdleSecs = None,
    threads: Threads = None,
    transport: TransportName = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep what is held here, and restore it at start; without it, in memory only.")
    ] = None,
    log_flush_secs: LogFlushSecs = None,
    take_over: Annotated[bool, typer.Option(help="Take the folder from a process that hangs.")] = False,
    restore_to: RestoreTo = None,
    restore_root: RestoreRoots = None,
    tls_root_certs: Annotated[
        Path | None,
        typer.Option(help="CA bundle (PEM) that signed other servers' certificates; by default --tls-cert."),
    ] = None,
    move_piece: Annotated[
        str | None, typer.Option(help="Rows given to another server at a time, by default 8MiB.")
    ] = None,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Hold tables and dense parameters for many workers, until SIGTERM, SIGINT or a client stops it.

    The first line of the output has the address. If the environment makes it a process of a run (MONOLITH_NUM_PS and so on,
    TF_CONFIG, the MLP scheduler), it is announced to the others, and its folder is MODEL_DIR/ps/INDEX.
    """
    if threads is not None:
        from monolith.table import set_num_threads

        set_num_threads(threads)
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "token": read_token(token_file),
        "memory_limit": None if memory_limit is None else size_in_bytes(memory_limit, "--memory-limit"),
        "max_message_bytes": None if max_message is None else size_in_bytes(max_message, "--max-message"),
        "max_streams": max_streams,
        "max_requests": max_requests,
        "idle_secs": None if idle_secs is None else float(idle_secs),
        "transport": transport,
        "folder": folder,
        "take_over": take_over or None,
        "restore_to": restore_to,
        "restore_roots": None if restore_root is None else tuple(restore_root),
        "tls_root_certs": tls_root_certs,
        "move_piece_bytes": None if move_piece is None else size_in_bytes(move_piece, "--move-piece"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if log_flush_secs is not None:
        given["log_flush_secs"] = _flush_secs(log_flush_secs)
    _serve(given, grace, as_json)


def _flush_secs(text: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--log-flush-secs: expected seconds or 'off', got {text!r}") from None


def _serve(given: dict[str, Any], grace: float, as_json: bool) -> NoReturn:
    from monolith.cluster import monolith_discovery
    from monolith.cluster.launch.reporting import beating
    from monolith.ps import ParameterServer, ServerConfig
    from monolith.train.runner import RunnerConfig
    from monolith.train.server_role import announced, place_server, wait_for_end

    runner = RunnerConfig.from_env()
    if runner.is_local or runner.server_type != "ps":
        serve_until_asked(ParameterServer(ServerConfig(**given)), grace=grace, as_json=as_json)
    of_run = {name: getattr(runner.server, name) for name in runner.server.model_fields_set}
    with beating(runner.liveness.heartbeat_secs), monolith_discovery(runner) as discovery:
        assert discovery is not None
        server = ParameterServer(place_server(ServerConfig(**{**of_run, **given}), runner, discovery))
        serve_until_asked(
            server,
            grace=grace,
            as_json=as_json,
            announced=announced(server, runner, discovery),
            wait=lambda: wait_for_end(server, runner),
        )
