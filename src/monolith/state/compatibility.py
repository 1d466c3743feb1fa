"""Whether the tables of a model and those of a saved state are compatible, and what a restore does to each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from monolith.errors import CheckpointMismatchError
from monolith.state.manifest import ShardEntry, TableEntry
from monolith.state.optimizer_state import leaves
from monolith.state.tables import saved_shard
from monolith.table import EmbeddingTable, ProbabilisticAdmission, Segment, SlidingAdmission, TableConfig

__all__ = ["RestoreReport", "TableFit", "changed_settings", "filters_fit", "fit_table", "match_segments"]

Fate = Literal["restored", "converted", "new", "kept"]


@dataclass(frozen=True, kw_only=True)
class TableFit:
    """What a restore does to one table of the model."""

    fate: Fate
    """`restored` row by row as saved, `converted` into another layout, `new` and so empty, or `kept` as it is."""
    saved_as: str | None = None
    """Its name in the saved state."""
    segments: tuple[int | None, ...] = ()
    """In a converted table, the saved segment that each segment continues. None means that it is initialised."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    problems: tuple[str, ...] = ()
    """Why it cannot be done."""


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What a restore does, or would do, to the tables of a model."""

    source: str
    step: int
    time: float
    sequence: int
    tables: Mapping[str, TableFit] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """Tables of the saved state that the model does not take."""
    from_parts: bool = False
    """Whether servers or ranks have written rows that it takes, so the log of the run does not have them."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is incompatible."""
        return tuple(f"table {name!r}: {text}" for name, fit in self.tables.items() for text in fit.problems)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is compatible but worth a line in the log, such as tables of the checkpoint that are not used."""
        unused = tuple(f"table {name!r} of the checkpoint is not used" for name in self.unused)
        return (*(f"table {name!r}: {text}" for name, fit in self.tables.items() for text in fit.notes), *unused)

    @property
    def same_tables(self) -> bool:
        """Whether the rows and names of the tables are those that were saved, so that a log of them can be continued."""
        return all(
            fit.fate == "new" or (fit.fate == "restored" and fit.saved_as == n) for n, fit in self.tables.items()
        )

    @property
    def parent(self) -> int:
        """What a log in the same model_dir continues: the saved sequence, or 0 if the tables differ from the saved ones, or if
        their rows are in other logs."""
        return self.sequence if self.same_tables and not self.from_parts else 0

    def require(self) -> None:
        """Raise `CheckpointMismatchError` with all problems, if there are any."""
        if self.problems:
            raise CheckpointMismatchError(
                f"{self.source}: does not fit the model: {'; '.join(self.problems)}. To train the changed model, use another "
                "model_dir"
            )


def fit_table(
    shards: Sequence[EmbeddingTable],
    saved_as: str,
    saved: Mapping[str, TableEntry],
    *,
    allow_new_tables: bool,
    allow_new_segments: bool,
    reset_admission: bool,
    parts: Sequence[range],
) -> TableFit:
    """Decide what a restore does to the table whose shards, with the buckets `parts`, are `shards`."""
    if saved_as not in saved:
        if allow_new_tables:
            return TableFit(fate="new", notes=("is not in the checkpoint: it starts empty",))
        known = ", ".join(map(repr, saved)) or "none"
        text = (
            f"is not in the checkpoint as {saved_as!r}, which has {known}; set allow_new_tables (--allow-new-tables) to start it "
            "empty, or give its old name in table_alias_map"
        )
        return TableFit(fate="new", problems=(text,))
    entry, config = saved[saved_as], shards[0].config
    problems: list[str] = []
    notes: list[str] = []
    if entry.config.seed != config.seed:
        problems.append(f"has seed {config.seed}, saved with {entry.config.seed}: unseen ids would read other values")
    if entry.config.name != config.name:
        notes.append(f"was named {entry.config.name!r}: ids without a row read other initial values now")
    elif entry.layout == shards[0].layout:
        notes += [f"{text}: the code's value is used" for text in changed_settings(entry.config, config)]
    segments: tuple[int | None, ...] = ()
    if entry.layout != shards[0].layout:
        matched = match_segments(entry.config.segments, config.segments)
        if matched is None or not allow_new_segments or entry.config.mode != config.mode:
            problems += _differences(entry.config, config)
        else:
            segments, notes = matched, [*notes, *_changes(entry.config, config, matched)]
    if shards[0].admission is not None:
        now, was = shards[0].admission.config, entry.admission
        if was is not None and not filters_fit(now, was):
            text = f"has an admission filter {now!r}, saved with {was!r}; reset_admission starts counting again from 0"
            (notes if reset_admission else problems).append(text)
        elif not all(_has_counts(saved_shard(entry.shards, part)) for part in parts):
            notes.append("admission counts start again from 0: they were not saved, or by shards with other ids")
    return TableFit(
        fate="converted" if segments else "restored",
        saved_as=saved_as,
        segments=segments,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _has_counts(shard: ShardEntry | None) -> bool:
    return shard is not None and shard.admission is not None


def filters_fit(
    now: SlidingAdmission | ProbabilisticAdmission, saved: SlidingAdmission | ProbabilisticAdmission | None
) -> bool:
    """Return whether a filter can continue from saved counts. Thresholds may have changed."""
    if isinstance(now, SlidingAdmission) and isinstance(saved, SlidingAdmission):
        return (now.capacity, now.split_num) == (saved.capacity, saved.split_num)
    return isinstance(now, ProbabilisticAdmission) and isinstance(saved, ProbabilisticAdmission)


def changed_settings(old: TableConfig, new: TableConfig) -> list[str]:
    """Return the settings of a table that have changed, with the old and the new value.

    Example:
        >>> from monolith.table import SGD
        >>> old, new = (Segment(dim=1, optimizer=SGD(learning_rate=rate)) for rate in (1.0, 0.5))
        >>> changed_settings(*(TableConfig(name="item", segments=(segment,)) for segment in (old, new)))
        ['segments.0.optimizer.learning_rate was 1.0, is now 0.5']
    """
    if old == new:
        return []
    was, now = (dict(leaves(config.model_dump(mode="json"))) for config in (old, new))
    keys = [key for key in dict.fromkeys([*was, *now]) if key != "initial_capacity" and was.get(key) != now.get(key)]
    return [f"{key} was {was.get(key)!r}, is now {now.get(key)!r}" for key in keys]


def match_segments(old: Sequence[Segment], new: Sequence[Segment]) -> tuple[int | None, ...] | None:
    """Return for each new segment the old one it continues, or None for one that was added. None if they do not match.

    Segments match if dim and optimizer are equal. Either some were added or some were removed, not both. Of equal neighbours the
    first ones are taken for the old ones.

    Example:
        >>> bias, vector = Segment(dim=1), Segment(dim=16)
        >>> match_segments([bias, vector], [bias, Segment(dim=4), vector])
        (0, None, 1)
        >>> match_segments([bias, vector], [vector]), match_segments([bias], [vector])
        ((1,), None)
    """
    shorter, longer = sorted(([_kind(s) for s in old], [_kind(s) for s in new]), key=len)
    places: list[int] = []
    for kind in shorter:
        start = places[-1] + 1 if places else 0
        if kind not in longer[start:]:
            return None
        places.append(longer.index(kind, start))
    if len(new) <= len(old):
        return tuple(places)
    return tuple(places.index(place) if place in places else None for place in range(len(new)))


def _kind(segment: Segment) -> tuple[int, str]:
    optimizer = segment.optimizer
    base = getattr(optimizer, "base", None)
    return segment.dim, optimizer.kind if base is None else f"{optimizer.kind}({base.kind})"


def _differences(old: TableConfig, new: TableConfig) -> list[str]:
    found = []
    if old.mode != new.mode:
        found.append(f"is a {new.mode} table, saved as a {old.mode} table")
    if len(old.segments) != len(new.segments):
        dims = [[segment.dim for segment in config.segments] for config in (new, old)]
        found.append(
            f"has segments of dims {dims[0]}, saved with {dims[1]}; allow_new_segments fits added or removed ones"
        )
        return found
    for number, (was, now) in enumerate(zip(old.segments, new.segments, strict=True)):
        if was.dim != now.dim:
            found.append(f"segment {number} has dim {now.dim}, saved with {was.dim}")
        if _kind(was)[1] != _kind(now)[1]:
            found.append(f"segment {number} has optimizer {_kind(now)[1]}, saved with {_kind(was)[1]}")
        if was.precision != now.precision:
            found.append(
                f"segment {number} is kept in {now.precision}, saved in {was.precision}; allow_new_segments converts"
            )
    return found or ["rows have another layout; allow_new_segments converts them"]


def _changes(old: TableConfig, new: TableConfig, matched: Collection[int | None]) -> list[str]:
    added = [number for number, source in enumerate(matched) if source is None]
    removed = [number for number in range(len(old.segments)) if number not in matched]
    texts = [f"segment {number} (dim {new.segments[number].dim}) is new: initialised in every row" for number in added]
    texts += [f"segment {number} (dim {old.segments[number].dim}) of the checkpoint is dropped" for number in removed]
    return texts or ["rows are converted to another precision"]
