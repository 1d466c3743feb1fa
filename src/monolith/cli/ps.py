"""`monolith ps`: a parameter server, until it is asked to end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from monolith.cli.options import Json
from monolith.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from monolith.ps import ParameterServer

__all__ = ["ps"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TOKEN_VARIABLE = "MONOLITH_PS_TOKEN"


def ps(
    host: Annotated[str, typer.Option(help="Listen here; other than loopback needs TLS and a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that clients must send; or ${_TOKEN_VARIABLE}.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Refuse updates that would take more, as 8GiB or 500MB.")
    ] = None,
    max_message: Annotated[str, typer.Option(help="Refuse larger messages.")] = "256MiB",
    max_streams: Annotated[int, typer.Option(help="Streams open at the same time.", min=1)] = 256,
    transport: Annotated[
        Literal["socket", "flight"] | None,
        typer.Option(help="How frames travel; by default over plain sockets, with a certificate over Flight."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep what is held here, and restore it at start; without it, in memory only.")
    ] = None,
    log_flush_secs: Annotated[
        float | None,
        typer.Option(help="Seconds between commits to the log; 0 answers when it is durable.", min=0),
    ] = None,
    take_over: Annotated[bool, typer.Option(help="Take the folder from a process that hangs.")] = False,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="Whom other servers' certificates are signed by, PEM; by default --tls-cert.")
    ] = None,
    move_piece: Annotated[str, typer.Option(help="Rows given to another server at a time.")] = "8MiB",
    grace: Annotated[float, typer.Option(help="Seconds for calls under way to finish at the end.", min=0)] = 5.0,
    as_json: Json = False,
) -> None:
    """Hold tables and dense parameters for many workers; end on SIGTERM, SIGINT, or when a client asks for it.

    The first line of the output tells the address.
    """
    from monolith.ps import ParameterServer, ServerConfig

    server = ParameterServer(
        ServerConfig(
            host=host,
            port=port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token=_token(token_file),
            memory_limit=None if memory_limit is None else _bytes(memory_limit, "--memory-limit"),
            max_message_bytes=_bytes(max_message, "--max-message"),
            max_streams=max_streams,
            transport=transport,
            folder=folder,
            log_flush_secs=log_flush_secs,
            take_over=take_over,
            tls_root_certs=tls_root_certs,
            move_piece_bytes=_bytes(move_piece, "--move-piece"),
        )
    )
    _end_on_signals(server)
    _say(
        {"event": "listening", "address": server.address, "port": server.port, "pid": os.getpid()},
        f"listening on {server.address}",
        as_json,
    )
    server.wait()
    clean = server.close(grace=grace)
    _say({"event": "stopped", "clean": clean}, "stopped" if clean else "stopped; streams were still open", as_json)
    # Threads of streams whose clients went silent cannot be ended, and would hold the process: all that mattered is done.
    sys.stderr.flush()
    os._exit(0)


def _end_on_signals(server: ParameterServer) -> None:
    def ask(number: int, frame: FrameType | None) -> None:
        server.ask_to_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def _token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(_TOKEN_VARIABLE)
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"--token-file: cannot read {file}: {error}") from error


def _bytes(text: str, option: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{option}: expected a size as 8GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _say(event: dict[str, object], text: str, as_json: bool) -> None:
    sys.stdout.write((json.dumps(event) if as_json else text) + "\n")
    sys.stdout.flush()
