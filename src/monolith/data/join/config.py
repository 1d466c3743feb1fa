"""What a joiner does: where impressions and actions come from, the window, the labels, and where examples go (`JoinConfig`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from monolith.config import Config

__all__ = [
    "ActionInput",
    "ImpressionInput",
    "JoinConfig",
    "JoinState",
    "Label",
    "NegativeSampling",
    "ParquetOutput",
    "StreamOutput",
]

_GROUP = "join"
_TYPE = r"^[A-Za-z0-9_.:\-]{1,100}$"
_MAX_TYPES = 63
"""Types of actions that a joiner knows: one bit of an entry each."""

Seconds = Annotated[float, Field(gt=0, le=366 * 86400)]
SecondsOrZero = Annotated[float, Field(ge=0, le=366 * 86400)]
FieldName = Annotated[str, Field(min_length=1)]
ActionType = Annotated[str, Field(pattern=_TYPE)]
ColumnType = Annotated[str, Field(pattern=r"^(list<)*(int64|uint64|int32|float32|float64|bool|string)>*$")]


class _StreamInput(Config):
    config_group: ClassVar[str] = _GROUP

    stream: str
    """URL of the stream, as for `open_stream`: a folder, `kafka://...` or `redis://...`. Its records are JSON objects."""
    settings: dict[str, str] = {}
    """Settings of the stream that are not in its URL, such as those of a Kafka client."""
    key: tuple[FieldName, ...] | None = None
    """Fields that together identify an impression, strings or integers. None: the key of the record."""
    time: FieldName | None = None
    """Field with the event time. None: the timestamp of the record, which is in milliseconds."""
    time_unit: Literal["s", "ms"] = "s"
    """Unit of the field `time`, counted from 1970."""

    @field_validator("key")
    @classmethod
    def _names_fields(cls, key: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if key is not None and (not key or len(set(key)) < len(key)):
            raise ValueError("expected at least one field, and none twice; leave `key` out for the key of the record")
        return key


class ImpressionInput(_StreamInput):
    """The stream of impressions: what was shown, with its features.

    Example:
        >>> ImpressionInput(stream="runs/impressions", key=("request", "item"), time="shown_at").time_unit
        's'
    """


class ActionInput(_StreamInput):
    """The stream of actions: what users did with an impression.

    Example:
        >>> ActionInput(stream="runs/actions", key=("request", "item"), time="at", type="what").type
        'what'
    """

    type: FieldName = "action"
    """Field with the type of the action, a string or an integer."""


class Label(Config):
    """A column of labels. Its value is that of the first of `actions` that has come, else `default`.

    Example:
        >>> Label(name="value", actions={"buy": 5.0, "click": 1.0}).default
        0.0
    """

    config_group: ClassVar[str] = _GROUP

    name: FieldName
    """Name of the column. Impressions must not have a field of that name."""
    actions: dict[ActionType, float] = Field(min_length=1)
    """Value by type of action, highest priority first: a type counts only if none of those before it has come."""
    default: float = 0.0
    """Value without any of these actions."""


class NegativeSampling(Config):
    """Which negatives are kept: those whose key has a hash below `rate`. All others are counted, and not emitted.

    A negative is an example without any of the actions in `positive`.

    Example:
        >>> NegativeSampling(rate=0.1).rate_column
        'sample_rate'
    """

    config_group: ClassVar[str] = _GROUP

    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability with which a negative is kept."""
    positive: tuple[ActionType, ...] | None = None
    """Types of actions that make an example positive. None: all types of the labels."""
    rate_column: FieldName | None = "sample_rate"
    """Column with `rate` in every example, for `Head(sample_rate=...)`. None: no such column."""
    weight_column: FieldName | None = None
    """Column with how many examples each one stands for: 1 / `rate` for negatives and 1 for others, for
    `Head(sample_weight=...)`. It corrects any head, also one whose negatives are not those that were sampled. None: no such
    column."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Another seed keeps other keys."""


class StreamOutput(Config):
    """The stream that examples, or dead letters, are written to. It needs a partition for each partition of the inputs.

    Example:
        >>> StreamOutput(stream="runs/examples").settings
        {}
    """

    config_group: ClassVar[str] = _GROUP

    stream: str
    """URL of the stream. A folder is made with as many partitions as the inputs have."""
    settings: dict[str, str] = {}
    """Settings of the stream that are not in its URL."""


class ParquetOutput(Config):
    """Parquet files with a copy of the output stream, for training in batch.

    Example:
        >>> ParquetOutput(folder="runs/history", columns={"user": "int64", "tags": "list<int64>"}).rows_per_file
        1000000
    """

    config_group: ClassVar[str] = _GROUP

    folder: str
    """Local folder of the files."""
    columns: dict[FieldName, ColumnType] = Field(min_length=1)
    """Type of each field of the impressions to write. Labels, rates and weights are written as well, fields not named here are
    not."""
    rows_per_file: Annotated[int, Field(ge=1, le=100_000_000)] = 1_000_000
    """A file ends when it has this many rows, or 256 MiB of records ..."""
    file_secs: Seconds = 600.0
    """... or this many seconds after its first row was read."""


class JoinState(Config):
    """Where a joiner keeps open windows.

    Example:
        >>> JoinState(folder="runs/join").memory_mb
        1024
    """

    config_group: ClassVar[str] = _GROUP

    folder: str
    """Local folder of the state. A unit, the partitions of one number, has a subfolder, which moves with it."""
    memory_mb: Annotated[int, Field(ge=1, le=2**30)] = 1024
    """Megabytes of memory for the windows of a process, shared by its units."""
    spill: bool = False
    """Keep what does not fit into memory on disk, in LMDB (extra `join`). Without, exceeding `memory_mb` is an error."""
    disk_gb: Annotated[int, Field(ge=1, le=2**20)] = 64
    """With `spill`: gigabytes of disk that a unit may take."""
    checkpoint_secs: Seconds = 10.0
    """Seconds between two checkpoints. A restarted joiner reads again what came since the last one. With `spill` a checkpoint
    has what changed. In memory it has everything, so it is made less often when it takes more than a twentieth of the time."""


