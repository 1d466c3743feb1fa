"""Options and main loop of the verbs that run a server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from monolith.errors import MonolithError

if TYPE_CHECKING:
    from monolith.transport.server import FrameServer

__all__ = [
    "Grace",
    "Host",
    "MaxMessage",
    "MaxStreams",
    "Port",
    "TlsCert",
    "TlsKey",
    "TokenFile",
    "serve_until_asked",
]

Host = Annotated[str, typer.Option(help="Address to listen on. Other than loopback needs TLS and a token.")]
Port = Annotated[int, typer.Option(help="Port to listen on. 0 takes a free one.", min=0, max=65535)]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain of the server (PEM).")]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of the server (PEM).")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token that clients must send. By default $MONOLITH_PS_TOKEN.")
]
MaxMessage = Annotated[str, typer.Option(help="Largest message that is accepted.")]
MaxStreams = Annotated[int, typer.Option(help="Streams that may be open at the same time.", min=1)]
Grace = Annotated[float, typer.Option(help="Seconds that calls in progress may take to finish at the end.", min=0)]


def serve_until_asked(
    server: FrameServer,
    *,
    grace: float,
    as_json: bool,
    announced: AbstractContextManager[object] | None = None,
    wait: Callable[[], object] | None = None,
) -> NoReturn:
    """Print the address, wait for SIGTERM, SIGINT or a client that stops the server, and end the process.

    Other processes find the server while `announced` is entered. `wait` is called instead of `server.wait`. If it raises a
    `MonolithError`, the exit code is 1.
    """
    failure: MonolithError | None = None
    _end_on_signals(server)
    with announced or nullcontext():
        _say(
            {"event": "listening", "address": server.address, "port": server.port, "pid": os.getpid()},
            f"listening on {server.address}",
            as_json,
        )
        try:
            (wait or server.wait)()
        except MonolithError as error:
            failure = error
    clean = server.close(grace=grace)
    _say({"event": "stopped", "clean": clean}, "stopped" if clean else "stopped, streams were still open", as_json)
    # Threads of streams with silent clients cannot be ended and would keep the process alive. Everything else is done.
    if failure is not None:
        sys.stderr.write(f"error: {failure}\n")
    sys.stderr.flush()
    os._exit(0 if failure is None else 1)


def _end_on_signals(server: FrameServer) -> None:
    def ask(number: int, frame: FrameType | None) -> None:
        server.ask_to_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def _say(event: dict[str, object], text: str, as_json: bool) -> None:
    sys.stdout.write((json.dumps(event) if as_json else text) + "\n")
    sys.stdout.flush()
