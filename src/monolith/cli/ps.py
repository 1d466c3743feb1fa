"""`monolith ps`, `rebalance` and `probe`: run a parameter server, move buckets between servers, check one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from monolith.cli.options import Json, size_in_bytes
from monolith.cli.output import show, showing_progress
from monolith.cli.serving import (
    Grace,
    TlsCert,
    TlsKey,
    TokenFile,
    serve_until_asked,
)
from monolith.errors import ConfigError
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.ps import ClientConfig

__all__ = ["probe", "ps", "rebalance"]

PsMaxStreams = Annotated[
    int | None, typer.Option(help="Streams that may be open at the same time, by default 256.", min=1)
]
MaxRequests = Annotated[
    int | None,
    typer.Option(
        help="Requests that may be in progress at the same time, by default one per stream. Others are refused.", min=1
    ),
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
    typer.Option(help="Transport of requests. By default Flight with a certificate, plain sockets without one."),
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
        typer.Option(help="Address to listen on, by default 127.0.0.1. Other than loopback needs TLS and a token."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on. By default a free one.", min=0, max=65535)
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Refuse updates that would need more memory, such as 8GiB or 500MB.")
    ] = None,
    max_message: Annotated[
        str | None, typer.Option(help="Largest message that is accepted, by default 256MiB.")
    ] = None,
    max_streams: PsMaxStreams = None,
    max_requests: MaxRequests = None,
    idle_secs: IdleSecs = None,
    threads: Threads = None,
    transport: TransportName = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the state across restarts. Without it the state is in memory only."),
    ] = None,
    log_flush_secs: LogFlushSecs = None,
    feed_secs: Annotated[
        float | None,
        typer.Option(help="Seconds between publications of changed rows to replicas, by default 0.1.", min=0.001),
    ] = None,
    take_over: Annotated[bool, typer.Option(help="Take over the folder from a process that hangs.")] = False,
    restore_to: RestoreTo = None,
    restore_root: RestoreRoots = None,
    tls_root_certs: Annotated[
        Path | None,
        typer.Option(help="CA bundle (PEM) that signed the certificates of other servers. By default --tls-cert."),
    ] = None,
    move_piece: Annotated[
        str | None, typer.Option(help="Size of the chunks in which rows are sent to another server, by default 8MiB.")
    ] = None,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Run a parameter server.

    It holds tables and dense parameters for many workers until SIGTERM, SIGINT or a client stops it. The first line of the
    output has the address. If the environment makes the server part of a run (MONOLITH_NUM_PS and so on, TF_CONFIG, the MLP
    scheduler), it is announced to the other processes, and its folder is MODEL_DIR/ps/INDEX.
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
        "feed_secs": None if feed_secs is None else float(feed_secs),
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
    from monolith.cluster.discovery.config import monolith_discovery
    from monolith.cluster.launch.reporting import beating
    from monolith.ps import ParameterServer, ServerConfig
    from monolith.train.distributed.config import RunnerConfig
    from monolith.train.distributed.server import announced, place_server, wait_for_end

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


def probe(
    address: Annotated[str, typer.Argument(help="host:port of the server.", metavar="ADDRESS")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=0.1)] = 5.0,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="CA bundle (PEM) that signed the server's certificate.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the server. By default $MONOLITH_PS_TOKEN.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the health of a parameter server.

    The exit code is 0 if it answers.
    """
    from monolith.ps.client.server_group import ClientConfig, link_to
    from monolith.transport.calls import BasicCall

    config = ClientConfig(
        timeout=float(timeout), token=read_token(token_file), tls_root_certs=tls_root_certs, max_streams=1
    )
    link = link_to(address, config)
    try:
        answer = json.loads(link.call(BasicCall.HEALTH, "{}").text)
    finally:
        link.close()
    show({"address": address, **answer}, as_json=as_json)


def rebalance(
    of: Annotated[str, typer.Option("--from", help="The current servers: host:port,host:port.")],
    to: Annotated[
        str | None, typer.Option(help="The servers that own all buckets afterwards, in the same form.")
    ] = None,
    replace_lost: Annotated[
        bool,
        typer.Option(
            help="Servers were lost with their folders: new servers in --from take over, empty, the buckets that no server owns."
        ),
    ] = False,
    take_back: Annotated[
        bool,
        typer.Option(
            help="Instead of moving: return buckets in transit to their source in --from, if the destination does not take them."
        ),
    ] = False,
    lost: Annotated[
        str,
        typer.Option(
            help="With --take-back: servers that are lost for good, with their folders and the buckets they had received."
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a server that does not answer.", min=0.1)] = 60.0,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="CA bundle (PEM) that signed the servers' certificates.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the servers. By default $MONOLITH_PS_TOKEN.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Move buckets between running parameter servers.

    Every server of --to gets an equal share of the buckets while workers continue to train. As few buckets move as possible.
    Servers that are only in --from own nothing in the end: stop them when every worker has made another step. If the command
    fails midway nothing is lost: run it again. Buckets in transit to a server that does not come back are returned by
    --take-back: the source owns them again if that server has not received them, or is lost.
    """
    from monolith.ps import ClientConfig

    if take_back == (to is not None) or (lost and not take_back):
        raise typer.BadParameter(
            "expected either --to, or --take-back, with --lost if servers are lost", param_hint="--to"
        )
    config = ClientConfig(timeout=float(timeout), token=read_token(token_file), tls_root_certs=tls_root_certs)
    if to is None:
        show(_taken_back(_addresses(of), _addresses(lost), config), as_json=as_json)
    else:
        show(_moved(_addresses(of), _addresses(to), config, replace_lost=replace_lost), as_json=as_json)


def _moved(of: list[str], to: list[str], config: ClientConfig, *, replace_lost: bool) -> dict[str, object]:
    from monolith.ps import ServerStore
    from monolith.transport.addresses import distinct_addresses

    distinct_addresses(to)  # before waiting for those of --from
    store = ServerStore(of, replace_lost=replace_lost, config=config)
    with store, showing_progress("moving buckets") as report:
        owned = store.rebalance(to, report=report)
    return {
        server.address: {"buckets": sum(end - first for first, end in server.ranges), "ranges": server.ranges}
        for server in owned.servers
    }


def _taken_back(of: list[str], lost: list[str], config: ClientConfig) -> dict[str, object]:
    from monolith.ps import take_back_buckets

    settled = {
        one.source: {"buckets": one.buckets, "dense": one.dense, "destination": one.destination, "owner": one.owner}
        for one in take_back_buckets(of, lost=lost, config=config)
    }
    return {"settled": len(settled), **settled}


def _addresses(text: str) -> list[str]:
    return [address.strip() for address in text.split(",") if address.strip()]
