"""What is freshness worth? The simulation of the Monolith paper on open data, faults, and the running loop.

  python benchmarks/freshbench --quick                              about a minute
  python benchmarks/freshbench                                      the synthetic stream and a control
  python benchmarks/freshbench --movielens ml-100k --data synthetic MovieLens by time, too
  python benchmarks/freshbench --parts fault,live --data synthetic  a lost server; the running loop
  python benchmarks/freshbench --systems monolith,torch-reload,vowpal-wabbit

The exit code is 0 if the ordering of the paper holds (on a control: if it does not), 1 if not, 2 for bad options.
docs/freshbench.md explains the method and how to add a system.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import machine
from freshbench.adapters import SYSTEMS, factory
from freshbench.datasets import MAKERS, Source
from freshbench.faults import kill_servers, lose_a_server
from freshbench.live import INTERVALS, LiveReport, run_live
from freshbench.measure import Plan, measure
from freshbench.report import plot
from freshbench.simulation import BATCH_ONLY
from monolith import set_num_threads

SYNCS = (2, 10, 50, 100)
EVENTS = 250_000
KILL_EVENTS = 30_000
"""For real servers, where each step waits for the disk."""
QUICK_LIVE_EVENTS = 20_000
PARTS = ("shards", "fault", "live")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data, 3 seeds; the numbers are not for quoting")
    parser.add_argument(
        "--parts",
        default="shards",
        help="of shards (the paper's table, of each data set), fault and live (of the first one); default shards",
    )
    parser.add_argument("--data", default=None, help=f"of {', '.join(MAKERS)}; default: synthetic,stationary")
    parser.add_argument(
        "--movielens", type=Path, help="u.data, ratings.dat, ratings.csv, Parquet, or a folder with one"
    )
    parser.add_argument(
        "--criteo", type=Path, help="a Parquet file or a folder: label, I1-I13, C1-C26, in order of time"
    )
    parser.add_argument("--events", type=int, help=f"of generated data and of --criteo; default {EVENTS:,}")
    parser.add_argument(
        "--systems", default="monolith", help=f"of {', '.join(SYSTEMS)}, or module:Class; the first one is judged"
    )
    parser.add_argument("--syncs", help=f"during the online part; default {','.join(map(str, SYNCS))}")
    parser.add_argument("--seeds", type=int, help="default 5")
    parser.add_argument(
        "--through", choices=("copy", "feed"), default="copy", help="feed: compare with the follower too"
    )
    parser.add_argument(
        "--no-control", action="store_true", help="do not repeat everything with events in random order"
    )
    parser.add_argument("--seconds", type=float, help="that the online part takes in the part live; default 60")
    parser.add_argument("--feed-secs", help=f"intervals of the part live; default {','.join(map(str, INTERVALS))}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/freshbench"), help="where results go")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    torch.set_num_threads(1)  # layers this small lose more by handing work to threads than they gain
    set_num_threads(1)
    console = Console(highlight=False, soft_wrap=True)
    try:
        plan, sources, parts = _plan(options), _sources(options), _parts(options)
        for name in plan.systems:
            factory(name)  # before anything is trained: what is missing should not be found out an hour later
    except (ValueError, ImportError, OSError) as error:
        console.print(f"freshbench: {error}", markup=False)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    passed = True
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        under_way = bar.add_task("", total=1.0)

        def tell(what: str, share: float) -> None:
            bar.update(under_way, description=what, completed=share)

        if "shards" in parts:
            reports = []
            for make in sources:
                reports.append(measure(make, plan, tell))
                console.print(reports[-1].markdown() + "\n", markup=False)
            passed = all(report.passed for report in reports)
            _write(options.out, "shards", [one.markdown() for one in reports], [one.as_json() for one in reports])
            (options.out / "shards.svg").write_text(plot(reports))
        if "fault" in parts:
            lost = lose_a_server(sources[0], plan.seeds, tell)
            killed = kill_servers(sources[0].at_most(KILL_EVENTS)(0))
            tables = [lost.markdown(), killed.markdown()]
            console.print("\n\n".join(tables) + "\n", markup=False)
            _write(options.out, "fault", tables, [lost.as_json(), vars(killed)])
        if "live" in parts:
            tell("the running loop", 0.0)
            report = _live(sources[0], options)
            console.print(report.markdown() + "\n", markup=False)
            _write(options.out, "live", [report.markdown()], [report.as_json()])
    console.print(f"written to {options.out}")
    return 0 if passed else 1


def _write(folder: Path, name: str, tables: Sequence[str], found: Sequence[object]) -> None:
    results = {"machine": machine.describe(), "reports": found}
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / f"{name}.md").write_text("\n\n".join(tables) + "\n")


def _live(source: Source, options: argparse.Namespace) -> LiveReport:
    if options.quick and options.events is None:
        source = source.at_most(QUICK_LIVE_EVENTS)
    intervals: tuple[float, ...] = (0.1, 2.0) if options.quick else INTERVALS
    if options.feed_secs is not None:
        intervals = tuple(float(seconds) for seconds in options.feed_secs.split(","))
    seconds = options.seconds or (10.0 if options.quick else 60.0)
    return run_live(source, seconds, intervals)


def _parts(options: argparse.Namespace) -> tuple[str, ...]:
    parts = tuple(options.parts.split(","))
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return parts


def _plan(options: argparse.Namespace) -> Plan:
    syncs = SYNCS if options.syncs is None else tuple(int(number) for number in options.syncs.split(","))
    if options.quick and options.syncs is None:
        syncs = (2, 10, 50)
    seeds = options.seeds or (3 if options.quick else 5)
    if min(syncs) < 2 or seeds < 1:
        raise ValueError(f"--syncs, --seeds: expected at least 2 and 1, got {min(syncs)} and {seeds}")
    systems = tuple(options.systems.split(","))
    if options.through == "feed" and "monolith" not in systems:
        raise ValueError("--through feed: compares with the system monolith, which is not among --systems")
    return Plan(systems, (BATCH_ONLY, *sorted(set(syncs))), seeds, not options.no_control, options.through == "feed")


def _sources(options: argparse.Namespace) -> list[Source]:
    """Return the data sets."""
    events = options.events or (60_000 if options.quick else EVENTS)
    given = options.movielens is not None or options.criteo is not None
    names = ("" if given else "synthetic,stationary") if options.data is None else options.data
    sources: list[Source] = []
    for name in filter(None, names.split(",")):
        if name not in MAKERS:
            raise ValueError(f"--data: expected some of {', '.join(MAKERS)}, got {name!r}")
        sources.append(Source(name, events))
    if options.movielens is not None:
        sources.append(Source("movielens", path=options.movielens))
    if options.criteo is not None:
        sources.append(Source("criteo", options.events, options.criteo))
    if not sources:
        raise ValueError("--data, --movielens, --criteo: expected at least one data set")
    for source in sources:
        if source.path is not None:
            source(0)  # a file that is wrong is found before anything is trained
    return sources
