"""Fewer negatives, more positives, copies by action, with the bookkeeping that keeps predictions calibrated.

Training on negatives kept with rate r shifts the log odds by -ln(r). A loss on `z - ln(sample_rate)` undoes that, so the column
`sample_rate` must be r on positives too: it is a property of the data, not of a single row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field

from monolith.config import Config
from monolith.data.transforms.compose import Seeded
from monolith.data.transforms.rows import labels_shape, labels_up_to, numbers_of, repeat, rows_with, select_rows
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = [
    "InstanceReweight",
    "NegativeSample",
    "SpecialStrategy",
    "StrategyRule",
    "UpsamplePositives",
    "leading_action",
    "most_prior_action",
]


class NegativeSample(Seeded):
    """Drops rows whose label is below `threshold` with probability `drop_rate`, or that of their action.

    The row's action of highest `action_priority` decides the rate if it is in `action_drop_rates`. `record` says what is noted
    on the kept rows: with "sample_rate" the column of that name is multiplied by 1 - drop_rate on every row, with "weight" the
    column `instance_weight` of kept negatives is divided by the probability they were kept with, which is right for rates that
    differ by action too.

    Example:
        >>> sample = NegativeSample(0.5, seed=3)
        >>> kept = sample({"label": torch.tensor([1.0] + [0.0] * 9)})
        >>> kept["label"].tolist(), set(kept["sample_rate"].tolist())
        ([1.0, 0.0, 0.0, 0.0], {0.5})
    """

    def __init__(
        self,
        drop_rate: float,
        *,
        label_index: int = 0,
        threshold: float = 0.5,
        action_priority: tuple[int, ...] = (),
        action_drop_rates: dict[int, float] | None = None,
        record: Literal["sample_rate", "weight"] | None = "sample_rate",
        seed: int = 0,
        label: str = "label",
        actions: str = "actions",
    ) -> None:
        super().__init__(seed=seed)
        self._rates = dict(action_drop_rates or {})
        for rate in (drop_rate, *self._rates.values()):
            if not 0 <= rate <= 1:
                raise ConfigError(f"drop_rate: expected a probability, got {rate}")
        if self._rates and record == "sample_rate":
            raise ConfigError(
                "record: one sample rate cannot describe rates that differ by action; use record='weight'"
            )
        if record == "sample_rate" and drop_rate == 1:
            raise ConfigError("drop_rate: 1 leaves a sample rate of 0, whose logarithm does not exist; use record=None")
        self._drop_rate, self._label_index, self._threshold = drop_rate, label_index, threshold
        self._priority, self._record, self._label, self._actions = action_priority, record, label, actions

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        labels = labels_up_to(batch, self._label, self._label_index)
        negative = labels[:, self._label_index] < self._threshold
        drop = torch.full((len(labels),), self._drop_rate, dtype=torch.float64)
        if self._rates:
            action, known = most_prior_action(column_of(batch, self._actions), self._priority)
            for listed, rate in self._rates.items():
                drop[known & (action == listed)] = rate
        kept = ~negative | (torch.from_numpy(self._rng.random(len(labels))) >= drop)
        batch = self._recorded(batch, negative, drop)
        return select_rows(batch, kept)

    def _recorded(self, batch: Batch, negative: torch.Tensor, drop: torch.Tensor) -> Batch:
        if self._record is None:
            return batch
        name = "sample_rate" if self._record == "sample_rate" else "instance_weight"
        before = numbers_of(batch, name) if name in batch else torch.ones(len(drop))
        factor = (
            (1 - drop) if self._record == "sample_rate" else torch.where(negative & (drop < 1), 1 / (1 - drop), 1.0)
        )
        return {**batch, name: (before * factor).to(before.dtype)}


class UpsamplePositives(Config):
    """Repeats rows with a label of at least `threshold` `copies` times, and divides `sample_rate` by `copies` on every row.

    Example:
        >>> more = UpsamplePositives(copies=2)({"label": torch.tensor([0.0, 1.0])})
        >>> more["label"].tolist(), more["sample_rate"].tolist()
        ([0.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    """

    copies: Annotated[int, Field(ge=1)]
    """How often a positive row comes."""
    threshold: float = 0.5
    """A row with this label or a greater one is positive."""
    label: str = "label"
    """The column of labels: one per row."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        positive = numbers_of(batch, self.label) >= self.threshold
        rate = numbers_of(batch, "sample_rate") if "sample_rate" in batch else torch.ones(len(positive))
        times = torch.where(positive, self.copies, 1)
        rows = repeat(torch.arange(len(times)), times)
        return select_rows({**batch, "sample_rate": rate / self.copies}, rows)


class InstanceReweight(Config):
    """Copies each row as often as its actions weigh, and relabels it by its action of highest priority.

    Copies of actions A: 1 (0 for none), then plus ("add") or times ("multiply") the weight of every action of A that has the
    highest priority or none. A row without actions stays once. A row whose earlier emission had `pre_actions`: if its action
    has no higher priority, it is dropped. If the label changed, it comes as often as both together, so that it outweighs the
    copies of the earlier emission. If not, it comes by the difference, and with the opposite label if it came too often.

    Example:
        >>> reweight = InstanceReweight(weights={7: 3}, labels={7: 1}, action_priority=(7,), method="multiply")
        >>> batch = {"label": torch.tensor([-1.0, -1.0]), "actions": Ragged.from_lists([[7], [5]])}
        >>> reweight(batch)["label"].tolist()
        [1.0, 1.0, 1.0, -1.0]
    """

    weights: dict[int, Annotated[int, Field(ge=0)]]
    """Weight of an action."""
    labels: dict[int, int] = {}
    """New label of a row by its action of highest priority."""
    action_priority: tuple[int, ...] = ()
    """Actions by descending priority."""
    method: Literal["add", "multiply"] = "add"
    """How the weights make a number of copies."""
    label: str = "label"
    """The column of labels: one per row."""
    actions: str = "actions"
    """The column of actions: `Ragged`."""
    pre_actions: str = "pre_actions"
    """The column of actions known when the row was emitted before: `Ragged`, or absent."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        labels = numbers_of(batch, self.label)
        none = Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(num_rows(batch) + 1, dtype=torch.int64))
        current, before = column_of(batch, self.actions), batch.get(self.pre_actions, none)
        cur_rank, cur_copies, cur_label, cur_known = self._read(current, labels)
        pre_rank, pre_copies, pre_label, pre_known = self._read(before, labels)
        labels = torch.where(cur_known, cur_label, labels)
        advanced, fast = pre_rank > cur_rank, pre_known
        same = fast & (pre_label == labels)
        copies = torch.where(fast & ~same, pre_copies + cur_copies, cur_copies)
        copies = torch.where(same, (pre_copies - cur_copies).abs(), copies)
        labels = torch.where(same & (pre_copies > cur_copies), -labels, labels)
        untouched = (pre_rank == _NO_ACTION) & (cur_rank == _NO_ACTION)
        copies = torch.where(advanced, copies, untouched.long())
        rows = repeat(torch.arange(len(labels)), copies)
        return select_rows({**batch, self.label: labels}, rows)

    def _read(self, column: torch.Tensor | Ragged, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return for each row the rank of its action of highest priority, copies, label of that action, and whether it has
        one."""
        if not isinstance(column, Ragged):
            raise InvalidArgumentError("actions: expected a Ragged, got a tensor")
        lengths, rowids = column.row_lengths(), column.value_rowids()
        action, known = most_prior_action(column, self.action_priority)
        ranks = _rank(column.values, self.action_priority)
        rank = torch.where(lengths > 0, _UNKNOWN, _NO_ACTION)
        rank = rank.scatter_reduce(0, rowids, ranks, "amin")
        counts = (ranks == _UNKNOWN) | (known[rowids] & (column.values == action[rowids]))
        copies = (lengths > 0).long()
        for listed, weight in self.weights.items():
            times = torch.zeros_like(lengths).scatter_add(0, rowids, (counts & (column.values == listed)).long())
            copies = copies + weight * times if self.method == "add" else copies * weight**times
        label, relabelled = labels, torch.zeros_like(known)
        for listed, value in self.labels.items():
            here = known & (action == listed)
            label, relabelled = torch.where(here, float(value), label), relabelled | here
        return rank, copies, label, relabelled


_UNKNOWN = 2**62
_NO_ACTION = 2**63 - 1


def _rank(actions: torch.Tensor, priority: tuple[int, ...]) -> torch.Tensor:
    ranks = torch.full(actions.shape, _UNKNOWN, dtype=torch.int64)
    for place, listed in enumerate(priority):
        ranks[actions == listed] = place
    return ranks


def most_prior_action(actions: torch.Tensor | Ragged, priority: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's action that is first in `priority`, and whether there is one. Without `priority`, its first action.

    Example:
        >>> action, known = most_prior_action(Ragged.from_lists([[1, 2], [3], []]), priority=(2, 1))
        >>> action[known].tolist(), known.tolist()
        ([2], [True, False, False])
    """
    if not isinstance(actions, Ragged):
        actions = Ragged(actions.reshape(-1), torch.arange(len(actions) + 1))
    if not priority:
        known = actions.row_lengths() > 0
        firsts = actions.offsets[:-1].clamp(max=max(len(actions.values) - 1, 0))
        return (actions.values[firsts] if len(actions.values) else torch.zeros(len(actions), dtype=torch.int64)), known
    best = torch.full((len(actions),), _UNKNOWN, dtype=torch.int64)
    best = best.scatter_reduce(0, actions.value_rowids(), _rank(actions.values, priority), "amin")
    known = best < _UNKNOWN
    return torch.tensor(priority)[torch.where(known, best, 0)], known


def leading_action(actions: torch.Tensor | Ragged, priority: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's action that is first in `priority`, or else its first one, and whether it has any.

    Example:
        >>> action, known = leading_action(Ragged.from_lists([[1, 2], [3], []]), priority=(2,))
        >>> action[known].tolist(), known.tolist()
        ([2, 3], [True, True, False])
    """
    first, known = most_prior_action(actions, ())
    if not priority:
        return first, known
    prior, ranked = most_prior_action(actions, priority)
    return torch.where(ranked, prior, first), known


@dataclass(frozen=True, kw_only=True)
class StrategyRule:
    """What happens to the rows of one strategy."""

    sample_rate: float = 1.0
    """Probability of a row to stay."""
    label: float | None = None
    """If given, the new first label of those that stay."""

    @classmethod
    def parse(cls, text: str) -> dict[int, Self]:
        """Parse the original's notation: "strategy:rate" or "strategy:rate:label", with commas between.

        Example:
            >>> StrategyRule.parse("4:0.5,7:1:0")
            {4: StrategyRule(sample_rate=0.5, label=None), 7: StrategyRule(sample_rate=1.0, label=0.0)}
        """
        rules: dict[int, Self] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            try:
                strategy, rate, label = part.split(":") if part.count(":") == 2 else (*part.split(":"), "")
                rules[int(strategy)] = cls(sample_rate=float(rate), label=float(label) if label else None)
            except ValueError:
                raise ConfigError(f"rules: expected 'strategy:rate' or 'strategy:rate:label', got {part!r}") from None
        return rules


class SpecialStrategy(Seeded):
    """Keeps rows that have one of `strategies`, sampled and relabelled by the rule of the first of these that they have.

    A strategy without a rule keeps its rows as they are. Rows with other strategies only are dropped, and rows without any stay
    if `keep_empty`.

    Example:
        >>> strategy = SpecialStrategy((7, 4), "4:1.0:0", keep_empty=False)
        >>> batch = {"special_strategies": Ragged.from_lists([[4], [4, 7], [5], []]), "label": torch.ones(4)}
        >>> strategy(batch)["label"].tolist()
        [0.0, 1.0]
    """

    def __init__(
        self,
        strategies: Sequence[int],
        rules: str | Mapping[int, StrategyRule] = "",
        *,
        keep_empty: bool = True,
        seed: int = 0,
        label: str = "label",
        column: str = "special_strategies",
    ) -> None:
        super().__init__(seed=seed)
        self.strategies = tuple(strategies)
        self.rules = StrategyRule.parse(rules) if isinstance(rules, str) else dict(rules)
        if not self.strategies:
            raise ConfigError("strategies: expected at least one, got none")
        for strategy, rule in self.rules.items():
            if not 0 <= rule.sample_rate <= 1:
                raise ConfigError(f"rules[{strategy}]: expected a sample rate in [0, 1], got {rule.sample_rate}")
            if strategy not in self.strategies:
                raise ConfigError(f"rules[{strategy}]: it is not one of the strategies {self.strategies}")
        self._keep_empty, self._label, self._column = keep_empty, label, column

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        column = column_of(batch, self._column)
        kept = torch.zeros(num_rows(batch), dtype=torch.bool)
        if self._keep_empty and isinstance(column, Ragged):
            kept |= column.row_lengths() == 0
        # Drawn for every row, needed or not: what happens to a row does not depend on the rows before it.
        draws = torch.from_numpy(self._rng.random(len(kept)))
        undecided = torch.ones_like(kept)
        relabelled = any(rule.label is not None for rule in self.rules.values())
        labels = labels_up_to(batch, self._label, 0).float().clone() if relabelled else None
        for strategy in self.strategies:
            here = undecided & rows_with(column, (strategy,))
            undecided &= ~here
            rule = self.rules.get(strategy, StrategyRule())
            chosen = here & (draws < rule.sample_rate)
            kept |= chosen
            if labels is not None and rule.label is not None:
                labels[chosen, 0] = rule.label
        if labels is not None:
            batch = {**batch, self._label: labels.reshape(labels_shape(batch, self._label))}
        return select_rows(batch, kept)
