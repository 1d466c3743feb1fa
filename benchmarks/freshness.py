"""Measure freshness: the time from a training step to the first answer over HTTP that shows it.

python benchmarks/freshness.py                                 every case
python benchmarks/freshness.py --cases follow --placements local --feeds 0.02 --seconds 5
python benchmarks/freshness.py --cases others                  export and reload, Redis, a push every 10 s
python benchmarks/freshness.py --cases slowdown,rows           what following costs training, and predictions
python benchmarks/freshness.py --json                          the same as JSON
python benchmarks/freshness.py --markdown freshness.md         also as tables in a file, which grows with each case

A case that fails is named at the end, and the others are measured. The last table has each target and whether it was reached.

A run (`freshness_job.py`) trains 6,656 ids a step, 50 steps a second or as fast as it can, and every step sets the rows of eight
probe ids to its number. `monolith serve --run` answers in another process, and this process asks it for all probes, with a pause
of 1 ms between the answer and the next request. The age of a step is the time from the moment its updates were applied to the
moment when an answer had arrived in which all eight probes were those of that step or a later one. All processes read the same
clock. Rounds go through all cases. p50, p99 and max are over the steps of all rounds.

The others: a trainer that exports its model every second and a server that loads the newest version; a trainer that writes the
rows of every step to Redis and a server that reads the rows of each request from there; and a publication every 10 s, the
interval at which the original pushes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from contestants import HERE, PeerFailedError, PeerUnavailableError, WorkerProcess
from freshness_job import BATCHES, COLUMNS, HEADS, PROBE_IDS, PROBES, Examples, ProbedModel
from machine import describe
from model_servers import free_port
from monolith.serve import export_model
from serving import Rows, shown

PLACEMENTS: dict[str, list[str]] = {
    "local": [],
    "two servers": ["--workers", "1", "--ps", "2"],
    "two ranks": ["--ranks", "2"],
}
BINARY_HEADER = "Inference-Header-Content-Length"
START_SECS = 90.0
PAUSE_SECS = 0.001
ROWS_PER_SECOND = 500_000


def environment() -> dict[str, str]:
    """Return that of processes with one thread, whose jobs find the modules of this folder."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "MONOLITH_METRIC_PREFIX": ""}


