"""What the site knows about the models that rank for it: AUC, new favourites, and how soon a click is in the answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from monolith.data.synthetic import ClickStream
from monolith.data.transforms import select_rows
from monolith.features import Batch
from monolith.metrics import AUC

WINDOW_SECS, NEW_SECS = 10.0, 60.0
PROBE_USER, PROBE_ITEM = 1 << 40, 1 << 41


class Scoreboard:
    """Compares the model that keeps learning with the one that was frozen, over the last ten seconds."""

    def __init__(self, world: ClickStream, frozen: Callable[[Batch], np.ndarray]) -> None:
        self.world, self.frozen = world, frozen
        self.lag: float | None = None
        self.impressions = self.clicks = 0
        self._scored: deque[tuple[float, np.ndarray]] = deque()
        self._offers: deque[tuple[float, np.ndarray, np.ndarray]] = deque()
        self._policies: deque[tuple[float, np.ndarray]] = deque()

    def add(
        self,
        columns: Batch,
        items: np.ndarray,
        online: np.ndarray,
        chances: np.ndarray,
        clicked: np.ndarray,
        explored: np.ndarray,
        now: float,
    ) -> None:
        """Take in impressions: what the replica thought of them before it could learn them, and what came of them."""
        self.impressions += len(items)
        self.clicks += int(clicked.sum())
        counts = [explored.sum(), clicked[explored].sum(), (~explored).sum(), clicked[~explored].sum()]
        self._keep(self._policies, (now, np.array(counts)))
        if explored.any():
            frozen = self.frozen(select_rows(columns, torch.from_numpy(explored)))
            scores = np.stack([online[explored], frozen, chances[explored], clicked[explored]])
            self._keep(self._scored, (now, scores))

    def offered(self, items: np.ndarray, best: np.ndarray, now: float) -> None:
        """Take in the items that were on offer, and those that the replica ranked first."""
        self._keep(self._offers, (now, items.reshape(-1), best))

    @staticmethod
    def _keep(kept: deque[Any], entry: tuple[Any, ...]) -> None:
        kept.append(entry)
        while kept[0][0] < entry[0] - WINDOW_SECS:
            kept.popleft()

    def report(self, now: float, world_now: float, opened: float) -> dict[str, object]:
        """Return what there is to see at this moment, `world_now` in the world, where the site was opened at `opened`."""
        return {
            "time": now,
            "impressions": self.impressions,
            "clicks": self.clicks,
            "lag_ms": None if self.lag is None else 1000 * self.lag,
            "auc": self._aucs(),
            "turned": 360 * (world_now - opened) / (3600 * self.world.config.drift_hours),
            "click_rate": self._click_rates(),
            "new_item": self._new_favourite(world_now),
        }

    def _aucs(self) -> dict[str, float]:
        if not self._scored:
            return {}
        *scores, labels = np.concatenate([part for _, part in self._scored], axis=1)
        aucs = {}
        for name, score in zip(("online", "frozen", "best"), scores, strict=True):
            metric = AUC()
            metric.update(torch.from_numpy(score), torch.from_numpy(labels))
            aucs[name] = metric.compute()
        return aucs

    def _click_rates(self) -> dict[str, float]:
        if not self._policies:
            return {}
        random, random_clicks, ranked, ranked_clicks = sum(counts for _, counts in self._policies)
        return {"random": random_clicks / max(random, 1), "ranked": ranked_clicks / max(ranked, 1)}

    def _new_favourite(self, now: float) -> dict[str, float] | None:
        """Return the item of the last minute that is ranked first most often where it is on offer."""
        first, known = self.world.items_at(now - NEW_SECS), self.world.items_at(now)
        if not self._offers or known <= first:
            return None
        offers = Counter(np.concatenate([items for _, items, _ in self._offers]).tolist())
        wins = Counter(np.concatenate([best for _, _, best in self._offers]).tolist())
        fresh = [item for item in range(first, known) if offers[item] >= 50]
        if not fresh:
            return None
        item = max(fresh, key=lambda item: wins[item] / offers[item])
        config = self.world.config
        born = config.start_time + (item - config.items + 1) / config.new_items_per_hour * 3600
        return {"item": item, "age_secs": now - born, "offers": offers[item], "wins": wins[item]}


class Probe:
    """Measures the loop about once a second, from a click to the first answer that has learnt from it.

    The click is that of a user and an item that nobody has seen. Dense weights change all answers, so what counts is the
    difference to another such pair, which is never clicked.
    """

    GIVE_UP_SECS, LEARNT = 30.0, 0.01

    def __init__(self) -> None:
        self._number = 0
        self._before = self._clicked_at = self._next = 0.0
        self._waiting = False
        self._secs: deque[float] = deque(maxlen=30)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the users and items to ask for: the pair that is clicked, and the other one."""
        numbers = 2 * (time.time_ns() // 10**9 // 3600) * 10**6 + 2 * self._number + np.arange(2)
        return PROBE_USER + numbers, PROBE_ITEM + numbers

    def take(self, scores: np.ndarray) -> bool:
        """Take in the scores of the pairs. Returns whether the first pair is clicked now."""
        now, logits = time.time(), np.log(scores / (1 - scores))
        difference = float(logits[0] - logits[1])
        if not self._waiting and now >= self._next:
            self._waiting, self._before, self._clicked_at = True, difference, now
            return True
        late = now - self._clicked_at > self.GIVE_UP_SECS
        if self._waiting and (late or abs(difference - self._before) > self.LEARNT):
            self._secs.append(now - self._clicked_at)
            self._waiting, self._number, self._next = False, self._number + 1, now + 1
        return False

    def median_ms(self) -> float | None:
        """Return the median of the last times. None before the first."""
        return 1000 * float(np.median(self._secs)) if self._secs else None
