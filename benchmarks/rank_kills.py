"""How soon a job of ranks trains again after `kill -9` of one of them, and what it loses, next to bare torchrun with gloo.

    python benchmarks/rank_kills.py --kills 50 --ranks 4
    python benchmarks/rank_kills.py --kills 5 --peer-kills 3     # the peer as well, in the same run

Ours is a job under `monolith launch --ranks`. After the last kill its checkpoint is compared with the data, and bit by bit with
an undisturbed run of one process. The peer is the job of peers/torchrun_job.py under `torchrun --max-restarts 3`, a new one for
each kill. It has not come back if it makes no step for a minute, or ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "fault")]

from rank_campaign import RankCampaign, last_line, verdict  # noqa: E402 - of the tests

NOT_BACK_SECS = 60.0
MAX_RESTARTS = 3


def kill_ours(folder: Path, ranks: int, kills: int, seed: int) -> dict[str, object]:
    """Kill ranks of a job under `monolith launch`."""
    with RankCampaign(folder, ranks, seed=seed) as job:
        job.until_trained(since=0.0)
        for number in range(kills):
            time.sleep(job.chance.uniform(0.0, 1.5))
            seconds = job.hit(job.chance.randrange(ranks))
            print(f"kill {number + 1}: training again after {seconds:.1f} s", file=sys.stderr, flush=True)
        batches = job.finish()
    found = verdict(folder, batches)
    return {
        "kills": kills,
        "ranks": ranks,
        "median_secs": round(statistics.median(job.recoveries), 2),
        "worst_secs": round(max(job.recoveries), 2),
        "lost": found.lost,
        "doubled": found.doubled,
        "same_bits": found.same_bits,
    }


def kill_peer(folder: Path, ranks: int, kills: int, seed: int) -> dict[str, object]:
    """Kill one rank of a job under bare torchrun with gloo, in each of `kills` jobs."""
    chance, seconds, back = random.Random(seed), [], 0
    for number in range(kills):
        own = folder / str(number)
        own.mkdir()
        took = _kill_one_of_peer(own, ranks, chance)
        back += took is not None
        seconds += [] if took is None else [took]
        text = "did not come back" if took is None else f"training again after {took:.1f} s"
        print(f"torchrun and gloo, kill {number + 1}: {text}", file=sys.stderr, flush=True)
    return {"kills": kills, "max_restarts": MAX_RESTARTS, "came_back": back, "secs": [round(one, 1) for one in seconds]}


def _kill_one_of_peer(folder: Path, ranks: int, chance: random.Random) -> float | None:
    """Return how long it took until all ranks trained again. None if they did not."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [
        "--max-restarts",
        str(MAX_RESTARTS),
        str(ROOT / "benchmarks" / "peers" / "torchrun_job.py"),
        str(folder),
    ]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        if not _trains(job, folder, ranks, since=0.0):
            raise SystemExit(f"the job of the peer does not start: {(folder / 'log').read_text()}")
        time.sleep(chance.uniform(0.5, 1.5))
        began = time.time()
        os.kill(last_line(folder, chance.randrange(ranks))[2], signal.SIGKILL)
        # Lines that were written before the kill was noticed do not count.
        return time.time() - began if _trains(job, folder, ranks, since=began + 1.0) else None
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _trains(job: subprocess.Popen[bytes], folder: Path, ranks: int, *, since: float) -> bool:
    """Whether all ranks make a step after `since`, before the job ends or a minute has passed."""
    deadline = time.monotonic() + NOT_BACK_SECS
    while any(last_line(folder, rank)[1] <= since for rank in range(ranks)):
        if job.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--peer-kills", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as folder:
        ours, peer = Path(folder, "ours"), Path(folder, "peer")
        ours.mkdir()
        peer.mkdir()
        results["monolith"] = kill_ours(ours, options.ranks, options.kills, options.seed)
        if options.peer_kills:
            results["torchrun and gloo"] = kill_peer(peer, options.ranks, options.peer_kills, options.seed)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