class Run:
    """A training run, made step by step."""

    def __init__(
        self, folder: Path, *, placement: str = "local", feed_secs: float = 0.1, options: Sequence[str] = ()
    ) -> None:
        self.folder = folder / "run"
        self._log = folder / "run.log"
        path = folder / "commands"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(START_SECS)
        job = [str(HERE / "freshness_job.py"), "--model-dir", str(self.folder), "--commands", str(path)]
        job += ["--feed-secs", str(feed_secs), *options]
        launch = ["-m", "monolith.cli", "launch", *PLACEMENTS[placement], "--model-dir", str(self.folder)]
        if "--ps" in launch:
            # Durability is not what is measured: pushes are acknowledged before they are on the disk.
            launch += ["--ps-args", f"--feed-secs {feed_secs} --log-flush-secs 1"]
        if placement != "local":
            job = [*launch, *job[:1], "--", *job[1:]]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *job], stdout=log, stderr=log, env=environment(), start_new_session=True
            )
        try:
            self._connection, _ = listener.accept()
        except TimeoutError:
            self._kill()
            raise PeerFailedError(f"the run does not begin; see {self._log}: {self._log.read_text()[-800:]}") from None
        finally:
            listener.close()
        self._lines: IO[str] = self._connection.makefile("rw")

    def send(self, **command: object) -> None:
        """Begin what the command says."""
        self._lines.write(json.dumps(command) + "\n")
        self._lines.flush()

    def has_answered(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def receive(self) -> dict[str, Any]:
        """Wait for the end of the last command."""
        line = self._lines.readline()
        if not line:
            raise PeerFailedError(f"the run has ended; see {self._log}: {self._log.read_text()[-800:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def make_steps(self, steps: int, rate: float | None = None) -> dict[str, Any]:
        """Make steps and wait for them."""
        self.send(steps=steps, rate=rate)
        return self.receive()

    def close(self) -> None:
        """End it."""
        try:
            self.send(stop=True)
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._kill()

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Prober:
    """Asks a model server for the steps that the probes are at."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=20)
        columns = {name: np.arange(PROBES) for name in COLUMNS} | {"probe": PROBE_IDS}
        inputs = [
            {"name": name, "datatype": "INT64", "shape": [PROBES], "parameters": {"binary_data_size": c.nbytes}}
            for name, c in columns.items()
        ]
        tree = {"parameters": {"binary_data_output": True}, "inputs": inputs, "outputs": [{"name": "value"}]}
        head = json.dumps(tree).encode()
        self._body = head + b"".join(column.tobytes() for column in columns.values())
        self._headers = {BINARY_HEADER: str(len(head)), "Content-Type": "application/octet-stream"}

    def step(self) -> int:
        """Return the newest step that all probes show."""
        self._connection.request("POST", "/v2/models/clicks/infer", self._body, self._headers)
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise PeerFailedError(f"the server answers {response.status}: {data[:300]!r}")
        return int(np.frombuffer(data[int(response.headers[BINARY_HEADER]) :], np.float32).min())

    def wait_for(self, step: int, timeout: float = 60.0) -> None:
        """Wait until an answer shows a step."""
        end = time.monotonic() + timeout
        while (newest := self.step()) < step:
            if time.monotonic() > end:
                raise PeerFailedError(f"the server is at step {newest}, and {step} does not come in {timeout:g} s")
            time.sleep(0.02)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[dict[str, Any]]:
    """Run a server of ours, and give the line in which it says its address."""
    with log.open("w") as errors:
        started = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
        )
    try:
        assert started.stdout is not None
        for line in started.stdout:
            if line.startswith("{") and "http" in (said := json.loads(line)):
                yield said
                break
        else:
            raise PeerFailedError(f"the server does not start; see {log}: {log.read_text()[-800:]}")
    finally:
        started.terminate()
        started.communicate()


def serving(export: Path, *options: str) -> list[str]:
    """Return the command of a model server."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--name", "clicks", "--json"]
    return ["-m", "monolith.cli", "serve", str(export), *ports, *options]


@dataclass(kw_only=True)
class Ages:
    """What was measured of one case, over all rounds."""

    seconds: list[float] = field(default_factory=list)
    """The age of each step."""
    steps_per_second: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Of the trainer, per step."""
    asked: int = 0

    def add(self, answer: dict[str, Any], seen: list[tuple[float, int]]) -> None:
        """Take the times of the steps of a command, and the answers of the server meanwhile."""
        times = answer["times"]
        first = answer["last"] - len(times) + 1
        newest = np.maximum.accumulate([step for _, step in seen])
        for number, applied in enumerate(times):
            self.seconds.append(seen[int(np.searchsorted(newest, first + number))][0] - applied)
        self.steps_per_second.append(len(times) / answer["seconds"])
        self.processor.append(answer["processor"] / len(times))
        self.asked += len(seen)

    def row(self) -> dict[str, object]:
        """Return a row of the table."""
        p50, p99 = np.percentile(self.seconds, [50, 99]) * 1e3
        return {
            "p50 ms": round(float(p50), 1),
            "p99 ms": round(float(p99), 1),
            "max ms": round(max(self.seconds) * 1e3, 1),
            "steps": len(self.seconds),
            "steps/s": round(statistics.median(self.steps_per_second), 1),
            "trainer cpu ms a step": round(statistics.median(self.processor) * 1e3, 2),
            "requests": self.asked,
        }


def probe(run: Run, address: str, ages: Ages, *, seconds: float, rate: float | None, last_secs: float = 20.0) -> None:
    """Train for some seconds and ask the server all the while, until it shows the last step."""
    prober = Prober(address)
    try:
        warm = run.make_steps(BATCHES + 1, rate)
        prober.wait_for(warm["last"])
        speed = rate or len(warm["times"]) / warm["seconds"]
        run.send(steps=max(2, int(seconds * speed)), rate=rate)
        answer: dict[str, Any] | None = None
        end, seen = float("inf"), []
        while answer is None or seen[-1][1] < answer["last"]:
            step = prober.step()
            seen.append((time.monotonic(), step))
            if answer is None and run.has_answered():
                answer, end = run.receive(), time.monotonic() + last_secs
            if time.monotonic() > end:
                raise PeerFailedError(f"the server is at step {seen[-1][1]} of {answer and answer['last']}")
            time.sleep(PAUSE_SECS)
        ages.add(answer, seen)
    finally:
        prober.close()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    rate: float | None
    measure: Callable[[Path, Ages], None]
    """Given a new folder, adds what it measures."""


def untrained_export(folder: Path) -> Path:
    """Return an export to begin with."""
    return export_model(ProbedModel(), next(iter(Examples())), folder / "exports", heads=HEADS).parent


def follow_case(placement: str, feed_secs: float, rate: float | None, seconds: float) -> Case:
    """A replica that follows a run."""

    def measure(folder: Path, ages: Ages) -> None:
        export = untrained_export(folder)
        with ExitStack() as stack:
            run = Run(folder, placement=placement, feed_secs=feed_secs)
            stack.callback(run.close)
            command = serving(export, "--run", str(run.folder))
            said = stack.enter_context(process(command, folder / "serve.log"))
            probe(run, said["http"], ages, seconds=seconds, rate=rate, last_secs=20 + feed_secs)

    return Case(name=f"follow, {placement}, every {feed_secs:g} s", rate=rate, measure=measure)


def reload_case(rate: float | None, seconds: float) -> Case:
    """A trainer that exports, and a server that loads the newest export."""

    def measure(folder: Path, ages: Ages) -> None:
        export = untrained_export(folder)
        with ExitStack() as stack:
            run = Run(folder, options=["--exports", str(export), "--export-secs", "1"])
            stack.callback(run.close)
            said = stack.enter_context(process(serving(export, "--poll-secs", "0.05"), folder / "serve.log"))
            # Its last steps are in no export: what is measured ends with the last one that is.
            probe_until_stopped(run, said["http"], ages, seconds=seconds, rate=rate)

    return Case(name="export every second and reload", rate=rate, measure=measure)


def probe_until_stopped(run: Run, address: str, ages: Ages, *, seconds: float, rate: float | None) -> None:
    """As `probe`, for a server that never shows the last steps: those are left out."""
    prober = Prober(address)
    try:
        run.make_steps(BATCHES + 1, rate)
        run.send(steps=max(2, int(seconds * (rate or 50))), rate=rate)
        seen: list[tuple[float, int]] = []
        while not run.has_answered():
            seen.append((0.0, prober.step()))
            seen[-1] = (time.monotonic(), seen[-1][1])
            time.sleep(PAUSE_SECS)
        answer = run.receive()
    finally:
        prober.close()
    unseen = max(0, answer["last"] - max(step for _, step in seen))
    shown = {**answer, "last": answer["last"] - unseen, "times": answer["times"][: len(answer["times"]) - unseen]}
    if not shown["times"]:
        raise PeerFailedError("no export came in time, measure for more --seconds")
    ages.add({**shown, "seconds": answer["seconds"] * len(shown["times"]) / len(answer["times"])}, seen)


def redis_case(rate: float | None, seconds: float) -> Case:
    """A trainer that writes to Redis, and a server that reads from there."""

    def measure(folder: Path, ages: Ages) -> None:
        if shutil.which("redis-server") is None:
            raise PeerUnavailableError("redis-server is not installed: apt-get install redis-server")
        export = untrained_export(folder)
        with ExitStack() as stack:
            port = free_port()
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
            redis = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
            stack.callback(redis.wait)
            stack.callback(redis.terminate)
            run = Run(folder, options=["--redis-port", str(port)])
            stack.callback(run.close)
            command = [str(HERE / "freshness_worker.py"), "redis", str(export), str(port)]
            said = stack.enter_context(process(command, folder / "serve.log"))
            probe(run, said["http"], ages, seconds=seconds, rate=rate)

    return Case(name="Redis", rate=rate, measure=measure)


def measured(cases: Sequence[Case], rounds: int) -> Rows:
    """Go through all cases in every round."""
    ages = {case: Ages() for case in cases}
    for _ in range(rounds):
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    case.measure(Path(folder), ages[case])
                except (PeerFailedError, PeerUnavailableError, OSError, http.client.HTTPException) as error:
                    sys.stderr.write(f"{case.name}: left out of a round, {error}\n")
    return [
        {"case": case.name, "asked steps/s": case.rate or "all it can", **found.row()}
        for case, found in ages.items()
        if found.seconds
    ]


def follow_cases(options: argparse.Namespace) -> list[Case]:
    """Followers of each placement at each interval, and of a run at full speed."""
    steady = [
        follow_case(placement, feed, options.rate, options.seconds)
        for placement in options.placements
        for feed in options.feeds
    ]
    fast = [
        follow_case("local", feed, None, options.seconds) for feed in options.feeds if "local" in options.placements
    ]
    return steady + fast


def other_cases(options: argparse.Namespace) -> list[Case]:
    """What others do. The push loop needs some of its intervals."""
    return [
        reload_case(options.rate, options.seconds),
        redis_case(options.rate, options.seconds),
        follow_case("local", 10.0, options.rate, max(options.seconds, 40.0 if not options.quick else 12.0)),
    ]


def ages_of(*makers: Callable[[argparse.Namespace], list[Case]]) -> Callable[[argparse.Namespace], Rows]:
    """Return a case that measures ages."""
    return lambda options: measured([case for make in makers for case in make(options)], options.rounds)


def slowdown_case(options: argparse.Namespace) -> Rows:
    """Steps of a run that is followed and of one that is not, in turn: as fast as they can, and at the steady rate."""
    found: Rows = []
    for ids in ("uniform", "zipf"):
        for feed in options.feeds:
            with ExitStack() as stack:
                folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
                drawn = ["--zipf"] if ids == "zipf" else []
                followed, alone = (Run(folder, feed_secs=feed, options=drawn) for folder in folders)
                for run in (followed, alone):
                    stack.callback(run.close)
                command = serving(untrained_export(folders[0]), "--run", str(followed.folder))
                said = stack.enter_context(process(command, folders[0] / "serve.log"))
                prober = Prober(said["http"])
                stack.callback(prober.close)
                found += [
                    {"ids": ids, "feed s": feed, **_slowdown(options, followed, alone, prober, rate)}
                    for rate in (None, options.rate)
                ]
    return found


def _slowdown(
    options: argparse.Namespace, followed: Run, alone: Run, prober: Prober, rate: float | None
) -> dict[str, object]:
    steps = options.turn_steps if rate is None else max(20, int(options.turn_secs * rate))
    alone.make_steps(BATCHES + 1)
    prober.wait_for(followed.make_steps(BATCHES + 1)["last"])
    pairs = []
    for number in range(options.turns):
        turns = {}
        for run in (followed, alone) if number % 2 else (alone, followed):
            turns[run] = run.make_steps(steps, rate)
            if run is followed:
                # What is left to apply must not slow the other one's turn.
                prober.wait_for(turns[run]["last"])
        pairs.append((turns[followed], turns[alone]))
    walls = [(a["seconds"] / steps, b["seconds"] / steps) for a, b in pairs]
    processor = [(a["processor"] / steps, b["processor"] / steps) for a, b in pairs]
    return {
        "steps/s": rate or "all it can",
        "followed ms a step": round(statistics.median(a for a, _ in walls) * 1e3, 3),
        "alone ms a step": round(statistics.median(b for _, b in walls) * 1e3, 3),
        "ratio": round(statistics.median(a / b for a, b in walls), 3),
        "followed cpu ms": round(statistics.median(a for a, _ in processor) * 1e3, 3),
        "alone cpu ms": round(statistics.median(b for _, b in processor) * 1e3, 3),
        "cpu ratio": round(statistics.median(a / b for a, b in processor), 3),
    }


def rows_case(options: argparse.Namespace) -> Rows:
    """Predictions of a replica while nothing changes, while another run changes rows, and while it follows such changes."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        followed, other = (Run(folder, feed_secs=0.1) for folder in folders)
        for run in (followed, other):
            stack.callback(run.close)
            run.make_steps(BATCHES + 1)
        export = untrained_export(folders[0])
        command = [sys.executable, str(HERE / "freshness_worker.py"), "predict", str(export), str(followed.folder)]
        worker = WorkerProcess(command, environment(), folders[0] / "predict.log")
        stack.callback(worker.close)
        worker.receive()
        taken: dict[str, list[list[float]]] = {"nothing changes": [], "an unfollowed run changes": [], "followed": []}
        runs = dict(zip(taken, (None, other, followed), strict=True))
        rows: dict[str, float] = {}
        for _ in range(options.turns):
            for name, run in runs.items():
                rows[name] = _predict_turn(options, worker, run, taken[name])
    quiet = [np.percentile(turn, [50, 99]) for turn in taken["nothing changes"]]
    return [_rows_row(name, rows[name], turns, quiet) for name, turns in taken.items()]


def _predict_turn(
    options: argparse.Namespace, worker: WorkerProcess, run: Run | None, taken: list[list[float]]
) -> float:
    """Returns changed rows per second."""
    seconds = options.turn_secs
    if run is not None:
        run.send(rows_per_second=ROWS_PER_SECOND, seconds=seconds + 0.5)
        time.sleep(0.25)
    taken.append(worker.ask(json.dumps({"calls": int(seconds / 0.002), "pause": 0.001}))["taken"])
    rows = 0.0 if run is None else run.receive()["rows"] / (seconds + 0.5)
    time.sleep(0.3)  # until what was published last is applied
    return rows


def _rows_row(name: str, rows: float, turns: list[list[float]], quiet: list[Any]) -> dict[str, object]:
    found = [np.percentile(turn, [50, 99]) for turn in turns]
    p50, p99 = np.percentile([one for turn in turns for one in turn], [50, 99]) * 1e6
    return {
        "rows": name,
        "changed rows/s": round(rows),
        "predict p50 us": round(float(p50)),
        "p99 us": round(float(p99)),
        "p50 ratio": round(statistics.median(a[0] / b[0] for a, b in zip(found, quiet, strict=True)), 2),
        "p99 ratio": round(statistics.median(a[1] / b[1] for a, b in zip(found, quiet, strict=True)), 2),
    }


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "follow": ages_of(follow_cases),
    "others": ages_of(other_cases),
    "slowdown": slowdown_case,
    "rows": rows_case,
}


