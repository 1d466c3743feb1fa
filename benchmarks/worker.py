"""The child process of one peer: reads one JSON request per line, answers each with one JSON line.

Started by `contestants.py` with the Python of the peer's environment; not meant to be run by hand.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import disk
import growth
import workload
from peers import Peer, growing_class, peer_class, spec_named


def check(peer: Peer, batch: workload.Batch) -> dict[str, Any]:
    """Check the first batch of a peer: a comparison with wrong results would be worthless."""
    before = peer.read(batch).copy()
    prepared = peer.prepare(batch)
    pooled = np.asarray(peer.lookup(prepared))
    expected_pooled = before.reshape(workload.BAGS, workload.POOL, -1).sum(axis=1)
    peer.train_step(prepared)
    expected = workload.after_first_step(before, batch)
    return {
        "lookup_error": float(np.abs(pooled - expected_pooled).max()),
        "train_error": float(np.abs(peer.read(batch) - expected).max()),
    }


def run(peer: Peer, data: workload.Workload, request: dict[str, Any]) -> dict[str, Any]:
    first, warm, count = request["first"], request["warm"], request["count"]
    batches = [peer.prepare(data.batch(request["distribution"], first + n)) for n in range(warm + count)]
    call = peer.lookup if request["operation"] == "lookup" else peer.train_step
    # The caches hold what the previous peer left; a few batches bring back this peer's own code and hot rows.
    for batch in batches[:warm]:
        call(batch)
    gc.collect()
    gc.disable()
    start, worked = time.perf_counter(), time.process_time()
    for batch in batches[warm:]:
        call(batch)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    gc.enable()
    return {"seconds": seconds, "cpu_seconds": worked}


def serve(config: dict[str, Any], answer: Any) -> None:  # noqa: ANN401
    if config["job"] == "end_to_end":
        import click_worker  # needs PyTorch, which not every peer has

        click_worker.serve(config, answer)
        return
    if config["job"] == "ranks":
        import rank_worker

        rank_worker.serve(config, answer)
        return
    spec = spec_named(config["peer"])
    directory, dim, threads = Path(config["workload"]), config["dim"], config["threads"]
    if config["job"] == "growth":
        answer(growth.measure(growing_class(spec), workload.load(directory).ids, dim, threads, config["one_row_steps"]))
        return
    data = workload.load(directory)
    if config["job"] == "disk":
        answer(disk.measure(data.ids, dim, threads, Path(config["directory"]), config["rounds"]))
        return
    peer = peer_class(spec)(data.ids, dim, threads)
    answer({"ready": True, "versions": peer.versions})
    for line in sys.stdin:
        request = json.loads(line)
        answer(check(peer, data.batch("zipf", 0)) if request["command"] == "check" else run(peer, data, request))


def main() -> None:
    # Libraries print to standard output as they please; the answers go to a private copy of it.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    try:
        serve(json.loads(sys.argv[1]), answer)
    except ImportError as error:
        answer({"skip": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
