"""From a dataset's configuration to batches: what the kinds of sources and transforms are called, and how they are made."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from pydantic import JsonValue

from monolith.config import Config, nearest_name
from monolith.data import (
    Column,
    CsvSource,
    ParquetSource,
    RecordFileSource,
    RecordHeader,
    Source,
    TFRecordSource,
    transforms,
)
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.data.transforms import AddLabel, Compose, NegativeSample, Transformed
from monolith.dataservice.dataset import DatasetConfig, Split, TransformConfig
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch

__all__ = ["KINDS", "Kinds", "SplitReader", "open_split", "require_known"]

MakeSource = Callable[..., Source]
"""Called with `paths`, a list of files, and the dataset's fields by name."""
Kinds = Mapping[str, MakeSource]
"""Sources by the name a dataset calls them."""


class SplitReader(Protocol):
    """Batches of one split, with a place that goes into JSON."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the place on."""

    def state_dict(self) -> Mapping[str, Any]:
        """The place behind the last batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""


def _files(source: Callable[..., Source]) -> MakeSource:
    def make(paths: list[str], **fields: JsonValue) -> Source:
        known = dict(fields)
        if known.get("columns") is not None:
            known["columns"] = cast(JsonValue, _columns(known["columns"]))
        if known.get("header") is not None:
            known["header"] = cast(JsonValue, RecordHeader.from_json(json.dumps(known["header"])))
        return source(paths, **known)

    # What may be given is what the source takes.
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

# Those whose constructors take plain values; all others in the package that are configurations can be made of their fields.
_DRAWING: dict[str, Callable[..., transforms.Seeded]] = {"AddLabel": AddLabel, "NegativeSample": NegativeSample}
_CONFIGURED: dict[str, type[Config]] = {
    name: kind
    for name in transforms.__all__
    if inspect.isclass(kind := getattr(transforms, name))
    and issubclass(kind, Config)
    and "__call__" in dir(kind)
    and not inspect.isabstract(kind)
}


def require_known(dataset: DatasetConfig, kinds: Kinds = KINDS) -> None:
    """Raise `ConfigError` for a kind of source or transform that is not there, naming the nearest one."""
    _known("kind", dataset.kind, kinds)
    for transform in dataset.transforms:
        _known("transforms", transform.kind, {**_CONFIGURED, **_DRAWING})


def open_split(dataset: DatasetConfig, split: Split, position: str = "", *, kinds: Kinds = KINDS) -> SplitReader:
    """The batches of `split` behind `position`, the JSON of a state; from its beginning if that is empty.

    Example:
        >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 3, "batch_size": 2, "users": 9}, splits=2)
        >>> [len(batch["label"]) for batch in open_split(dataset, Split(number=1, part=1, parts=2))]
        [2]
    """
    require_known(dataset, kinds)
    files = [] if split.file is None else [split.file]
    source: SplitReader = _made(f"{dataset.kind}: fields", kinds[dataset.kind], paths=files, **dataset.fields)
    if split.parts > 1:
        source = cast(Source, source).shard(split.part, split.parts)
    if dataset.transforms:
        # Every split draws random numbers of its own, whoever reads it.
        drawn = Compose(map(_transform, dataset.transforms)).for_shard(split.number)
        source = Transformed(source, *drawn.transforms)
    if position:
        _go_to(source, position)
    return source


def _go_to(source: SplitReader, position: str) -> None:
    try:
        source.load_state_dict(json.loads(position))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgumentError(f"position: expected what came with a batch of this split; {error}") from None


def _transform(config: TransformConfig) -> Callable[[Batch], Batch]:
    if config.kind in _CONFIGURED:
        made: Any = _CONFIGURED[config.kind].from_json(json.dumps(config.fields))
    else:
        made = _made(f"{config.kind}: fields", _DRAWING[config.kind], **config.fields)
    return cast("Callable[[Batch], Batch]", made)


def _made(where: str, make: Callable[..., Any], /, **fields: Any) -> Any:  # noqa: ANN401 - JSON, checked by who takes it
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
