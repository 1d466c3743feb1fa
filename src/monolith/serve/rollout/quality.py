"""How good the served predictions of each version are by their labels, and whether a version breaks a bound."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from monolith.metrics import AUC, Calibration, LogLoss
from monolith.metrics.metric import Floats
from monolith.serve.rollout.labels import LabelledPredictions
from monolith.serve.rollout.plan import QualityBounds, RolloutPlan

__all__ = ["QualityBoard", "QualityNumbers", "QualityTally", "WindowedQuality", "broken_bound"]

WINDOW_BUCKETS = 12
"""A window moves on by a twelfth of its length at a time."""
_BUCKET_SCORES = 1 << 13
_TOTAL_SCORES = 1 << 16
"""Distinct scores up to which an AUC is exact. Beyond that its error is bounded and added to the margin of a verdict."""


@dataclass(frozen=True, kw_only=True)
class QualityNumbers:
    """Quality of the labelled predictions of one version and head. NaN where there are too few."""

    labels: int
    """Labelled predictions, invalid ones included."""
    invalid: int
    """Of these, predictions that are NaN or outside [0, 1]. They are left out of what follows."""
    mean_prediction: float
    mean_label: float
    log_loss: float
    log_loss_se: float
    """Standard error, as if examples were independent."""
    calibration: float
    """Mean prediction / mean label. Infinite without positive labels."""
    calibration_margin: float
    """How far apart mean prediction and mean label are by chance: one standard error of their difference."""
    auc: float
    auc_se: float
    """Standard error after Hanley and McNeil (1982), plus the error bound of an AUC over too many distinct scores."""

    def as_json(self) -> dict[str, float | None]:
        """Return the numbers by name, None for those that are not finite."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class QualityTally:
    """Streaming quality of labelled predictions in bounded memory. Not thread-safe.

    Example:
        >>> tally = QualityTally()
        >>> tally.add(np.array([0.9, 0.2, 0.4]), np.array([1.0, 0.0, 0.0]))
        >>> numbers = tally.numbers()
        >>> numbers.labels, numbers.auc, round(numbers.log_loss, 4), round(numbers.calibration, 2)
        (3, 1.0, 0.2798, 1.5)
    """

    def __init__(self, scores: int = _TOTAL_SCORES) -> None:
        self._log_loss, self._calibration, self._auc = LogLoss(), Calibration(edges=()), AUC(scores)
        self.labels = 0
        self._invalid = 0
        # Σp, Σy, Σ loss², Σ(p - y)², Σp(1 - p)
        self._sums = np.zeros(5)

    def add(self, predictions: Floats, labels: Floats) -> None:
        """Add examples [n]. Labels are in [0, 1]."""
        valid = (predictions >= 0) & (predictions <= 1)  # False for NaN
        self.labels += len(labels)
        self._invalid += int(len(valid) - valid.sum())
        p, y = predictions[valid], labels[valid]
        if not len(p):
            return
        for metric in (self._log_loss, self._calibration, self._auc):
            metric.update(p, y)
        clipped = p.clip(self._log_loss.epsilon, 1 - self._log_loss.epsilon)
        losses = -(y * np.log(clipped) + (1 - y) * np.log1p(-clipped))
        self._sums += (p.sum(), y.sum(), losses @ losses, np.square(p - y).sum(), p @ (1 - p))

    def merge(self, other: Self) -> None:
        """Add the examples of `other`, which does not change."""
        self.labels += other.labels
        self._invalid += other._invalid
        self._sums += other._sums
        self._log_loss.merge(other._log_loss)
        self._calibration.merge(other._calibration)
        self._auc.merge(other._auc)

    def numbers(self) -> QualityNumbers:
        """Compute everything."""
        predicted, positive, squared_losses, squared_errors, spread = map(float, self._sums)
        valid = self.labels - self._invalid
        log_loss, auc = self._log_loss.compute(), self._auc.compute()
        variance = max(0.0, squared_losses / valid - log_loss**2) if valid else math.nan
        # Where labels are rare, those seen say too little about chance. What the model expects of chance is the second opinion.
        margin = math.sqrt(max(squared_errors, spread)) / valid if valid else math.nan
        return QualityNumbers(
            labels=self.labels,
            invalid=self._invalid,
            mean_prediction=predicted / valid if valid else math.nan,
            mean_label=positive / valid if valid else math.nan,
            log_loss=log_loss,
            log_loss_se=math.sqrt(variance / valid) if valid else math.nan,
            calibration=self._calibration.compute(),
            calibration_margin=margin,
            auc=auc,
            auc_se=_auc_error(auc, positive, valid - positive) + self._auc.error_bound(),
        )


