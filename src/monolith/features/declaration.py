"""The declaration pass: from features to the tables that hold them, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from monolith.errors import ConfigError
from monolith.features.feature import Feature, RateFunction
from monolith.table.admission import SlidingAdmission
from monolith.table.config import Expiry, Segment, TableConfig

__all__ = ["Declaration", "FeatureGroup", "TableDeclaration", "declare_tables"]


@dataclass(frozen=True, kw_only=True)
class FeatureGroup:
    """Features of a table whose outputs are made together: a single one, or a stack that is completely in the table."""

    features: tuple[Feature, ...]
    slots: tuple[int | None, ...]
    """The slot of each."""
    stack: str | None
    """The name of the stack, None for a feature alone."""


@dataclass(frozen=True, kw_only=True)
class TableDeclaration:
    """One table, and the features that read and train its rows."""

    config: TableConfig
    admission: SlidingAdmission | None
    """How often an id must come before it gets a row. None admits it at once."""
    schedules: tuple[RateFunction | None, ...]
    """A learning rate by step for each segment, None for the optimizer's own."""
    features: tuple[Feature, ...]
    """In the order of declaration."""
    slots: tuple[int | None, ...]
    """The slot of each of `features`, None if ids are taken as they are."""
    groups: tuple[FeatureGroup, ...]
    """The same features by output."""
    has_bias: bool
    """Whether the first element of a row is a bias."""
    pooling: Literal["sum", "mean", "sqrtn"]
    """How a lookup pools: as its features do, or "sum" where they differ."""

    def learning_rates(self, step: int) -> tuple[float, ...]:
        """Return the rate of each segment at `step`."""
        defaults = self.config.learning_rates
        return tuple(rate if f is None else f(step) for f, rate in zip(self.schedules, defaults, strict=True))


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """All tables of a model."""

    tables: tuple[TableDeclaration, ...]
    """In the order in which features first name them."""

    @property
    def assignment(self) -> dict[str, str]:
        """The name of the table of each feature."""
        return {feature.name: table.config.name for table in self.tables for feature in table.features}

    def __getitem__(self, table: str) -> TableDeclaration:
        return next(declared for declared in self.tables if declared.config.name == table)


def declare_tables(features: Sequence[Feature], *, seed: int = 0) -> Declaration:
    """Find every table that `features` need.

    A feature without a slot has a table of its own. Features with slots whose segments, schedules and `table` are equal share
    one table, distinguished by their slots, and one lookup serves all of them. Thresholds and expiry are kept by slot. Raises
    `ConfigError`, naming both features, for two features of one name or slot, for sharing with an unknown feature or with other
    dims, and for one table with two layouts.

    Example:
        >>> from monolith.features import Feature, declare_tables
        >>> user, item = Feature(name="user", slot=1, dim=8), Feature(name="item", slot=2, dim=8)
        >>> clicks = Feature(name="clicks", shared_with="item", pooling="mean")
        >>> declared = declare_tables([user, item, clicks, Feature(name="city", dim=4)])
        >>> [[feature.name for feature in table.features] for table in declared.tables]
        [['user', 'item', 'clicks'], ['city']]
        >>> declared.tables[0].slots
        (1, 2, 2)
    """
    places = {feature.name: f"features[{place}] {feature.name!r}" for place, feature in enumerate(features)}
    _check_outputs(features)
    _check_slots(features, places)
    owners = {feature.name: _owner(feature, features, places) for feature in features}
    _check_stacks(features, owners, places)
    groups: list[list[Feature]] = []
    for feature in features:
        owner = owners[feature.name]
        group = next((group for group in groups if _same_table(owners[group[0].name], owner)), None)
        if group is None:
            groups.append([feature])
        else:
            group.append(feature)
    names: dict[str, str] = {}
    stack_sizes = Counter(feature.stack for feature in features if feature.stack is not None)
    tables = [_declare(group, owners, names, places, stack_sizes, seed) for group in groups]
    return Declaration(tables=tuple(tables))


def _check_outputs(features: Sequence[Feature]) -> None:
    made: dict[str, tuple[int, str | None]] = {}
    for place, feature in enumerate(features):
        # The name of a stacked feature is taken too: it is a column of the batch.
        for output in dict.fromkeys((feature.name, *feature.outputs)):
            stack = feature.stack if output != feature.name else None
            other, other_stack = made.setdefault(output, (place, stack))
            if other != place and (stack is None or stack != other_stack):
                raise ConfigError(
                    f"features[{place}]: the output {output!r} is already that of features[{other}]; rename one"
                )


def _check_stacks(features: Sequence[Feature], owners: Mapping[str, Feature], places: Mapping[str, str]) -> None:
    first: dict[str, Feature] = {}
    for feature in features:
        if feature.stack is None:
            continue
        if feature.stack == feature.name:
            raise ConfigError(f"{places[feature.name]}: stack: expected a name of its own, not that of the feature")
        other = first.setdefault(feature.stack, feature)
        here, there = (_vector_dim(owners[member.name]) for member in (feature, other))
        if here != there:
            raise ConfigError(
                f"{places[feature.name]}: its dim ({here}) is not that of {places[other.name]} ({there}) in the same stack "
                f"{feature.stack!r}"
            )
        if bool(feature.bias) != bool(other.bias):
            raise ConfigError(
                f"{places[feature.name]} and {places[other.name]} are in the same stack {feature.stack!r}, and one has a bias; "
                "give all a bias or none"
            )


