"""Measure the whole live loop: its peak, and how soon a click is in the answers at a share of the peak.

python benchmarks/loop.py                        examples/live on folders, at half of its peak, about 90 s
python benchmarks/loop.py --share 0.25 --seconds 20
python benchmarks/loop.py --rate 2000            at this many impressions a second, without looking for the peak

The parts are those of examples/live: joiner, trainer and replica, as `monolith launch` starts them. This process takes the place
of the site. It writes impressions, a tenth of which are clicked, and looks for the peak by writing ever more until the trainer
has a backlog, and counting what is trained per second while it keeps one. Windows of the joiner are a second long here.

Ten times a second a user whom nobody has seen clicks an item that nobody has seen. Every few milliseconds the replica is asked
for all such pairs it does not show yet, each next to one that is never clicked. The time is that from the click to the first
answer in which the two differ: written, joined, trained, published and served. What is not shown within 30 s counts as that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "live"))

from scoreboard import PROBE_ITEM, PROBE_USER, Probe
from world import world

import machine
from monolith.data.transforms import select_rows
from monolith.errors import MonolithError
from monolith.features import Batch, Ragged
from monolith.serve import Client
from monolith.streams import open_stream
from monolith.testing.servers import free_ports
from monolith.train.control_server import ControlClient

LIVE = Path(sys.path[0])
START_SECS, TICK_SECS, ASK_SECS, PROBE_SECS = 300.0, 0.01, 0.005, 0.1
COUNT_SECS, GROWTH, RECORDS, CLICKED = 6.0, 1.6, 50_000, 10
WINDOW = ("window_secs=1", "out_of_order_secs=0.5", "idle_secs=1")
"""Negatives come soon, so that all of the load is there after a second. A click does not wait for its window."""
BATCH = 512
"""Rows of a full batch, see examples/live/job.yaml."""


class Loop:
    """Joiner, trainer and replica of examples/live, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(shutil.copytree(LIVE, folder / "live", ignore=shutil.ignore_patterns("runs", "__pycache__")))
        parts = yaml.safe_load((LIVE / "online.yaml").read_text())
        del parts["parts"]["site"]
        parts["parts"]["joiner"]["run"] += "".join(f" --set {one}" for one in WINDOW)
        (self.folder / "bench.yaml").write_text(yaml.safe_dump(parts))
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        with (self.folder / "launch.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "monolith.cli", "launch", "--grace", "35", "bench.yaml"],
                cwd=self.folder,
                env={**os.environ, "HTTP_PORT": self.address.rpartition(":")[2]},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.client = Client(self.address, timeout=30.0)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECS
        while True:
            self.require_running()
            try:
                if self.client.ready():
                    self.status()
                    return
            except MonolithError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"the loop did not start within {START_SECS:g} s: {self.log()}")
            time.sleep(0.2)

    def require_running(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the loop ended: {self.log()}")

    def log(self) -> str:
        return (self.folder / "launch.log").read_text(errors="replace")[-3000:]

    def stream(self, name: str) -> str:
        return str(self.folder / "runs" / "live" / name)

    def status(self) -> tuple[int, int]:
        """Examples that the trainer has not taken yet, and its step."""
        with ControlClient.of_run(self.stream("model"), timeout=30) as client:
            status = client.status()
            return status.lag_records or 0, status.step

    def close(self) -> None:
        self.client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


class Site:
    """Writes impressions and clicks."""

    def __init__(self, loop: Loop) -> None:
        self._impressions, self._actions = (
            open_stream(loop.stream(name)).writer() for name in ("impressions", "actions")
        )
        made, rng = world(), np.random.default_rng(0)
        users = made.draw_users(rng, RECORDS)
        items = made.draw_items(rng, RECORDS, 60.0)
        self.world = made
        self._values = itertools.cycle(list(self._records(columns_of(made, users, items))))
        self._numbers = itertools.count()
        self.written = 0

    def _records(self, columns: Batch) -> Iterator[bytes]:
        at = int(time.time())
        lists = [column.to_lists() if isinstance(column, Ragged) else column.tolist() for column in columns.values()]  # type: ignore[union-attr]
        for values in zip(*lists, strict=True):
            yield orjson.dumps({**dict(zip(columns, values, strict=True)), "event_time": at})

    def write(self, count: int) -> None:
        """Write so many impressions, and the clicks on some of them."""
        now = int(1000 * time.time())
        for value, number in zip(itertools.islice(self._values, count), self._numbers, strict=False):
            self._show(value, b"%x" % number, now, clicked=number % CLICKED == 0)
        self.written += count

    def click(self, columns: Batch, key: str) -> None:
        """Write one impression that is clicked at once."""
        (value,) = self._records(columns)
        self._show(value, key.encode(), int(1000 * time.time()), clicked=True)

    def _show(self, value: bytes, key: bytes, now: int, *, clicked: bool) -> None:
        self._impressions.append(value, key=key, timestamp=now)
        if clicked:
            self._actions.append(b'{"action":"click"}', key=key, timestamp=now)

    def close(self) -> None:
        self._impressions.close()
        self._actions.close()


def columns_of(made: object, users: np.ndarray, items: np.ndarray) -> Batch:
    return {**made.user_columns(users), **made.item_columns(items)}  # type: ignore[attr-defined]


def peak_of(loop: Loop, site: Site) -> float:
    """Return how many examples a second are trained while there are always more."""
    rate, trained, counted = 500.0, 0, 0.0
    begun = time.monotonic()
    while True:
        loop.require_running()
        lag, step = loop.status()
        now, backlog = time.monotonic(), max(8 * BATCH, 0.3 * rate)
        if counted and now >= counted + COUNT_SECS:
            # With a backlog every batch is full.
            return BATCH * (step - trained) / (now - counted)
        if not counted and lag > backlog:
            counted, trained = now, step
        if not counted:
            rate = 500.0 * GROWTH ** (now - begun)
        # A little more than is trained is enough, and everything that waits has to be trained before clicks are measured.
        for _ in range(10):
            site.write(int(rate / 100) if lag < 2 * backlog else 0)
            time.sleep(0.01)


def drain(loop: Loop) -> None:
    """Wait until everything is trained, and windows that are open are closed."""
    quiet = time.monotonic()
    while time.monotonic() < quiet + 3.0:
        loop.require_running()
        if loop.status()[0]:
            quiet = time.monotonic()
        time.sleep(0.1)


@dataclass
class Click:
    """A click that no answer shows yet."""

    number: int
    at: float
    before: float


class Clicks:
    """Clicks of pairs that nobody has seen, and how long each takes to be in an answer."""

    def __init__(self, loop: Loop, site: Site) -> None:
        self._loop, self._site = loop, site
        self._waiting: list[Click] = []
        self.secs: list[float] = []
        self._first = 2 * 10**6 * (time.time_ns() // 10**9 % 10**5)

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, number: int) -> None:
        """Click the next pair."""
        columns = self._pairs([number])
        before = self._differences(columns)[0]
        self._waiting.append(Click(number, time.monotonic(), before))
        self._site.click(select_rows(columns, torch.tensor([True, False])), f"p{number:x}")

    def look(self) -> None:
        """Ask for all pairs that are not shown yet."""
        if not self._waiting:
            return
        found = self._differences(self._pairs([click.number for click in self._waiting]))
        now = time.monotonic()
        left = []
        for click, difference in zip(self._waiting, found, strict=True):
            late = now - click.at > Probe.GIVE_UP_SECS
            if late or abs(difference - click.before) > Probe.LEARNT:
                self.secs.append(now - click.at)
            else:
                left.append(click)
        self._waiting = left

    def _pairs(self, numbers: list[int]) -> Batch:
        ids = self._first + (2 * np.array(numbers)[:, None] + np.arange(2)).reshape(-1)
        return columns_of(self._site.world, PROBE_USER + ids, PROBE_ITEM + ids)

    def _differences(self, columns: Batch) -> np.ndarray:
        scores = self._loop.client.infer(columns)["click"].astype(np.float64)
        logits = np.log(scores / (1 - scores))
        return logits[::2] - logits[1::2]


def latencies(loop: Loop, site: Site, rate: float, seconds: float) -> tuple[np.ndarray, float]:
    """Feed `rate` impressions a second. Returns the seconds from each click to its answer, and the rate that was reached."""
    clicks, numbers = Clicks(loop, site), itertools.count()
    begun = asked = probed = time.monotonic()
    first = site.written
    while (now := time.monotonic()) < begun + seconds or len(clicks):
        if now < begun + seconds:
            due = first + int((now - begun) * rate) - site.written
            # In portions, so that a click does not wait for those that are late.
            site.write(max(0, min(due, int(2 * rate * TICK_SECS) + 1)))
            reached = (site.written - first) / (time.monotonic() - begun)
        if now >= probed and now < begun + seconds:
            probed += PROBE_SECS
            clicks.begin(next(numbers))
        if now >= asked:
            asked = now + ASK_SECS
            clicks.look()
        loop.require_running()
        time.sleep(0.001)
    return np.array(clicks.secs), reached


@contextmanager
def running() -> Iterator[Loop]:
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder))
        try:
            loop.wait_until_ready()
            yield loop
        finally:
            loop.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.5, help="of the peak, at which clicks are measured")
    parser.add_argument("--rate", type=float, help="impressions a second, instead of a share of the peak")
    parser.add_argument("--seconds", type=float, default=40.0, help="for which clicks are made")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with running() as loop:
        site = Site(loop)
        peak = None
        rate = options.rate
        if rate is None:
            peak = peak_of(loop, site)
            print(f"peak: {peak:,.0f} examples/s trained while there is a backlog", flush=True)
            rate = options.share * peak
            drain(loop)
        secs, reached = latencies(loop, site, rate, options.seconds)
        site.close()
    shown = int((secs < Probe.GIVE_UP_SECS).sum())
    of_peak = "" if peak is None else f", {reached / peak:.0%} of the peak"
    print(f"load: {reached:,.0f} impressions/s of {rate:,.0f} asked for{of_peak}, for {options.seconds:g} s")
    p50, p90, p99 = 1000 * np.quantile(secs, [0.5, 0.9, 0.99])
    print(
        f"click -> first answer that shows it, {len(secs)} clicks, {len(secs) - shown} not within {Probe.GIVE_UP_SECS:g} s:"
    )
    print(f"p50 {p50:,.0f} ms, p90 {p90:,.0f} ms, p99 {p99:,.0f} ms, max {1000 * secs.max():,.0f} ms")
    print(", ".join(f"{name} {value}" for name, value in machine.describe().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
