"""Rows by the strategies that brought them into the stream: which stay, how often, with which label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from monolith.data.transforms.columns import labels_shape, labels_up_to, rows_with
from monolith.data.transforms.rows import select_rows
from monolith.data.transforms.seeded import Seeded
from monolith.errors import ConfigError
from monolith.features import Batch, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = ["SpecialStrategy", "StrategyRule"]


@dataclass(frozen=True, kw_only=True)
class StrategyRule:
    """What happens to the rows of one strategy."""

    sample_rate: float = 1.0
    """Probability of a row to stay."""
    label: float | None = None
    """If given, the new first label of those that stay."""

    @classmethod
    def parse(cls, text: str) -> dict[int, Self]:
        """The original's notation: "strategy:rate" or "strategy:rate:label", with commas between.

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

    A strategy without a rule keeps its rows as they are. Rows with other strategies only go; rows without any stay if
    `keep_empty`.

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
        """The batch transformed; the one given is not changed."""
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