def _vector_dim(owner: Feature) -> int:
    return sum(segment.dim for segment in owner.row) - bool(owner.bias)


def _check_slots(features: Sequence[Feature], places: Mapping[str, str]) -> None:
    taken: dict[int, Feature] = {}
    for feature in features:
        if feature.slot is None:
            continue
        other = taken.setdefault(feature.slot, feature)
        if other is not feature:
            raise ConfigError(
                f"{places[feature.name]}: slot {feature.slot} is already that of {places[other.name]}; give it another slot, "
                f"or shared_with={other.name!r} to read the same rows"
            )


def _owner(feature: Feature, features: Sequence[Feature], places: Mapping[str, str]) -> Feature:
    if feature.shared_with is None:
        return feature
    owner = next((other for other in features if other.name == feature.shared_with), None)
    if owner is None:
        raise ConfigError(
            f"{places[feature.name]}: shared_with={feature.shared_with!r}, but there is no such feature; "
            f"known: {', '.join(sorted(places))}"
        )
    if owner.shared_with is not None:
        raise ConfigError(
            f"{places[feature.name]}: shared_with {places[owner.name]}, which has no rows of its own; "
            f"write shared_with={owner.shared_with!r}"
        )
    dim = _vector_dim(owner)
    if feature.dim not in (None, dim):
        raise ConfigError(
            f"{places[feature.name]}: dim {feature.dim}, but it shares rows of dim {dim} with {places[owner.name]}"
        )
    if feature.bias and not owner.bias:
        raise ConfigError(f"{places[feature.name]}: bias, but it shares rows that have none with {places[owner.name]}")
    return owner


def _same_table(a: Feature, b: Feature) -> bool:
    if a is b:
        return True
    if a.slot is None or b.slot is None:
        return False
    return (a.row, a.schedules, a.table) == (b.row, b.schedules, b.table)


def _declare(
    group: list[Feature],
    owners: Mapping[str, Feature],
    names: dict[str, str],
    places: Mapping[str, str],
    stack_sizes: Mapping[str, int],
    seed: int,
) -> TableDeclaration:
    first = owners[group[0].name]
    name = first.table or (first.name if first.slot is None else _name_of(first.row, names))
    if name in names:
        raise ConfigError(
            f"{places[group[0].name]}: its table {name!r} is already that of {names[name]}, whose ids, segments or schedules "
            "differ; choose another table=, or shared_with to read the same rows"
        )
    names[name] = places[group[0].name]
    members = [feature for feature in group if feature.shared_with is None]
    slots = tuple(owners[feature.name].slot for feature in group)
    poolings = {feature.pooling for feature in group} & {"sum", "mean", "sqrtn"}
    return TableDeclaration(
        config=TableConfig(name=name, segments=first.row, seed=seed, expiry=_expiry(members)),
        admission=_admission(members),
        schedules=first.schedules,
        features=tuple(group),
        slots=slots,
        groups=_groups(group, slots, stack_sizes),
        has_bias=bool(first.bias),
        pooling=poolings.pop() if len(poolings) == 1 else "sum",  # type: ignore[arg-type]
    )


def _groups(
    features: Sequence[Feature], slots: Sequence[int | None], stack_sizes: Mapping[str, int]
) -> tuple[FeatureGroup, ...]:
    here = Counter(feature.stack for feature in features)
    groups: dict[tuple[str | None, str], list[int]] = {}
    for place, feature in enumerate(features):
        whole = feature.stack is not None and here[feature.stack] == stack_sizes[feature.stack]
        groups.setdefault((feature.stack, "") if whole else (None, feature.name), []).append(place)
    return tuple(
        FeatureGroup(
            features=tuple(features[place] for place in places),
            slots=tuple(slots[place] for place in places),
            stack=stack,
        )
        for (stack, _), places in groups.items()
    )


def _name_of(row: tuple[Segment, ...], names: Mapping[str, str]) -> str:
    name = "slots_" + "_".join(f"{segment.dim}_{segment.optimizer.kind}" for segment in row)
    # Tables that differ in less than that are numbered as they are declared.
    same = sum(other == name or other.startswith(f"{name}_") for other in names)
    return name if not same else f"{name}_{same + 1}"


def _expiry(features: Sequence[Feature]) -> Expiry:
    if features[0].slot is None:
        seconds = features[0].expire_seconds
        return Expiry() if seconds is None else Expiry(default=seconds)
    return Expiry(
        slots={f.slot: f.expire_seconds for f in features if f.slot is not None and f.expire_seconds is not None}
    )


def _admission(features: Sequence[Feature]) -> SlidingAdmission | None:
    if not any(feature.occurrence_threshold for feature in features):
        return None
    if features[0].slot is None:
        return SlidingAdmission(default_threshold=features[0].occurrence_threshold)
    return SlidingAdmission(slot_thresholds={f.slot: f.occurrence_threshold for f in features if f.slot is not None})
