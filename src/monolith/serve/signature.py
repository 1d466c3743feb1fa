"""What an exported model expects and answers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import field_serializer

from monolith.config import Config
from monolith.errors import InvalidArgumentError
from monolith.features import Feature
from monolith.features.batch import BatchColumn, column_of
from monolith.nn import EmbeddingBagCollection

__all__ = ["CollectionSpec", "InputSpec", "OutputSpec", "Signature", "serving_features"]


class InputSpec(Config):
    """A dense column the model reads beside its features."""

    name: str
    dtype: str
    """As in torch, "float32"."""
    shape: tuple[int, ...]
    """Of one row."""

    def check(self, batch: Mapping[str, BatchColumn]) -> torch.Tensor:
        """The column of `batch`, if it is as promised."""
        value = column_of(batch, self.name)
        found = (
            f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        )
        if not isinstance(value, torch.Tensor) or found != f"{self.dtype} {[len(value), *self.shape]}":
            sizes = "".join(f", {size}" for size in self.shape)
            raise InvalidArgumentError(
                f"batch[{self.name!r}]: expected {self.dtype} [rows{sizes}], got {found or type(value).__name__}"
            )
        return value


class OutputSpec(Config):
    """One prediction of the model."""

    name: str
    kind: Literal["binary", "multiclass", "regression"]
    shape: tuple[int, ...]
    """Of one row."""


class CollectionSpec(Config):
    """One `EmbeddingBagCollection` of the model."""

    path: str
    """Where it was in the model, "embeddings" for one."""
    seed: int
    features: tuple[Feature, ...]
    tables: dict[str, str]
    """Path of the file of each table, inside the export."""

    @field_serializer("features")
    def _explicit(self, features: tuple[Feature, ...]) -> list[dict[str, object]]:
        # Only what was said: a feature that shares rows refuses a word about them. Schedules are functions, and only train.
        return [
            feature.model_dump(mode="json", include=feature.model_fields_set - {"learning_rate"})
            for feature in features
        ]


class Signature(Config):
    """Everything a caller has to know."""

    version: int
    """Number of the export, newer ones are greater."""
    step: int
    """Global step of the model."""
    inputs: tuple[InputSpec, ...]
    """Dense columns; the columns of ids are those of the features."""
    outputs: tuple[OutputSpec, ...]
    collections: tuple[CollectionSpec, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that a batch must have."""
        features = (feature.name for collection in self.collections for feature in collection.features)
        return tuple(dict.fromkeys((*features, *(spec.name for spec in self.inputs))))


def serving_features(collection: EmbeddingBagCollection) -> tuple[Feature, ...]:
    """The features of a collection with all defaults written out and without what only training needs.

    Example:
        >>> collection = EmbeddingBagCollection([Feature(name="user", dim=2, occurrence_threshold=3)])
        >>> (feature,) = serving_features(collection)
        >>> feature.table, feature.occurrence_threshold, len(feature.segments)
        ('user', 0, 1)
    """
    tables = collection.declaration.assignment
    return tuple(_serving_feature(feature, tables[feature.name]) for feature in collection.features)


def _serving_feature(feature: Feature, table: str) -> Feature:
    if feature.shared_with is not None:
        return feature
    kept = {name: getattr(feature, name) for name in feature.model_fields_set - _OF_ROW_OR_TRAINING}
    bias, vector = (feature.row[0], feature.row[1:]) if feature.bias else (False, feature.row)
    return Feature(**kept, segments=vector, bias=bias, table=table)


_OF_ROW = {"dim", "segments", "initializer", "optimizer", "compressor", "precision", "bias", "table"}
_OF_ROW_OR_TRAINING = _OF_ROW | {"occurrence_threshold", "expire_seconds", "learning_rate"}
