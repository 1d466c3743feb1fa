"""Measure the table, its peers and the limit of the machine.

python benchmarks/run.py            the full run: 10 M ids, dim 16 and 64, 1 and 2 threads
python benchmarks/run.py --quick    a short run that checks that everything works; its numbers are not for quoting
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import report
import speed
import workload
from contestants import PeerFailedError, PeerUnavailableError, peer_specs, start_job
from peers import OURS, PEERS

RESULTS = Path(__file__).resolve().parent / "results"
CASES = ("speed", "growth", "disk")
GROWING = tuple(spec.name for spec in PEERS if spec.growing)


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part.replace("_", "")) for part in text.split(","))

    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 M rows, dim 16, 1 thread, short turns")
    parser.add_argument("--cases", type=words, default=list(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--peers", type=words, help=f"of limit,{','.join(spec.name for spec in PEERS)}")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--dims", type=numbers)
    parser.add_argument("--threads", type=numbers)
    parser.add_argument("--rounds", type=int, help="turns of every peer in every case; at least 7 for a claim")
    parser.add_argument("--batches", type=int, help="timed batches in one turn")
    parser.add_argument("--one-row-steps", type=int, help="steps of one new row in the growth case")
    parser.add_argument("--disk", type=Path, default=RESULTS / "disk", help="folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write the results; default results/<time>.json")
    options = parser.parse_args()
    small = {"rows": 1_000_000, "dims": (16,), "threads": (1,), "rounds": 3, "batches": 8, "one_row_steps": 100_000}
    full = {"rows": 10_000_000, "dims": (16, 64), "threads": (1, 2), "rounds": 9, "batches": 32}
    full["one_row_steps"] = full["rows"]
    for name, value in (small if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.peers is None:
        options.peers = ["limit", *(spec.name for spec in PEERS)]
    known = {"limit", *(spec.name for spec in PEERS)}
    for kind, given, valid in (("--cases", options.cases, set(CASES)), ("--peers", options.peers, known)):
        if unknown := set(given) - valid:
            parser.error(f"{kind}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(valid))}")
    return options


def progress(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def run_speed(options: argparse.Namespace, directory: Path) -> speed.SpeedResult:
    plan = speed.SpeedPlan(
        rows=options.rows,
        dims=options.dims,
        threads=options.threads,
        rounds=options.rounds,
        batches=options.batches,
        limit="limit" in options.peers,
        peers=peer_specs(options.peers),
    )
    progress(f"drawing {options.rows:,} ids and {plan.batches_needed():,} batches per distribution")
    workload.generate(directory / "workload", rows=options.rows, batches=plan.batches_needed())
    return speed.measure(plan, directory, progress)


def run_jobs(
    job: str,
    peers: list[str],
    settings: list[dict[str, Any]],
    options: argparse.Namespace,
    directory: Path,
    skipped: dict[str, str],
) -> list[dict[str, Any]]:
    """The cases that are one process and one answer each."""
    results = []
    for spec in peer_specs([name for name in peers if name in options.peers and name not in skipped]):
        for setting in settings:
            progress(f"{job}: {spec.name}, dim {setting['dim']}, {setting['threads']} thread(s)")
            config = {"job": job, "workload": str(directory / "workload"), **setting}
            try:
                process, answer = start_job(
                    spec,
                    config,
                    threads=setting["threads"],
                    logs=directory / "logs",
                )
            except (PeerUnavailableError, PeerFailedError) as error:
                skipped[spec.name] = str(error)
                progress(f"skipped {spec.name}: {error}")
                break
            process.close()
            results.append({"peer": spec.name, "dim": setting["dim"], "threads": setting["threads"], **answer})
    return results


def main() -> None:
    options = arguments()
    directory = RESULTS / f"work-{os.getpid()}"
    described = machine.describe()
    result = speed.SpeedResult()
    if "speed" in options.cases:
        result = run_speed(options, directory)
    else:
        workload.generate(directory / "workload", rows=options.rows, batches=1)
    both = [{"dim": dim, "threads": threads} for dim in options.dims for threads in options.threads]
    growth, disk = [], []
    if "growth" in options.cases:
        # One-row calls use one thread whatever is allowed, so they are measured once per dim.
        ours = [s | {"one_row_steps": options.one_row_steps if s["threads"] == options.threads[0] else 0} for s in both]
        theirs = [s | {"one_row_steps": 0} for s in both if s["dim"] == options.dims[0]]
        growth = run_jobs("growth", [OURS], ours, options, directory, result.skipped)
        others = [name for name in GROWING if name != OURS]
        growth += run_jobs("growth", others, theirs, options, directory, result.skipped)
    if "disk" in options.cases:
        where = {"directory": str(options.disk), "rounds": options.rounds}
        settings = [s | where for s in both if s["dim"] == options.dims[0]]
        disk = run_jobs("disk", [OURS], settings, options, directory, result.skipped)
    # Keep the logs if they are not empty.
    shutil.rmtree(directory / "workload" if result.skipped else directory)

    head = {
        "command": "python benchmarks/run.py " + " ".join(sys.argv[1:]),
        "machine": described,
        "method": (
            f"{options.rows:,} random 64-bit ids, batches of {workload.BATCH:,} ids in bags of {workload.POOL}, "
            f"median of {options.rounds} rounds of {options.batches} batches, peers taking turns; "
            "ratios are medians of the rounds' own ratios."
        ),
        "disturbed": result.disturbed_share(),
        "versions": result.versions | {r["peer"]: r["versions"] for r in growth + disk},
        "skipped": result.skipped,
    }
    tables = [
        *report.speed_tables(result),
        *report.scaling_table(result),
        *report.growth_tables(growth),
        *report.disk_tables(disk),
        *report.bars(result, growth, disk),
    ]
    output = options.json or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**head, "speed": asdict(result), "growth": growth, "disk": disk}, indent=1) + "\n")
    page = output.with_suffix(".md")
    page.write_text(report.markdown(head, tables))
    report.show(tables)
    progress(f"wrote {output} and {page}")


if __name__ == "__main__":
    main()
