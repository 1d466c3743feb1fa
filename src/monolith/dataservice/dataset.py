"""Datasets of a data service as configuration, which is sent as JSON and never as code, and how their splits are read."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self, cast

from pydantic import Field, JsonValue, model_validator

from monolith.config import Config, nearest_name
from monolith.data import transforms
from monolith.data.sources.files import STDIN
from monolith.data.sources.records import RecordFileSource, RecordHeader, TFRecordSource
from monolith.data.sources.source import Column, Source
from monolith.data.sources.tables import CsvSource, ParquetSource
from monolith.data.synthetic.clicks import ClickStream, ClickStreamConfig
from monolith.data.transforms.compose import Compose, Transformed
from monolith.data.transforms.labels import AddLabel
from monolith.data.transforms.sampling import NegativeSample
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch
from monolith.transport.server import ListenConfig, is_loopback
from monolith.urls import lies_below

__all__ = [
    "DatasetConfig",
    "EVERYTHING",
    "KINDS",
    "Kinds",
    "Split",
    "SplitReader",
    "TransformConfig",
    "open_split",
    "require_below",
    "require_known_kinds",
    "require_roots",
]

RegisteredName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class TransformConfig(Config):
    """A transform of `monolith.data.transforms`, by the name of its class.

    Example:
        >>> TransformConfig(kind="FilterByLabel", fields={"thresholds": [0.5]}).kind
        'FilterByLabel'
    """

    kind: RegisteredName
    """The name of the class."""
    fields: dict[str, JsonValue] = {}
    """Its arguments, as JSON."""


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

    kind: RegisteredName
    """"csv", "parquet", "tfrecord", "record_file", "click_stream", or a kind that data workers were started with."""
    paths: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = ()
    """Files, folders, globs or ranges. The dispatcher finds the files, each at least one split. Some kinds have none."""
    fields: dict[str, JsonValue] = {}
    """The other arguments of the source, as JSON."""
    transforms: tuple[TransformConfig, ...] = ()
    """Transforms of each batch, in order."""
    splits: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Number of splits of each file or, without files, of the whole source."""
    sharding: Literal["dynamic", "static"] = "dynamic"
    """dynamic: a split goes to the trainer that asks first. static: split k goes to trainer k modulo their number."""

    @model_validator(mode="after")
    def _files_are_found_by_the_dispatcher(self) -> Self:
        if STDIN in self.paths:
            raise ValueError("paths: standard input cannot be read by several processes")
        if "paths" in self.fields:
            raise ValueError("fields: give the files as paths of the dataset")
        return self


class Split(Config):
    """A part of a dataset that one trainer gets.

    Example:
        >>> Split(number=3, file="days/monday.csv").parts
        1
    """

    number: Annotated[int, Field(ge=0)]
    """Its index among the splits of an epoch."""
    file: str | None = None
    """The file to read. None if the dataset has no files."""
    part: Annotated[int, Field(ge=0)] = 0
    """Which part of the file, or of the whole source."""
    parts: Annotated[int, Field(ge=1)] = 1


MakeSource = Callable[..., Source]
"""Called with `paths`, a list of files, and the dataset's fields by name."""
Kinds = Mapping[str, MakeSource]
"""Sources by the name a dataset calls them."""


class SplitReader(Protocol):
    """Batches of one split, with a position that can be written as JSON."""

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches after the position."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position after the last batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position."""


def _files(source: Callable[..., Source]) -> MakeSource:
    def make(paths: list[str], **fields: JsonValue) -> Source:
        known = dict(fields)
        if known.get("columns") is not None:
            known["columns"] = cast(JsonValue, _columns(known["columns"]))
        if known.get("header") is not None:
            known["header"] = cast(JsonValue, RecordHeader.from_json(json.dumps(known["header"])))
        return source(paths, **known)

    # Arguments are checked against those of the source.
    make.__signature__ = inspect.signature(source)  # type: ignore[attr-defined]
    return make


def _columns(listed: JsonValue) -> list[Column]:
    if not isinstance(listed, list):
        raise ConfigError(f"columns: expected a list of columns, got {listed!r}")
    return [Column.from_json(json.dumps(column)) for column in listed]


def _click_stream(paths: list[str], **fields: JsonValue) -> Source:
    if paths:
        raise ConfigError("click_stream: expected no paths, it reads no files")
    return ClickStream(ClickStreamConfig.from_json(json.dumps(fields)))


KINDS: Kinds = {
    "csv": _files(CsvSource),
    "parquet": _files(ParquetSource),
    "tfrecord": _files(TFRecordSource),
    "record_file": _files(RecordFileSource),
    "click_stream": _click_stream,
}
"""The kinds that every data worker has."""

