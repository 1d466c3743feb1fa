"""The running loop: a producer, a stream, a run that trains on it, and a replica that follows the run, at several intervals.

Time is compressed: the online part of the data, 48 hours, passes in a minute or so. Each event is first answered by the replica
and by a model that stays as it was after the batch part. Then it goes to the stream, from where the run trains it. `feed_secs` of
the run is the interval.

An event counts as served when the replica has a row for an id that came with it and was not there before. The age that the
replica reports is not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import torch

from freshbench.adapters.monolith_system import HEAD, batch_of, served_tables
from freshbench.datasets import Source
from freshbench.examples import Examples, IdLists
from freshbench.live_run import PROBE
from freshbench.measure import online_secs
from freshbench.report import span
from freshbench.simulation import BATCH_SHARE, aucs
from freshbench.verdict import SLICES, Difference, difference
from monolith import Predictor, load
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.streams import StreamWriter, open_stream

INTERVALS = (0.1, 0.3, 1.25, 6.0, 15.0)
"""Seconds between two publications of changed rows. If 48 hours pass in a minute: 5 and 14 minutes, 1, 5 and 12 hours."""
TICK_SECS = 0.05
"""Events are answered and sent in portions of this length."""
START_SECS = 120.0
"""A run that does not train within this time is given up."""


@dataclass(frozen=True)
class Point:
    """What one interval gives."""

    feed_secs: float
    live: np.ndarray
    """AUC of each slice, float [slices]."""
    frozen: np.ndarray
    """That of the model after the batch part, on the same events."""
    latencies: np.ndarray
    """Seconds from an event to the first look at which it was served, float [portions]."""
    unserved: int
    """Portions that were not served at the end: those of the last interval."""

    @property
    def gain(self) -> Difference:
        """Compare with the model after the batch part. The error is over the slices."""
        return difference(self.live[None], self.frozen[None])


@dataclass(frozen=True)
class LiveReport:
    """The points, and how much faster than in the data time passes."""

    data: str
    online_secs: float
    """What passed, in the time of the data. 0: not known."""
    seconds: float
    """In which it passed."""
    events_per_second: float
    points: Sequence[Point]
    load: float
    """Load average of the machine: other processes delay the loop."""

    def markdown(self) -> str:
        """Return the table."""
        speed = self.online_secs / self.seconds
        faster = f", {speed:,.0f} times as fast as in the data" if speed else ""
        lines = [
            f"### The running loop, {self.data}",
            "",
            f"The online part passes in {self.seconds:g} s, {self.events_per_second:,.0f} events a second{faster}. "
            f"The load average was {self.load:.1f} at the end.",
            "",
            "| feed_secs | in time of the data | AUC | points against the model after the batch part |"
            " event to served, p50 s | p99 s |",
            "|---:|---:|---:|---:|---:|---:|",
        ]
        for point in self.points:
            p50, p99 = np.quantile(point.latencies, [0.5, 0.99]) if len(point.latencies) else (np.nan, np.nan)
            every, auc = span(point.feed_secs / self.seconds, self.online_secs), np.nanmean(point.live)
            lines.append(f"| {point.feed_secs:g} | {every} | {auc:.4f} | {point.gain} | {p50:.3f} | {p99:.3f} |")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return everything that was measured."""
        points = [
            {
                "feed_secs": point.feed_secs,
                "live": point.live.tolist(),
                "frozen": point.frozen.tolist(),
                "latencies": point.latencies.tolist(),
                "unserved": point.unserved,
            }
            for point in self.points
        ]
        return {
            "data": self.data,
            "online_secs": self.online_secs,
            "seconds": self.seconds,
            "events_per_second": self.events_per_second,
            "load": self.load,
            "points": points,
        }


