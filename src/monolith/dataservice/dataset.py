"""What a data service reads, as configuration: it travels between processes as JSON, never as code."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from monolith.config import Config
from monolith.data.sources.files import STDIN

__all__ = ["DatasetConfig", "Split", "TransformConfig"]

Kind = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class TransformConfig(Config):
    """A transform of `monolith.data.transforms`, by the name of its class.

    Example:
        >>> TransformConfig(kind="FilterByLabel", fields={"thresholds": [0.5]}).kind
        'FilterByLabel'
    """

    kind: Kind
    """The name of the class."""
    fields: dict[str, JsonValue] = {}
    """Its arguments, as JSON has them."""


class DatasetConfig(Config):
    """What to read and how to cut it into splits.

    Example:
        >>> dataset = DatasetConfig(
        ...     kind="csv",
        ...     paths=("days/*.csv",),
        ...     fields={"columns": [{"name": "user", "shape": []}], "batch_size": 512},
        ...     transforms=(TransformConfig(kind="FilterByExpression", fields={"expression": "user > 0"}),),
        ... )
        >>> dataset.sharding
        'dynamic'
    """

    kind: Kind
    """"csv", "parquet", "tfrecord", "record_file", "click_stream", or a kind that data workers were started with."""
    paths: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = ()
    """Files, folders, globs or ranges; the dispatcher finds the files, each is at least one split. Some kinds have none."""
    fields: dict[str, JsonValue] = {}
    """The other arguments of the source, as JSON has them."""
    transforms: tuple[TransformConfig, ...] = ()
    """What is done to each batch, in order."""
    splits: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Into how many splits each file is cut or, without files, the whole source."""
    sharding: Literal["dynamic", "static"] = "dynamic"
    """Who gets a split: the trainer that asks first, or always the same: split k goes to trainer k modulo their number."""

    @model_validator(mode="after")
    def _files_are_found_by_the_dispatcher(self) -> Self:
        if STDIN in self.paths:
            raise ValueError("paths: standard input cannot be read by several processes")
        if "paths" in self.fields:
            raise ValueError("fields: the files are said by paths of the dataset")
        return self


class Split(Config):
    """A part of a dataset that one trainer gets.

    Example:
        >>> Split(number=3, file="days/monday.csv").parts
        1
    """

    number: Annotated[int, Field(ge=0)]
    """Its place among the splits of an epoch."""
    file: str | None = None
    """The file to read; None: the dataset has none."""
    part: Annotated[int, Field(ge=0)] = 0
    """Which part of the file, or of the whole source."""
    parts: Annotated[int, Field(ge=1)] = 1
