"""A joiner as a process, which says how it is doing and joins until it is killed or told to stop."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path

from monolith.data.join import JoinConfig, Joiner, Repartition
from monolith.streams import Records, open_stream


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


def repartition(pipe: Connection, folder: str, until_end: bool = False) -> None:
    """Copy `source` to `target`, and tell what the target had already, and when something was copied."""
    source, target = open_stream(f"{folder}/source"), open_stream(f"{folder}/target")
    # So rarely that most kills come between two checkpoints.
    copying = Repartition(source, target, key=["key"], state=Path(folder) / "state", checkpoint_secs=0.2)
    if until_end:
        copying.run(until_end=True)
        copying.close()
        return
    pipe.send({"written": len(copying._written)})
    copy = copying._copy

    def copy_and_tell(records: Records) -> None:
        copy(records)
        pipe.send("copied")

    copying._copy = copy_and_tell  # type: ignore[method-assign]
    copying.run()
