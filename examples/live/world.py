"""A site whose users' tastes drift and whose items keep coming. It asks the replica what to show, and streams what happens.

Of 20 items it shows each user the one that the replica ranks first, or half of the time any of them: by those the models are
compared. Every second it says on stdout what there is to see, as a line of JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import orjson
import torch
from scoreboard import Probe, Scoreboard
from world_clock import HISTORY_SECS, WorldClock

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.data.transforms import concat_rows, select_rows
from monolith.errors import UnavailableError
from monolith.features import Batch, Ragged
from monolith.serve import Client, load
from monolith.streams import open_stream

WORLD = {
    "users": 100,
    "items": 100,
    "categories": 10,
    "taste": 2.5,
    "bias": -2.2,
    "drift_hours": 0.1,  # tastes are the opposite of what they were after three minutes
    "new_items_per_hour": 3600,
    "click_delay": 0.5,
    "click_window": 60.0,
}
CANDIDATES, EXPLORED = 20, 0.5
TICK_SECS, REPORT_SECS = 0.02, 1.0


def world() -> ClickStream:
    """Return the world. It begins with the minute of history."""
    return ClickStream(ClickStreamConfig(**WORLD))


class Site:
    """Shows items to users, and streams impressions and clicks."""

    def __init__(self, folder: Path, streams: str, server: str, rate: float) -> None:
        self.world, self.rng = world(), np.random.default_rng()
        self.clock = WorldClock(folder / "world.json", self.world.config.start_time + HISTORY_SECS)
        self.client, self.users_per_tick = Client(server), max(1, round(rate * TICK_SECS))
        self.impressions, self.actions = (
            open_stream(f"{streams}/{name}").writer() for name in ("impressions", "actions")
        )
        self.requests = (f"{time.time_ns():x}-{number}" for number in itertools.count())
        self.clicks_to_come: list[tuple[float, str]] = []
        # The loop exports what it has learnt at each start, so both models know the same when the site opens.
        frozen = load(folder / "model" / "exported_models")
        self.scoreboard = Scoreboard(self.world, lambda columns: frozen.predict(columns)["click"].numpy())
        self.probe = Probe()

    def tick(self, now: float) -> None:
        """Show something to the users who come at this moment."""
        users, age = self.world.draw_users(self.rng, self.users_per_tick), self.clock.tick()
        items = self.world.draw_items(self.rng, len(users) * CANDIDATES, age).reshape(len(users), CANDIDATES)
        offers = self.columns(users.repeat(CANDIDATES), items.reshape(-1))
        probed = self.columns(*self.probe.pairs())
        answer = self.client.infer(concat_rows([offers, probed]))
        scores = answer["click"][: items.size].reshape(items.shape)
        if self.probe.take(answer["click"][items.size :]):
            self.stream(select_rows(probed, torch.tensor([True, False])), np.array([True]), np.zeros(1), now)
        explored, best = self.rng.random(len(users)) < EXPLORED, scores.argmax(1)
        choice = np.where(explored, self.rng.integers(CANDIDATES, size=len(users)), best)
        rows = np.arange(len(users))
        shown = items[rows, choice]
        chances = self.world.click_probability(users, shown, age)
        clicked = self.rng.random(len(users)) < chances
        delays = self.rng.exponential(WORLD["click_delay"], len(users))
        columns = self.columns(users, shown)
        self.stream(columns, clicked, delays, now)
        self.scoreboard.add(columns, shown, scores[rows, choice], chances, clicked, explored, now)
        self.scoreboard.offered(items, items[rows, best], now)
        self.scoreboard.lag = answer.lag

    def columns(self, users: np.ndarray, items: np.ndarray) -> Batch:
        """Return what the model is asked about these users and items."""
        return {**self.world.user_columns(users), **self.world.item_columns(items)}

    def stream(self, columns: Batch, clicked: np.ndarray, delays: np.ndarray, now: float) -> None:
        """Stream impressions, and the clicks that are due."""
        lists = [column.to_lists() if isinstance(column, Ragged) else column.tolist() for column in columns.values()]  # type: ignore[union-attr]
        for row, values in enumerate(zip(*lists, strict=True)):
            request = next(self.requests)
            record = {**dict(zip(columns, values, strict=True)), "event_time": int(now)}
            self.impressions.append(orjson.dumps(record), key=request.encode(), timestamp=int(1000 * now))
            if clicked[row]:
                heapq.heappush(self.clicks_to_come, (now + delays[row], request))
        while self.clicks_to_come and self.clicks_to_come[0][0] <= now:
            at, request = heapq.heappop(self.clicks_to_come)
            self.actions.append(b'{"action":"click"}', key=request.encode(), timestamp=int(1000 * at))

    def report(self, now: float) -> None:
        """Write a line for the view, and see that what was streamed is on disk, and the time until then."""
        self.impressions.flush()
        self.actions.flush()
        self.clock.save()
        report = self.scoreboard.report(now, self.clock.now, self.clock.opened)
        print(json.dumps({"report": report, "fresh_ms": self.probe.median_ms()}), flush=True)

    def close(self) -> None:
        """Flush the streams, and let the world wait until the site opens again."""
        self.impressions.close()
        self.actions.close()
        self.clock.save()


def main() -> None:
    """Run the site until its time is over, or it is asked to end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/live"))
    parser.add_argument("--streams", default="runs/live", help="what the URLs of the streams begin with")
    parser.add_argument("--server", default="127.0.0.1:8000", help="HTTP address of the replica")
    parser.add_argument("--rate", type=float, default=1500.0, help="impressions per second")
    parser.add_argument("--secs", type=float, default=math.inf, help="seconds until the site closes, 0: never")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    site = Site(arguments.folder, arguments.streams, arguments.server, arguments.rate)
    with site.client:
        while not asked_to_end.is_set() and not site.client.ready():
            time.sleep(0.1)
        begun = due = reported = time.time()
        while not asked_to_end.is_set() and (not arguments.secs or due < begun + arguments.secs):
            time.sleep(max(0.0, due - time.time()))
            try:
                site.tick(time.time())
            except UnavailableError as error:  # a replica that is started again
                print(f"nothing is shown: {error}", file=sys.stderr, flush=True)
            # Users who were not served in time have left: a slow site does not catch up.
            due = max(due + TICK_SECS, time.time())
            if due >= reported + REPORT_SECS:
                reported = due
                site.report(due)
        site.close()


if __name__ == "__main__":
    main()
