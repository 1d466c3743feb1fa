"""`FeatureList`: the features of a data stream as the original's feature_list.conf describes them.

One entry a line, as `key=value` pairs with spaces, commas or semicolons between. Lines that begin with # are comments:

    column_name: uid, item_id
    cache_column: gid
    feed_name=user_feed shared=true
    cache_name=profiles capacity=1000 timeout=60
    feature_name=fc_user_id depend=uid method=DirectString slot=1 feature_version=2
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field

from monolith.config import Config, nearest_name
from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.features.ids import fid_v1, fid_v2

__all__ = ["FeatureList", "ListedCache", "ListedFeature", "ListedFeed"]

_PAIR = re.compile(r"(\w+)\s*=\s*(.*?)(?=[\s,;]+\w+\s*=|[\s,;]*$)")
_TRUE = ("true", "yes", "t", "y", "1")


def _words(value: object) -> object:
    return tuple(word.strip().strip("'\"") for word in value.split(",")) if isinstance(value, str) else value


def _truth(value: object) -> object:
    return value.strip("'\"").lower() in _TRUE if isinstance(value, str) else value


def _truths(value: object) -> object:
    words = _words(value)
    return tuple(map(_truth, words)) if isinstance(words, tuple) else words


def _whole(value: object) -> object:
    return int(value) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Truth = Annotated[bool, BeforeValidator(_truth)]
WholeNumber = Annotated[int, BeforeValidator(_whole), Field(ge=0)]


class ListedFeature(Config):
    """One feature of the stream: where its ids come from and what they look like."""

    feature_name: Annotated[str, Field(min_length=1)]
    """Its name, often with "fc_" or "f_" in front, or "fc_a-fc_b" for the combination of two."""
    depend: Words = ()
    """Columns it is made of."""
    method: str | None = None
    """Method by which it is made of them."""
    slot: WholeNumber | None = None
    """The slot of its ids."""
    args: Words = ()
    """Arguments of the method."""
    feature_version: WholeNumber | None = None
    """Whether its ids are fids v1 (also if None) or v2."""
    shared: Truth = False
    """Whether all rows of a batch have the same."""
    cache_keys: Words = ()
    """Keys under which it is cached."""
    need_raw: Truth = False
    """Whether its value before hashing is kept."""
    feature_id: WholeNumber | None = None
    """A number for it."""
    input_optional: Annotated[tuple[bool, ...], BeforeValidator(_truths)] = ()
    """For each of `depend`, whether it may be missing."""
    feature_group: Words = ()
    """Groups it belongs to."""


class ListedFeed(Config):
    """A feed that brings features."""

    feed_name: str
    """Its name."""
    shared: Truth = False
    """Whether all rows of a batch have the same."""
    feature_id: WholeNumber | None = None
    """A number for it."""


class ListedCache(Config):
    """A cache of features."""

    cache_column: str | None = None
    """The column that is cached."""
    cache_name: str | None = None
    """Its name."""
    capacity: WholeNumber | None = None
    """Entries it holds."""
    timeout: WholeNumber | None = None
    """Seconds they are held."""
    cache_type: str | None = None
    """Kind of cache."""
    cache_key_class: str | None = None
    """Kind of key."""


class FeatureList:
    """The features of a stream by name and slot, with its feeds, caches and columns.

    Example:
        >>> listed = FeatureList.parse("feature_name=fc_user_id slot=1; depend=uid,did  method=Combine")
        >>> listed["user_id"].depend, listed[1].feature_name
        (('uid', 'did'), 'fc_user_id')
    """

    def __init__(
        self,
        features: Iterable[ListedFeature],
        *,
        feeds: Iterable[ListedFeed] = (),
        caches: Iterable[ListedCache] = (),
        columns: Iterable[str] = (),
    ) -> None:
        self.features: dict[str, ListedFeature] = {}
        for feature in features:
            if self.features.setdefault(feature.feature_name, feature) is not feature:
                raise ConfigError(f"features: {feature.feature_name!r} is listed twice")
        self.feeds, self.caches = tuple(feeds), tuple(caches)
        self.columns = frozenset(columns)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read the list from a file."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise StorageError(f"{path}: cannot read the features: {error.strerror}") from error
        return cls.parse(text, where=os.fspath(path))

    @classmethod
    def parse(cls, text: str, *, where: str = "feature list") -> Self:
        """Parse the text of a list. An error names the line, after `where`."""
        features, feeds, caches, columns = [], [], [], set()
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.strip()
            try:
                if not line or line.startswith("#"):
                    continue
                if line.startswith("column_name:"):
                    columns |= {name.strip() for name in line.partition(":")[2].split(",")}
                elif line.startswith("cache_column:"):
                    caches.append(ListedCache(cache_column=line.partition(":")[2].strip()))
                elif line.startswith("feed"):
                    feeds.append(ListedFeed(**_pairs(line)))
                elif line.startswith("cache"):
                    caches.append(ListedCache(**_pairs(line)))
                else:
                    features.append(ListedFeature(**_pairs(line)))
            except ConfigError as error:
                raise ConfigError(f"{where}, line {number}: {error}") from None
        return cls(features, feeds=feeds, caches=caches, columns=columns)

    def __getitem__(self, key: str | int) -> ListedFeature:
        """Return the feature of a name, with or without its prefix, or the first one of a slot."""
        found = self._find(key)
        if found is None:
            near = nearest_name(str(key), self.features)
            known = f"did you mean {near!r}?" if near else f"there are {len(self)} others"
            raise InvalidArgumentError(f"feature {key!r} is not listed; {known}")
        return found

    def __contains__(self, key: str | int) -> bool:
        return self._find(key) is not None

    def __iter__(self) -> Iterator[ListedFeature]:
        return iter(self.features.values())

    def __len__(self) -> int:
        return len(self.features)

    def of_slot(self, slot: int) -> list[ListedFeature]:
        """Return all features of a slot."""
        return [feature for feature in self if feature.slot == slot]

    def names_of(self, fids: Iterable[int]) -> tuple[str, ...]:
        """Return the features that these fids, v1 or v2, belong to: the columns that a filter by fids reads."""
        names: dict[str, None] = {}
        for fid in fids:
            bits = fid % 2**64
            v1, v2 = self.of_slot(bits >> fid_v1.signature_bits), self.of_slot(bits >> fid_v2.signature_bits)
            here = [f for f in v1 if f.feature_version != 2] + [f for f in v2 if f.feature_version == 2]
            if not here:
                raise InvalidArgumentError(f"fid {fid}: no feature with its slot is listed")
            names |= dict.fromkeys(feature.feature_name for feature in here)
        return tuple(names)

    def _find(self, key: str | int) -> ListedFeature | None:
        if isinstance(key, int):
            return next(iter(self.of_slot(key)), None)
        terms = key.strip().split("-")
        spelled = ("-".join(prefix + term for term in terms) for prefix in ("", "f_", "fc_"))
        return next((self.features[name] for name in spelled if name in self.features), None)


def _pairs(line: str) -> dict[str, Any]:
    pairs = dict(_PAIR.findall(line))
    if not pairs:
        raise ConfigError(f"expected key=value, got {line!r}")
    return pairs