# Their constructors take plain values. All other transforms that are configs are made from their fields.
_DRAWING: dict[str, Callable[..., transforms.Seeded]] = {"AddLabel": AddLabel, "NegativeSample": NegativeSample}
_CONFIGURED: dict[str, type[Config]] = {
    name: kind
    for name in transforms.__all__
    if inspect.isclass(kind := getattr(transforms, name))
    and issubclass(kind, Config)
    and "__call__" in dir(kind)
    and not inspect.isabstract(kind)
}


def require_known_kinds(dataset: DatasetConfig, kinds: Kinds = KINDS) -> None:
    """Raise `ConfigError` for an unknown kind of source or transform, naming the nearest one."""
    _known("kind", dataset.kind, kinds)
    for transform in dataset.transforms:
        _known("transforms", transform.kind, {**_CONFIGURED, **_DRAWING})


def open_split(dataset: DatasetConfig, split: Split, position: str = "", *, kinds: Kinds = KINDS) -> SplitReader:
    """Return a reader of the batches of `split` after `position`, the JSON of a state, or from its beginning if that is empty.

    Example:
        >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 3, "batch_size": 2, "users": 9}, splits=2)
        >>> [len(batch["label"]) for batch in open_split(dataset, Split(number=1, part=1, parts=2))]
        [2]
    """
    require_known_kinds(dataset, kinds)
    files = [] if split.file is None else [split.file]
    source: SplitReader = _made(f"{dataset.kind}: fields", kinds[dataset.kind], paths=files, **dataset.fields)
    if split.parts > 1:
        source = cast(Source, source).shard(split.part, split.parts)
    if dataset.transforms:
        # The random numbers of a split do not depend on which process reads it.
        drawn = Compose(map(_transform, dataset.transforms)).for_shard(split.number)
        source = Transformed(source, *drawn.transforms)
    if position:
        _move_to(source, position)
    return source


def _move_to(source: SplitReader, position: str) -> None:
    try:
        source.load_state_dict(json.loads(position))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgumentError(
            f"position: expected the position that came with a batch of this split; {error}"
        ) from None


def _transform(config: TransformConfig) -> Callable[[Batch], Batch]:
    if config.kind in _CONFIGURED:
        made: Any = _CONFIGURED[config.kind].from_json(json.dumps(config.fields))
    else:
        made = _made(f"{config.kind}: fields", _DRAWING[config.kind], **config.fields)
    return cast("Callable[[Batch], Batch]", made)


def _made(where: str, make: Callable[..., Any], /, **fields: Any) -> Any:  # noqa: ANN401 - JSON, checked by `make`
    try:
        inspect.signature(make).bind(**fields)
        return make(**fields)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _known(where: str, name: str, known: Mapping[str, object] | Sequence[str]) -> None:
    if name in known:
        return
    near = nearest_name(name, known)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(sorted(known))}"
    raise ConfigError(f"{where}: {name!r} is not known; {hint}")


EVERYTHING = "*"
"""A root that allows every file that the process may read."""

_PATTERN = re.compile(r"[*?\[{]")


def require_roots(config: ListenConfig, roots: Sequence[str]) -> None:
    """Raise `ConfigError` if other machines could ask for any file."""
    if not roots and not is_loopback(config.host):
        raise ConfigError(
            f"{type(config).__name__}.roots: {config.host!r} can be reached from other machines; give the folders or URLs that "
            f"may be read (--root), or {EVERYTHING!r} for any file this process may read"
        )


def require_below(path: str, roots: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` unless the file, folder or pattern `path` is below one of `roots`. No roots allow any.

    Links and `..` are resolved first.

    Example:
        >>> require_below("/data/days/*.csv", ["/data"])
        >>> require_below("/data/../etc/passwd", ["/data"])
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: /data/../etc/passwd: is not below /data, where this server may read
    """
    if roots and not any(_is_below(path, root) for root in roots):
        raise InvalidArgumentError(f"{path}: is not below {', '.join(roots)}, where this server may read")


def _is_below(path: str, root: str) -> bool:
    if root == EVERYTHING:
        return True
    found = None if "://" in path else _PATTERN.search(path)
    if found is None:
        return lies_below(path, root)
    # Of a pattern, check the folder that it is matched in. The files that match are checked when they are read.
    folder = path[: found.start()].rpartition("/")[0] or path[:1]
    return ".." not in path[found.start() :].split("/") and lies_below(folder, root)
