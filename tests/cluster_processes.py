"""A run over servers and workers as processes. They are forked from one that has imported everything: that takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import cluster_job
from forked_processes import CONTEXT

SECONDS = 120


@contextmanager
def processes(environments: Sequence[Mapping[str, str]], **job: object) -> Iterator[list[BaseProcess]]:
    """One process of `cluster_job` for each environment; all have ended with the block."""
    started = [CONTEXT.Process(target=_run, args=(dict(environ), job)) for environ in environments]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()
            process.close()


def exit_codes(started: Sequence[BaseProcess]) -> list[int | None]:
    """How processes have ended; None for one that has not."""
    for process in started:
        process.join(SECONDS)
    return [process.exitcode for process in started]


def environments(folder: Path, *, num_ps: int, num_workers: int, **fields: object) -> list[dict[str, str]]:
    """What the processes of a run are told, servers first."""
    common = {
        "NUM_PS": num_ps,
        "NUM_WORKERS": num_workers,
        "MODEL_DIR": folder / "model",
        "DISCOVERY_FOLDER": folder / "discovery",
        "RETRY_WAIT_IN_SECS": 0.1,
        **{name.upper(): value for name, value in fields.items()},
    }
    roles = [("ps", index) for index in range(num_ps)] + [("worker", index) for index in range(num_workers)]
    return [
        {f"MONOLITH_{name}": str(value) for name, value in {**common, "SERVER_TYPE": kind, "INDEX": index}.items()}
        for kind, index in roles
    ]


def _run(environ: dict[str, str], job: dict[str, object]) -> None:
    os.environ.update(environ)
    cluster_job.run(**job)  # type: ignore[arg-type]