def run_live(source: Source, seconds: float, intervals: Sequence[float] = INTERVALS, seed: int = 0) -> LiveReport:
    """Let the online part of the data pass in `seconds`, once for each interval."""
    made = source(seed)
    first = round(len(made.examples) * BATCH_SHARE)
    online = made.examples.between(first, len(made.examples))
    options = [*source.arguments(), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        with _process([*options, "--model-dir", str(base)], Path(folder) / "base.log") as run:
            if run.wait(600) != 0:
                raise RuntimeError(f"the batch part failed: {(Path(folder) / 'base.log').read_text()[-2000:]}")
        points = [_point(base, Path(folder), options, online, seconds, every) for every in intervals]
    return LiveReport(made.name, online_secs(made), seconds, len(online) / seconds, points, os.getloadavg()[0])


def _point(base: Path, folder: Path, options: list[str], online: Examples, seconds: float, every: float) -> Point:
    """Measure one interval, with a copy of the run."""
    model_dir, url = folder / f"run-{every:g}", str(folder / f"events-{every:g}")
    shutil.copytree(base, model_dir)
    exports = base / "exported_models"
    live, frozen = load(exports), load(exports)
    log = folder / f"run-{every:g}.log"
    command = [*options, "--model-dir", str(model_dir), "--stream", url, "--feed-secs", str(every)]
    with ExitStack() as stack:
        writer = stack.enter_context(_closing(open_stream(url, partitions=1).writer()))
        run = stack.enter_context(_process(command, log))
        follower = TrainingFollower.of_run(live, RunWriters(str(model_dir)))
        stack.callback(follower.close)
        deadline = time.monotonic() + START_SECS
        while not follower.wait_until_read(1.0):
            if run.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run cannot be followed: {log.read_text()[-2000:]}")
        measured = _Passing(online, seconds, live, frozen, writer)
        measured.pass_by(run)
        measured.wait_for_the_last(3 * every + 5)
    labels = online.labels
    return Point(
        every,
        aucs(labels, np.concatenate(measured.live_scores), SLICES),
        aucs(labels, np.concatenate(measured.frozen_scores), SLICES),
        np.array(measured.latencies),
        len(measured.waiting),
    )


class _Passing:
    """Lets the events pass: asks, sends, and looks what is served."""

    def __init__(
        self, online: Examples, seconds: float, live: Predictor, frozen: Predictor, writer: StreamWriter
    ) -> None:
        self._online, self._seconds, self._live, self._frozen, self._writer = online, seconds, live, frozen, writer
        self._probes = served_tables(live)[PROBE]
        self.live_scores: list[np.ndarray] = []
        self.frozen_scores: list[np.ndarray] = []
        self.waiting: dict[int, float] = {}
        """When each portion was stored that is not served yet, by its probe."""
        self.latencies: list[float] = []

    def pass_by(self, run: subprocess.Popen[bytes]) -> None:
        """Let all events pass, at an even rate."""
        size, begun, done, portion = len(self._online), time.monotonic(), 0, 0
        while done < size:
            if run.poll() is not None:
                raise RuntimeError(f"the run ended with exit code {run.returncode} while events came")
            self._look()
            due = min(size, int((time.monotonic() - begun) / self._seconds * size))
            if due - done < size * TICK_SECS / self._seconds and due < size:
                time.sleep(0.002)
                continue
            portion += 1
            self._take(self._online.between(done, due), portion)
            done = due

    def wait_for_the_last(self, timeout: float) -> None:
        """Wait until all portions are served, or the timeout."""
        deadline = time.monotonic() + timeout
        while self.waiting and time.monotonic() < deadline:
            self._look()
            time.sleep(0.002)

    def _take(self, examples: Examples, portion: int) -> None:
        asked = {**batch_of(examples.without_labels()), PROBE: torch.zeros(len(examples), dtype=torch.int64)}
        for predictor, scores in ((self._live, self.live_scores), (self._frozen, self.frozen_scores)):
            scores.append(predictor.predict(asked)[HEAD.name].numpy())
        for value in records(examples, portion):
            self._writer.append(value)
        begun = time.monotonic()
        self._writer.flush(60)
        self.waiting[portion] = begun

    def _look(self) -> None:
        if not self.waiting:
            return
        probes = list(self.waiting)
        there = self._probes.contains(probes).tolist()
        now = time.monotonic()
        for probe, served in zip(probes, there, strict=True):
            if served:
                self.latencies.append(now - self.waiting.pop(probe))


def records(examples: Examples, portion: int) -> Iterator[bytes]:
    """Yield each example as JSON. The last one has the number of the portion as its probe: the others were trained before."""
    columns: dict[str, Sequence[object]] = {"label": examples.labels.tolist()}
    if examples.numbers.shape[1]:
        columns["numbers"] = examples.numbers.tolist()
    for name, ids in examples.ids.items():
        columns[name] = _lists(ids) if isinstance(ids, IdLists) else ids.tolist()
    columns[PROBE] = [0] * (len(examples) - 1) + [portion]
    for values in zip(*columns.values(), strict=True):
        yield orjson.dumps(dict(zip(columns, values, strict=True)))


def _lists(ids: IdLists) -> list[object]:
    return [part.tolist() for part in np.split(ids.values, ids.offsets[1:-1])]


@contextmanager
def _process(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `live_run.py` for the time of a block, and end it."""
    script = Path(__file__).with_name("live_run.py")
    with log.open("wb") as output:
        run = subprocess.Popen([sys.executable, str(script), *arguments], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()
            run.wait()


@contextmanager
def _closing(writer: StreamWriter) -> Iterator[StreamWriter]:
    try:
        yield writer
    finally:
        writer.close()