TARGETS: dict[float, tuple[float, float | None]] = {0.02: (15.0, None), 0.1: (60.0, 250.0)}
"""Milliseconds of p50 and p99, by the seconds between two publications."""
SLOWDOWN, RAISED = 1.05, 1.2
"""How much longer a step may take when it is followed, and p99 of a prediction while 500,000 rows a second are followed."""


def _target(what: str, measured: object, limit: float) -> dict[str, object]:
    reached = isinstance(measured, float | int) and measured <= limit
    return {"target": what, "measured": measured, "limit": limit, "": "reached" if reached else "MISSED"}


def targets(report: dict[str, object]) -> Rows:
    """Return each target that the report has a number for."""
    found: Rows = []
    ages = [row for case in ("together", "follow") for row in _rows_of(report, case)]
    for row in ages:
        for feed, (p50, p99) in TARGETS.items():
            if str(row["case"]).startswith("follow, ") and str(row["case"]).endswith(f"every {feed:g} s"):
                speed = f"{row['case']}, steps/s: {row['asked steps/s']}"
                found.append(_target(f"{speed}: p50 ms", row["p50 ms"], p50))
                if p99 is not None:
                    found.append(_target(f"{speed}: p99 ms", row["p99 ms"], p99))
    for row in _rows_of(report, "slowdown"):
        what = f"step of a run that is followed / alone, {row['ids']} ids, every {row['feed s']} s, steps/s: {row['steps/s']}"
        found.append(_target(what, row["ratio"], SLOWDOWN))
    for row in _rows_of(report, "rows"):
        if row["rows"] == "followed":
            found.append(_target("p99 of predict, following / nothing changes", row["p99 ratio"], RAISED))
    return found


