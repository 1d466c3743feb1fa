"""Danger: a feature is read under another name, slot or version than the list says, or a line is silently skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.original.feature_list import FeatureList, ListedCache, ListedFeature, ListedFeed

TEXT = """
# the features of the stream
column_name: uid, item_id ,gid
cache_column: gid
feed_name=user_feed shared=True feature_id=4
cache_name=profiles, capacity=1000; timeout=60

feature_name=fc_user_id depend=uid method=DirectString slot=1
feature_name = f_item  depend="item_id" , method=Direct;slot=2, feature_version=2 need_raw=yes shared=false
feature_name=fc_user_id-fc_item depend=uid,item_id args=3,'x y' slot=1 input_optional=true,false feature_group=a,b;
"""


def test_every_kind_of_line() -> None:
    listed = FeatureList.parse(TEXT)
    assert listed.columns == {"uid", "item_id", "gid"}
    assert listed.feeds == (ListedFeed(feed_name="user_feed", shared=True, feature_id=4),)
    assert listed.caches == (
        ListedCache(cache_column="gid"),
        ListedCache(cache_name="profiles", capacity=1000, timeout=60),
    )
    assert list(listed) == [
        ListedFeature(feature_name="fc_user_id", depend=("uid",), method="DirectString", slot=1),
        ListedFeature(
            feature_name="f_item", depend=("item_id",), method="Direct", slot=2, feature_version=2, need_raw=True
        ),
        ListedFeature(
            feature_name="fc_user_id-fc_item",
            depend=("uid", "item_id"),
            args=("3", "x y"),
            slot=1,
            input_optional=(True, False),
            feature_group=("a", "b"),
        ),
    ]


def test_features_are_found_by_name_prefix_combination_and_slot() -> None:
    listed = FeatureList.parse(TEXT)
    found = {key: listed[key].feature_name for key in ("fc_user_id", "user_id", "item", " item ", "user_id-item", 2, 1)}
    assert found == {
        "fc_user_id": "fc_user_id",
        "user_id": "fc_user_id",
        "item": "f_item",
        " item ": "f_item",
        "user_id-item": "fc_user_id-fc_item",
        2: "f_item",
        1: "fc_user_id",
    }
    assert len(listed) == 3
    assert ("item" in listed, 2 in listed, "gid" in listed, 9 in listed) == (True, True, False, False)
    assert [feature.feature_name for feature in listed.of_slot(1)] == ["fc_user_id", "fc_user_id-fc_item"]
    with pytest.raises(InvalidArgumentError, match="did you mean 'fc_user_id'"):
        listed["fc_user_idd"]


def test_fids_lead_to_the_features_that_hold_them() -> None:
    listed = FeatureList.parse(TEXT)
    one, two = 1 << 54 | 77, 2 << 48 | 2**40
    assert listed.names_of([one, two, one]) == ("fc_user_id", "fc_user_id-fc_item", "f_item")
    signed = FeatureList.parse("feature_name=high slot=1023")
    assert signed.names_of([(1023 << 54 | 5) - 2**64]) == ("high",)
    with pytest.raises(InvalidArgumentError, match="no feature"):
        listed.names_of([2 << 54 | 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("feature_name=a slott=1", "did you mean 'slot'"),
        ("feature_name=a slot=x", "slot"),
        ("slot=1", "feature_name"),
        ("just words", "expected key=value"),
        ("cache_name=a capacity=-1", "capacity"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"features.conf, line 2: (.|\n)*{message}"):
        FeatureList.parse(f"feature_name=b\n{line}", where="features.conf")


def test_a_feature_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' is listed twice"):
        FeatureList.parse("feature_name=a slot=1\nfeature_name=a slot=2")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "feature_list.conf").write_text(TEXT)
    assert len(FeatureList.read(tmp_path / "feature_list.conf")) == 3
    with pytest.raises(StorageError, match="missing"):
        FeatureList.read(tmp_path / "missing")
