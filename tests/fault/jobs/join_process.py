"""A joiner as a process, which says how it is doing and joins until it is killed or told to stop."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

from monolith.data.join import JoinConfig, Joiner


def join(pipe: Connection, config: str, index: int, count: int) -> None:
    """Join, stop when something comes through the pipe, and answer with the counters."""
    with Joiner(JoinConfig.from_json(config), index=index, count=count) as joiner:
        threading.Thread(target=_stop, args=(pipe, joiner), daemon=True).start()
        pipe.send("started")
        joiner.run()
        pipe.send(joiner.status().counts)


def _stop(pipe: Connection, joiner: Joiner) -> None:
    pipe.recv()
    joiner.request_stop()
