"""Labels of served predictions: how they are written, and the bounded memory that joins them with what was served."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from monolith.config import Config
from monolith.errors import ConfigError, InvalidArgumentError, SchemaError, StorageError

__all__ = ["LabelledPredictions", "PredictionMemory", "ServedLabel", "parse_labels", "read_label_file"]

_Fraction = Annotated[float, Field(ge=0, le=1)]
_FILE_BATCH = 10_000


class ServedLabel(Config):
    """What became of one served prediction, or of all predictions of a request.

    Example:
        >>> ServedLabel(request_id="r-1", label=1.0).row
    """

    request_id: Annotated[str, Field(min_length=1)]
    """The id that the client gave to its request."""
    label: _Fraction | tuple[_Fraction, ...]
    """From 0 to 1. Several are those of all rows, in their order."""
    row: Annotated[int, Field(ge=0)] | None = None
    """Number of the row in the request. May be left out for a request of one row."""
    head: str | None = None
    """May be left out if the model has one head with probabilities."""
    model: str | None = None
    """May be left out if request ids are not used for several models at once."""


_LABELS: TypeAdapter[list[ServedLabel]] = TypeAdapter(list[ServedLabel])


def parse_labels(body: bytes) -> list[ServedLabel]:
    """Return the labels in JSON lines, one JSON array or one JSON object. If one is wrong, none is taken.

    Raises:
        InvalidArgumentError: It is not JSON, or a label is wrong. The message says which.

    Example:
        >>> [label.label for label in parse_labels(b'{"request_id": "a", "label": 1}\\n{"request_id": "b", "label": 0}\\n')]
        [1.0, 0.0]
    """
    text = body.strip()
    if not text.startswith(b"["):
        objects = [text] if _is_one_object(text) else [line for line in text.splitlines() if line.strip()]
        text = b"[" + b",".join(objects) + b"]"
    try:
        return _LABELS.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(f"label {part + 1}" if isinstance(part, int) else part for part in first["loc"][:2])
        raise InvalidArgumentError(
            f"labels: {where or 'body'}: {first['msg']}; expected JSON lines or an array of "
            '{"request_id": "...", "label": 0..1} with row, head and model where needed; nothing was taken'
        ) from None


def _is_one_object(body: bytes) -> bool:
    """Return whether the body is one JSON object, which may be written over several lines."""
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def read_label_file(path: str | Path) -> Iterator[list[ServedLabel]]:
    """Yield the labels in a file of JSON lines, or in a Parquet file with the columns request_id and label, in batches.

    A Parquet file may also have the columns row, head and model. Its name ends in .parquet.

    Raises:
        SchemaError: A column is missing.
        InvalidArgumentError: A label is wrong. The message has its number. Earlier batches have been yielded.
        StorageError: The file cannot be read.
    """
    read = _parquet_batches if str(path).endswith(".parquet") else _line_batches
    try:
        yield from read(Path(path))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _line_batches(path: Path) -> Iterator[list[ServedLabel]]:
    lines: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            if len(lines) == _FILE_BATCH:
                yield parse_labels(b"".join(lines))
                lines = []
    if lines:
        yield parse_labels(b"".join(lines))


def _parquet_batches(path: Path) -> Iterator[list[ServedLabel]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{path}: is not a Parquet file: {error}") from None
    with file:
        known = set(ServedLabel.model_fields) & set(file.schema_arrow.names)
        for name in ("request_id", "label"):
            if name not in known:
                raise SchemaError(f"{path}: has no column {name!r}; it has {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=_FILE_BATCH, columns=sorted(known)):
            yield [_label_of_row(path, row) for row in batch.to_pylist()]


def _label_of_row(path: Path, row: Mapping[str, Any]) -> ServedLabel:
    label = row["label"]
    if isinstance(label, list):
        label = tuple(map(float, label))
    try:
        return ServedLabel(**{**row, "label": float(label) if isinstance(label, int) else label})
    except ConfigError as error:
        raise InvalidArgumentError(f"{path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class LabelledPredictions:
    """Predictions of one version and head, joined with their labels."""

    model: str
    version: int
    head: str
    predictions: npt.NDArray[np.float64]
    labels: npt.NDArray[np.float64]
    answered: npt.NDArray[np.float64]
    """When the predictions were served, by the clock of the memory."""


class _Request:
    """What was predicted for one request: [heads, rows] by version."""

    __slots__ = ("answers", "heads", "labelled", "returned", "time")

    def __init__(self, time: float, heads: tuple[str, ...]) -> None:
        self.time, self.heads = time, heads
        self.returned: int | None = None
        self.answers: dict[int, npt.NDArray[np.float32]] = {}
        self.labelled: npt.NDArray[np.bool_] | None = None

    @property
    def rows(self) -> int:
        return next((values.shape[1] for values in self.answers.values()), 0)

    @property
    def size(self) -> int:
        return sum(values.size for values in self.answers.values())


_Key = tuple[str, str]


class PredictionMemory:
    """The predictions of the last requests, until their labels come. Thread-safe.

    The oldest are dropped when there are more than `max_requests`, more than `max_predictions`, or when they are older than
    `max_age_secs`. A request takes about 800 bytes, and 4 bytes more for every prediction.

    Example:
        >>> memory = PredictionMemory()
        >>> _ = memory.add("clicks", 7, "r-1", ("ctr",), np.array([[0.25, 0.5]], dtype=np.float32))
        >>> joined, counts = memory.join([ServedLabel(request_id="r-1", row=1, label=1.0)])
        >>> joined[0].version, joined[0].predictions.tolist(), dict(counts)
        (7, [0.5], {'joined': 1})
    """

    def __init__(
        self,
        *,
        max_requests: int = 100_000,
        max_predictions: int = 10_000_000,
        max_age_secs: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, limit in (
            ("max_requests", max_requests),
            ("max_predictions", max_predictions),
            ("max_age_secs", max_age_secs),
        ):
            if not limit > 0:
                raise InvalidArgumentError(f"{name}: expected a number above 0, got {limit}")
        self._max_requests, self._max_predictions, self._max_age = max_requests, max_predictions, max_age_secs
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: OrderedDict[_Key, _Request] = OrderedDict()
        self._dropped: OrderedDict[_Key, None] = OrderedDict()
        self._models: set[str] = set()
        self._predictions = 0
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Requests by what became of them: dropped_capacity, dropped_age, reused_id. Labels as labels_joined, see `join`."""
        with self._lock:
            return Counter(self._counts)

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        model: str,
        version: int,
        request_id: str,
        heads: tuple[str, ...],
        values: npt.NDArray[np.float32],
        *,
        shadow: bool = False,
    ) -> list[tuple[int, npt.NDArray[np.float64]]]:
        """Remember the predictions [heads, rows] of a version.

        Returns:
            Versions in the shadow of the returned answer, and the distances of their predictions from it, as soon as both
            are known. A shadow may predict before or after the answer is returned.
        """
        now, key = self._clock(), (model, request_id)
        with self._lock:
            request = self._requests.get(key)
            if request is not None and not _belongs(request, heads, values, shadow=shadow):
                self._forget(key, "reused_id")
                request = None
            if request is None:
                request = self._requests[key] = _Request(now, heads)
                self._dropped.pop(key, None)
                self._models.add(model)
            self._predictions += values.size - getattr(request.answers.get(version), "size", 0)
            request.answers[version] = values
            if not shadow:
                request.returned = version
            self._trim(now)
            if request.returned is None:
                return []
            returned = request.answers[request.returned].astype(np.float64)
            new = [version] if shadow else [other for other in request.answers if other != version]
            return [(other, np.abs(request.answers[other] - returned).ravel()) for other in new]

    def join(self, labels: Iterable[ServedLabel]) -> tuple[list[LabelledPredictions], Counter[str]]:
        """Join labels with what was served. Returns the examples by version and head, and the number of labels of each kind.

        Kinds: joined, repeated (the prediction has a label already, which stays), late (the request was dropped), unknown (there
        was no such request, or it was dropped long ago), invalid (no such row or head, or it is not clear which).
        """
        found: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
        counts: Counter[str] = Counter()
        with self._lock:
            self._trim(self._clock())
            for label in labels:
                self._join_one(label, found, counts)
            self._counts.update({f"labels_{kind}": number for kind, number in counts.items()})
        batches = []
        for (model, version, head), examples in found.items():
            predictions, given, answered = np.array(examples, dtype=np.float64).T
            batches.append(
                LabelledPredictions(
                    model=model, version=version, head=head, predictions=predictions, labels=given, answered=answered
                )
            )
        return batches, counts

    def _join_one(
        self,
        label: ServedLabel,
        found: dict[tuple[str, int, str], list[tuple[float, float, float]]],
        counts: Counter[str],
    ) -> None:
        models = self._models if label.model is None else {label.model}
        keys = [(model, label.request_id) for model in models]
        known = [key for key in keys if key in self._requests]
        if len(known) != 1:
            late = any(key in self._dropped for key in keys)
            counts["invalid" if known else "late" if late else "unknown"] += 1
            return
        request = self._requests[known[0]]
        head = _position(label.head, request.heads)
        rows = _rows_of(label, request.rows)
        if head is None or rows is None:
            counts["invalid"] += 1
            return
        if request.labelled is None:
            request.labelled = np.zeros((len(request.heads), request.rows), dtype=np.bool_)
        values = label.label if isinstance(label.label, tuple) else (label.label,)
        for row, value in zip(rows, values, strict=True):
            if request.labelled[head, row]:
                counts["repeated"] += 1
                continue
            request.labelled[head, row] = True
            counts["joined"] += 1
            for version, answer in request.answers.items():
                examples = found.setdefault((known[0][0], version, request.heads[head]), [])
                examples.append((float(answer[head, row]), value, request.time))

    def _trim(self, now: float) -> None:
        while self._requests:
            key, request = next(iter(self._requests.items()))
            if request.time < now - self._max_age:
                self._forget(key, "dropped_age")
            elif len(self._requests) > self._max_requests or (
                self._predictions > self._max_predictions and len(self._requests) > 1
            ):
                self._forget(key, "dropped_capacity")
            else:
                return

    def _forget(self, key: _Key, why: str) -> None:
        self._predictions -= self._requests.pop(key).size
        self._counts[why] += 1
        self._dropped[key] = None
        if len(self._dropped) > self._max_requests:
            self._dropped.popitem(last=False)


def _belongs(request: _Request, heads: tuple[str, ...], values: npt.NDArray[np.float32], *, shadow: bool) -> bool:
    """Return whether predictions are those of the request that is known by the same id, not of a later one."""
    if request.heads != heads or request.rows != values.shape[1]:
        return False
    return shadow or request.returned is None


def _position(head: str | None, heads: Sequence[str]) -> int | None:
    if head is None:
        return 0 if len(heads) == 1 else None
    return heads.index(head) if head in heads else None


def _rows_of(label: ServedLabel, rows: int) -> Sequence[int] | None:
    if isinstance(label.label, tuple):
        return range(rows) if label.row is None and len(label.label) == rows else None
    if label.row is None:
        return (0,) if rows == 1 else None
    return (label.row,) if label.row < rows else None