class JoinConfig(Config):
    """What a joiner does. The fields of a file for `monolith join`.

    Example:
        >>> config = JoinConfig(
        ...     impressions=ImpressionInput(stream="runs/impressions", key=("request",), time="time"),
        ...     actions=ActionInput(stream="runs/actions", key=("request",), time="time"),
        ...     window_secs=1800.0,
        ...     labels=(Label(name="clicked", actions={"click": 1.0}),),
        ...     output=StreamOutput(stream="runs/examples"),
        ...     state=JoinState(folder="runs/join"),
        ... )
        >>> config.emit, config.late, config.types
        ('window_end', 'drop', ('click',))
    """

    config_group: ClassVar[str] = _GROUP

    impressions: ImpressionInput
    """What was shown, with its features."""
    actions: ActionInput
    """What users did. Keyed and partitioned like the impressions."""
    window_secs: Seconds
    """An action counts if it happened at most this long after its impression, by event time."""
    lead_secs: SecondsOrZero = 60.0
    """... and at most this long before it, because clocks differ."""
    keep_secs: SecondsOrZero | None = None
    """How long after its window a key is remembered, to recognise late actions and repeated impressions. An impression that
    comes later than this is refused. None: as long as the window."""
    out_of_order_secs: SecondsOrZero = 5.0
    """How much later than a newer record of its partition a record may come: the watermark stays this far behind."""
    idle_secs: Seconds = 10.0
    """A partition that was read to its end and has had no record for this long no longer holds the watermark back."""
    max_future_secs: Seconds = 3600.0
    """A record whose time is further ahead of the clock is refused: it would close all windows."""
    labels: tuple[Label, ...] = Field(min_length=1)
    """Columns of labels. Actions of a type that no label names are counted and ignored."""
    emit: Literal["window_end", "on_positive", "fast"] = "window_end"
    """When an example is emitted. "window_end": when its window closes. "on_positive": at once with the first action of
    `emit_on`, else when the window closes. "fast": at once as a negative, and again as a positive with the first action."""
    emit_on: tuple[ActionType, ...] | None = None
    """Types of actions that make "on_positive" and "fast" emit at once. None: all types of the labels."""
    late: Literal["drop", "correction", "dead_letter"] = "drop"
    """What happens to an action that counts, but comes after its example was emitted. All are counted. "correction" emits the
    example again with the new labels and the header `correction`."""
    sampling: NegativeSampling = NegativeSampling()
    """Which negatives are kept."""
    output: StreamOutput
    """Where examples go."""
    parquet: ParquetOutput | None = None
    """Parquet files with the same examples. None: no files."""
    dead_letters: StreamOutput | None = None
    """Where refused records go, with the reason as a header. None: they are counted and logged only."""
    state: JoinState
    """Where open windows are kept."""
    max_record_bytes: Annotated[int, Field(ge=1, le=64 << 20)] = 1 << 20
    """A larger record is refused."""
    poll_records: Annotated[int, Field(ge=1, le=1_000_000)] = 5000
    """Records that are read at a time."""
    start: Literal["start", "end"] = "start"
    """Where a joiner without state begins to read. Partitions that are added later are read from their start."""

    @property
    def types(self) -> tuple[str, ...]:
        """All types of actions that labels name, in the order of the labels."""
        return tuple(dict.fromkeys(type_ for label in self.labels for type_ in label.actions))

    @property
    def keep_ms(self) -> int:
        """Milliseconds for which a key is remembered after its window."""
        return round(1000 * (self.window_secs if self.keep_secs is None else self.keep_secs))

    @property
    def added_columns(self) -> dict[str, str]:
        """Columns that examples have in addition to the fields of the impression, with their types."""
        extra = (self.sampling.rate_column, self.sampling.weight_column)
        return {name: "float32" for name in (*(label.name for label in self.labels), *extra) if name is not None}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        extra = [name for name in (self.sampling.rate_column, self.sampling.weight_column) if name is not None]
        names = [*(label.name for label in self.labels), *extra]
        if len(set(names)) < len(names):
            raise ValueError(f"labels: expected no column twice, with those of the sampling; got {', '.join(names)}")
        if len(self.types) > _MAX_TYPES:
            raise ValueError(f"labels: expected at most {_MAX_TYPES} types of actions, got {len(self.types)}")
        for name, given in (("emit_on", self.emit_on), ("sampling.positive", self.sampling.positive)):
            unknown = [type_ for type_ in given or () if type_ not in self.types]
            if unknown or given == ():
                raise ValueError(f"{name}: expected types that a label names, {', '.join(self.types)}; got {given}")
        if self.late == "dead_letter" and self.dead_letters is None:
            raise ValueError("late: dead_letter needs `dead_letters`, the stream that they go to")
        key, action_key = self.impressions.key, self.actions.key
        if key is not None and action_key is not None and len(key) != len(action_key):
            raise ValueError(f"actions.key: expected as many fields as impressions.key has, {key}; got {action_key}")
        taken = set(names) & set(self.parquet.columns if self.parquet else ())
        if taken:
            raise ValueError(f"parquet.columns: {sorted(taken)[0]} is a column that the joiner adds; leave it out")
        return self
