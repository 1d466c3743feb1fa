"""`monolith join`: join impressions and actions from streams into examples."""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from monolith.cli.options import Json, Sets, read_yaml, set_field
from monolith.cluster.launch.reporting import beating
from monolith.cluster.liveness import Liveness

if TYPE_CHECKING:
    from monolith.data.join import JoinStatus

__all__ = ["join", "stop_on_signals"]

_SHOW_SECS = 10.0


def join(
    job: Annotated[Path, typer.Argument(help="YAML file with the fields of JoinConfig.", metavar="JOB")],
    sets: Sets = None,
    index: Annotated[int, typer.Option(help="Number of this process, from 0.", min=0)] = 0,
    count: Annotated[
        int, typer.Option(help="Processes that join together. Each has some of the partitions.", min=1)
    ] = 1,
    until_end: Annotated[
        bool,
        typer.Option("--until-end", help="End when all records that there are have been read, and close all windows."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take partitions from processes that hang, instead of waiting for their end."),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port on loopback for /metrics (Prometheus) and /status (JSON). 0 takes a free one.", min=0, max=65535
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Join impressions and actions from streams into examples.

    Every impression becomes one example with its labels, also when processes are killed and started again. It runs until SIGTERM
    or SIGINT, and then writes a checkpoint. Progress is printed every 10 seconds, with --json as one object per line.
    """
    from monolith.data.join import JoinConfig, Joiner
    from monolith.data.join.metrics import MetricsServer

    # Windows are bytes, which are not collected, and looking at the records of every batch again and again costs a tenth.
    gc.set_threshold(50_000, 20, 100)
    tree = read_yaml(job)
    for assignment in sets or ():
        set_field(tree, assignment)
    config = JoinConfig.from_json(json.dumps(tree))
    latest: list[JoinStatus] = []
    with Joiner(config, index=index, count=count, take_over=take_over) as joiner:
        # Made before the first status: a scrape then gets zeros, not an error.
        latest.append(joiner.status())
        server = nullcontext() if metrics_port is None else MetricsServer(metrics_port, lambda: latest[-1])
        with beating(Liveness().heartbeat_secs), stop_on_signals(joiner.request_stop), server as metrics:
            if metrics is not None:
                _say(
                    {"event": "listening", "port": metrics.port}, f"metrics on http://127.0.0.1:{metrics.port}", as_json
                )
            show = _Shown(latest, as_json)
            joiner.run(until_end=until_end, report=show)
            show.end()


class _Shown:
    """Prints a status every 10 seconds."""

    def __init__(self, latest: list[JoinStatus], as_json: bool) -> None:
        self._latest, self._as_json = latest, as_json
        self._before, self._at = latest[-1], time.monotonic()

    def __call__(self, status: JoinStatus) -> None:
        self._latest[:] = [status]
        if time.monotonic() - self._at >= _SHOW_SECS:
            self._show("progress")

    def end(self) -> None:
        self._show("end")

    def _show(self, event: str) -> None:
        from monolith.data.join.metrics import progress_line, status_json

        now, status = time.monotonic(), self._latest[-1]
        text = progress_line(status, self._before, now - self._at)
        _say({"event": event, **status_json(status)}, text, self._as_json)
        self._before, self._at = status, now


def _say(event: dict[str, object], text: str, as_json: bool) -> None:
    sys.stdout.write((json.dumps(event) if as_json else text) + "\n")
    sys.stdout.flush()


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on SIGINT and SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        request_stop()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