def _auc_error(auc: float, positives: float, negatives: float) -> float:
    if math.isnan(auc) or positives < 1 or negatives < 1:
        return math.nan
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    pairs = positives * negatives
    variance = auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2)
    return math.sqrt(max(0.0, variance) / pairs)


class WindowedQuality:
    """Quality of one version and head over the answers of the last seconds, and over all. Not thread-safe.

    An example belongs to the time of its answer, not of its label, so that two versions are compared over the same requests
    even if labels come late. What was answered before `started` counts for the total only.
    """

    def __init__(self, started: float, window_secs: float) -> None:
        self.total = QualityTally()
        self.restart(started, window_secs)

    def restart(self, started: float, window_secs: float) -> None:
        """Begin another window. The total stays."""
        self._started, self._width = started, window_secs / WINDOW_BUCKETS
        self._buckets: dict[int, QualityTally] = {}

    def add(self, predictions: Floats, labels: Floats, answered: Floats, now: float) -> None:
        """Add examples [n] with the times of their answers [n]."""
        self.total.add(predictions, labels)
        self._drop_old(now)
        numbers = np.floor((answered - self._started) / self._width).astype(np.int64)
        for number in np.unique(numbers).tolist():
            if number >= max(0, self._oldest(now)):
                chosen = numbers == number
                bucket = self._buckets.setdefault(number, QualityTally(_BUCKET_SCORES))
                bucket.add(predictions[chosen], labels[chosen])

    def window(self, now: float) -> QualityTally:
        """Return the tally of the window that ends now."""
        self._drop_old(now)
        tally = QualityTally()
        for bucket in self._buckets.values():
            tally.merge(bucket)
        return tally

    def _drop_old(self, now: float) -> None:
        oldest = self._oldest(now)
        for number in [number for number in self._buckets if number < oldest]:
            del self._buckets[number]

    def _oldest(self, now: float) -> int:
        return math.floor((now - self._started) / self._width) - WINDOW_BUCKETS + 1


class _Difference:
    """How far the predictions of a shadow are from those that were returned."""

    def __init__(self) -> None:
        self.predictions = self.incomparable = 0
        self.total = self.largest = 0.0

    def add(self, distances: Floats) -> None:
        finite = distances[np.isfinite(distances)]
        self.predictions += distances.size
        self.incomparable += distances.size - finite.size
        if finite.size:
            self.total += float(finite.sum())
            self.largest = max(self.largest, float(finite.max()))

    def as_json(self) -> dict[str, float | None]:
        compared = self.predictions - self.incomparable
        return {
            "predictions": self.predictions,
            "incomparable": self.incomparable,
            "mean_absolute_difference": self.total / compared if compared else None,
            "max_absolute_difference": self.largest if compared else None,
        }