def _rows_of(report: dict[str, object], case: str) -> Rows:
    rows = report.get(case)
    return rows if isinstance(rows, list) else []


def markdown(title: str, rows: Rows) -> str:
    """Return rows as a table in Markdown."""
    if not rows:
        return f"## {title}\n\nNothing was measured.\n\n"
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    return f"## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def run_case(case: Callable[[argparse.Namespace], Rows], name: str, options: argparse.Namespace) -> Rows | None:
    """Return the rows of a case. None, with a line that says why, if it failed: the others are still measured."""
    try:
        return case(options)
    except (
        PeerFailedError,
        PeerUnavailableError,
        OSError,
        subprocess.SubprocessError,
        http.client.HTTPException,
    ) as error:
        sys.stderr.write(f"{name} failed: {type(error).__name__}: {error}\n")
        return None


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        default="together,slowdown,rows",
        help="comma-separated: follow, others, together (both, in the same rounds), slowdown, rows",
    )
    parser.add_argument("--placements", type=lambda text: text.split(","), default=list(PLACEMENTS))
    parser.add_argument("--feeds", type=lambda text: [float(part) for part in text.split(",")], default=[0.02, 0.1])
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=9, help="of slowdown and rows")
    parser.add_argument("--turn-steps", type=int, default=1000, help="of slowdown")
    parser.add_argument("--turn-secs", type=float, default=4.0, help="of rows")
    parser.add_argument("--quick", action="store_true", help="seconds; the numbers are not for quoting")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", type=Path, help="a file for the tables")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds, options.turns, options.turn_steps, options.turn_secs = 3.0, 1, 2, 200, 1.0
    cases = {**CASES, "together": ages_of(follow_cases, other_cases)}
    unknown = [case for case in options.cases.split(",") if case not in cases]
    unknown += [placement for placement in options.placements if placement not in PLACEMENTS]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; cases are {', '.join(cases)}, placements {', '.join(PLACEMENTS)}")
    torch.set_num_threads(1)
    report: dict[str, object] = {"machine": describe()}
    failed: list[str] = []
    if options.markdown is not None:
        options.markdown.write_text(f"# Freshness\n\n{report['machine']}\n\n")
    for case in options.cases.split(","):
        rows = run_case(cases[case], case, options)
        if rows is None:
            failed.append(case)
        else:
            report[case] = rows
            _show(case, rows, options)
    report["targets"] = found = targets(report)
    _show("targets", found, options)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _show(case: str, rows: Rows, options: argparse.Namespace) -> None:
    """Print a table as soon as it is measured, and add it to the file."""
    if not options.json:
        sys.stdout.write(shown(case, rows) + "\n")
        sys.stdout.flush()
    if options.markdown is not None:
        with options.markdown.open("a") as file:
            file.write(markdown(case, rows))


if __name__ == "__main__":
    main()