class QualityBoard:
    """The quality of all versions and heads of all models, and the differences of shadows. Thread-safe.

    Of each model the quality of the versions in its plan and of the `MAX_OTHERS` others that were labelled last is kept.
    """

    MAX_OTHERS = 4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of its own, because requests take it: a window that is being merged must not hold them up.
        self._difference_lock = threading.Lock()
        self._tallies: dict[tuple[str, int, str], WindowedQuality] = {}
        self._differences: dict[tuple[str, int], _Difference] = {}
        self._windows: dict[str, tuple[float, RolloutPlan]] = {}
        self._labels: dict[str, int] = {}
        self._judge_at: dict[str, int] = {}
        self._written: tuple[tuple[int, int], dict[tuple[str, int], dict[str, object]]] | None = None
        self._changes = 0

    def restart(self, plan: RolloutPlan, now: float) -> None:
        """Begin the windows of a model anew under `plan`. Answers before `now` count no longer for a verdict."""
        with self._lock:
            self._windows[plan.model] = (now, plan)
            self._changes += 1
            self._judge_at[plan.model] = 0
            for (model, _, _), quality in self._tallies.items():
                if model == plan.model:
                    quality.restart(now, plan.bounds.window_secs)
        with self._difference_lock:
            for key in [key for key in self._differences if key[0] == plan.model and key[1] not in plan.shadows]:
                del self._differences[key]

    def add(self, batches: Iterable[LabelledPredictions], now: float) -> set[str]:
        """Add labelled predictions. Returns the models whose verdict may have changed."""
        touched: set[str] = set()
        with self._lock:
            self._changes += 1
            for batch in batches:
                key = (batch.model, batch.version, batch.head)
                quality = self._tallies.pop(key, None) or self._new_tally(batch.model)
                self._tallies[key] = quality  # the last labelled is last
                quality.add(batch.predictions, batch.labels, batch.answered, now)
                self._labels[batch.model] = self._labels.get(batch.model, 0) + len(batch.labels)
                touched.add(batch.model)
            for model in touched:
                self._drop_others(model)
        return touched

    def compare(self, model: str, version: int, distances: Floats) -> None:
        """Add the distances between the predictions of a shadow and those that were returned."""
        with self._difference_lock:
            self._differences.setdefault((model, version), _Difference()).add(distances)

    def verdict(self, plan: RolloutPlan, now: float, *, version: int) -> str | None:
        """Return the bound that `version` of the plan's model breaks, in words. None if it breaks none.

        While labels come, it is judged again after each hundredth more of them, because merging the window takes milliseconds.
        """
        with self._lock:
            labels = self._labels.get(plan.model, 0)
            if labels < self._judge_at.get(plan.model, 0):
                return None
            self._judge_at[plan.model] = labels + max(1, labels // 100)
            for head in [head for model, other, head in self._tallies if (model, other) == (plan.model, version)]:
                judged = self._tallies[plan.model, version, head].window(now).numbers()
                stable = None if version == plan.stable else self._tallies.get((plan.model, plan.stable, head))
                against = None if stable is None else stable.window(now).numbers()
                if (broken := broken_bound(plan.bounds, judged, against)) is not None:
                    return f"head {head!r}: {broken}"
        return None

    def as_json(self, now: float) -> dict[str, dict[str, dict[str, object]]]:
        """Return by model and version: the numbers of each head (`window` and `total`), and `shadow`, its difference."""
        found: dict[str, dict[str, dict[str, object]]] = {}
        with self._lock:
            for (model, version), heads in self._numbers(now).items():
                found.setdefault(model, {})[str(version)] = {"heads": heads}
        with self._difference_lock:
            for (model, version), difference in sorted(self._differences.items()):
                of_version = found.setdefault(model, {}).setdefault(str(version), {"heads": {}})
                of_version["shadow"] = difference.as_json()
        return found

    def table(self, now: float) -> dict[str, dict[int, dict[str, object]]]:
        """Return numbers by model, version and name: those of the window, and how many labels there were in all.

        The name of a number begins with that of its head if the version has several.
        """
        return {
            model: {int(version): _flat(known) for version, known in versions.items()}
            for model, versions in self.as_json(now).items()
        }

    def _numbers(self, now: float) -> dict[tuple[str, int], dict[str, object]]:
        """Return the numbers by model, version and head. A page asks every second, so they are kept until something changes."""
        known = self._changes, int(now)
        if self._written is None or self._written[0] != known:
            numbers: dict[tuple[str, int], dict[str, object]] = {}
            for (model, version, head), quality in sorted(self._tallies.items()):
                numbers.setdefault((model, version), {})[head] = {
                    "window": quality.window(now).numbers().as_json(),
                    "total": quality.total.numbers().as_json(),
                }
            self._written = known, numbers
        return self._written[1]

    def _new_tally(self, model: str) -> WindowedQuality:
        started, plan = self._windows.get(model, (0.0, None))
        return WindowedQuality(started, QualityBounds().window_secs if plan is None else plan.bounds.window_secs)

    def _drop_others(self, model: str) -> None:
        plan = self._windows.get(model, (0.0, None))[1]
        kept = () if plan is None else plan.versions
        others = dict.fromkeys(version for name, version, _ in self._tallies if name == model and version not in kept)
        for version in list(others)[: -self.MAX_OTHERS]:
            for key in [key for key in self._tallies if key[:2] == (model, version)]:
                del self._tallies[key]


_SHOWN = ("labels", "log_loss", "calibration", "auc", "mean_prediction", "mean_label")


def _flat(known: Mapping[str, Any]) -> dict[str, object]:
    numbers: dict[str, object] = {}
    for head, parts in known["heads"].items():
        prefix = f"{head}_" if len(known["heads"]) > 1 else ""
        numbers.update({f"{prefix}{name}": parts["window"][name] for name in _SHOWN})
        numbers[f"{prefix}total_labels"] = parts["total"]["labels"]
    if "shadow" in known:
        numbers["shadow_mean_absolute_difference"] = known["shadow"]["mean_absolute_difference"]
    return numbers


def broken_bound(bounds: QualityBounds, judged: QualityNumbers, against: QualityNumbers | None) -> str | None:
    """Return the sentence that names the first bound which `judged` breaks, with the numbers. None if it breaks none.

    Differences are judged only if `against`, the stable version, is given and has enough labels too.

    Example:
        >>> good, bad = QualityTally(), QualityTally()
        >>> labels = np.tile([1.0, 0.0, 0.0, 0.0], 500)
        >>> good.add(0.1 + 0.6 * labels, labels)
        >>> bad.add(0.7 - 0.6 * labels, labels)
        >>> broken_bound(QualityBounds(max_calibration_error=None), bad.numbers(), good.numbers())
        'log loss 1.479 is 1.31 above that of the stable version, 0.1682; at most 0.02 is allowed (2000 and 2000 labels)'
        >>> broken_bound(QualityBounds(min_labels=5000), bad.numbers(), good.numbers())
    """
    if judged.labels < bounds.min_labels:
        return None
    broken = _broken_alone(bounds, judged)
    if broken is None and against is not None and against.labels >= bounds.min_labels:
        broken = _broken_beside(bounds, judged, against)
    return broken


def _broken_alone(bounds: QualityBounds, n: QualityNumbers) -> str | None:
    z, seen = bounds.confidence, f"({n.labels} labels)"
    most = bounds.max_invalid_share
    if most is not None and n.invalid > most * n.labels:
        return f"{n.invalid} of {n.labels} labelled predictions are NaN or outside [0, 1]; at most {most:.4g} of them may be"
    most = bounds.max_calibration_error
    if most is not None:
        # Without a division, so that it also holds where no label was positive.
        apart = abs(n.mean_prediction - n.mean_label)
        if apart - z * n.calibration_margin > most * n.mean_label:
            return (
                f"calibration {n.calibration:.4g} (mean prediction {n.mean_prediction:.4g}, mean label {n.mean_label:.4g}) "
                f"is further than {most:.4g} from 1 {seen}"
            )
    most = bounds.max_log_loss
    if most is not None and n.log_loss - z * n.log_loss_se > most:
        return f"log loss {n.log_loss:.4g} is above {most:.4g} {seen}"
    least = bounds.min_auc
    if least is not None and n.auc + z * n.auc_se < least:
        return f"AUC {n.auc:.4g} is below {least:.4g} {seen}"
    return None


def _broken_beside(bounds: QualityBounds, n: QualityNumbers, stable: QualityNumbers) -> str | None:
    z, seen = bounds.confidence, f"({n.labels} and {stable.labels} labels)"
    most, worse = bounds.max_log_loss_difference, n.log_loss - stable.log_loss
    if most is not None and worse - z * math.hypot(n.log_loss_se, stable.log_loss_se) > most:
        return (
            f"log loss {n.log_loss:.4g} is {worse:.4g} above that of the stable version, {stable.log_loss:.4g}; "
            f"at most {most:.4g} is allowed {seen}"
        )
    least, better = bounds.min_auc_difference, n.auc - stable.auc
    if least is not None and better + z * math.hypot(n.auc_se, stable.auc_se) < least:
        return (
            f"AUC {n.auc:.4g} differs by {better:.4g} from that of the stable version, {stable.auc:.4g}; "
            f"at least {least:.4g} is expected {seen}"
        )
    return None
