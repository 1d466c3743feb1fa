"""Danger: a layout that cannot be built, found only when the first batch arrives, or built with strides that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monolith import ConfigError, InvalidArgumentError, Segment
from monolith.features import Ragged
from monolith.original.fused_layout import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    SliceConfig,
    arrange,
    features_of,
)
from monolith.original.fused_lookup import batch_from_examples, feature_configs_from_proto, feature_configs_to_proto
from monolith.proto import example_pb2

FEATURES = {
    "a": FeatureConfig(table="t", slice_dims=(1, 4)),
    "b": FeatureConfig(table="t", slice_dims=(1, 4)),
    "s": FeatureConfig(table="u", slice_dims=(2, 3), pooling_type=PoolingType.FIRSTN, max_sequence_length=3),
    "t": FeatureConfig(table="u", slice_dims=(2, 3), pooling_type=PoolingType.FIRSTN, max_sequence_length=3),
    "l": FeatureConfig(table="u", slice_dims=(2, 3), pooling_type=PoolingType.FIRSTN, max_sequence_length=4),
}


def configs(out_type: OutType, *slices: tuple[str, int, int]) -> FeatureConfigs:
    parts = tuple(SliceConfig(feature_name=name, start=start, end=end) for name, start, end in slices)
    return FeatureConfigs(
        feature_configs=FEATURES, out_configs={"out": OutConfig(slice_configs=parts, out_type=out_type)}
    )


@pytest.mark.parametrize(
    ("out_type", "slices", "message"),
    [
        (
            OutType.CONCAT,
            [("c", 0, 1)],
            r"out_configs\['out'\]\.slice_configs\[0\]: there is no feature_configs\['c'\]",
        ),
        (
            OutType.CONCAT,
            [("a", 0, 1), ("a", 3, 6)],
            r"slice_configs\[1\]: end 6 is beyond the 5 elements of feature_configs\['a'\]",
        ),
        (OutType.STACK, [("a", 0, 1), ("b", 0, 2)], r"STACK needs slices of one dim, got \[1, 2\]"),
        (OutType.ADDN, [("a", 0, 1), ("b", 0, 2)], r"ADDN needs slices of one dim, got \[1, 2\]"),
        (OutType.ADDN, [("s", 0, 1)], "ADDN of FIRSTN sequences has no meaning"),
        (OutType.CONCAT, [("a", 0, 1), ("s", 0, 1)], r"sequences of lengths \[0, 3\] cannot be put together"),
        (OutType.STACK, [("l", 0, 1), ("s", 0, 1)], r"sequences of lengths \[4, 3\] cannot be put together"),
    ],
)
def test_outputs_that_cannot_be(out_type: OutType, slices: list[tuple[str, int, int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs(out_type, *slices)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SliceConfig(feature_name="a", start=2, end=2), "end: expected more than start 2, not 2"),
        (lambda: FeatureConfig(table="t", slice_dims=()), "FeatureConfig.slice_dims"),
        (lambda: FeatureConfig(table="t", slice_dims=(0,)), "FeatureConfig.slice_dims"),
        (
            lambda: FeatureConfig(table="t", slice_dims=(1,), pooling_type=PoolingType.FIRSTN),
            "expected max_sequence_length > 0 with",
        ),
        (
            lambda: FeatureConfig(table="t", slice_dims=(1,), max_sequence_length=3),
            "expected max_sequence_length > 0 with",
        ),
        (lambda: OutConfig(slice_configs=()), "OutConfig.slice_configs"),
        (
            lambda: FeatureConfigs(
                feature_configs={"a": FEATURES["a"], "b": FeatureConfig(table="t", slice_dims=(2,))}, out_configs={}
            ),
            r"feature_configs\['b'\]: slice_dims \(2,\), but feature_configs\['a'\] has \(1, 4\) in the same table 't'",
        ),
        (
            lambda: features_of(configs(OutType.NONE, ("a", 0, 1)), segments={"t": (Segment(dim=5),)}),
            r"segments\['t'\]: dims \(5,\), but feature_configs\['a'\] has \(1, 4\)",
        ),
    ],
)
def test_configs_that_cannot_be(build: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        build()


def test_sequences_of_one_length_are_put_together_by_element() -> None:
    # The original writes these with the strides of single vectors.
    embeddings = {name: torch.randn(2, 3, 5) for name in ("s", "t")}
    slices = (("s", 0, 2), ("t", 2, 4))
    concat, stack = configs(OutType.CONCAT, *slices), configs(OutType.STACK, *slices)
    parts = embeddings["s"][..., :2], embeddings["t"][..., 2:4]
    assert torch.equal(arrange(concat, embeddings)["out"], torch.cat(parts, dim=2))  # type: ignore[arg-type]
    assert torch.equal(arrange(stack, embeddings)["out"], torch.stack(parts, dim=1))  # type: ignore[arg-type]
    assert concat.shapes("out") == ((-1, 3, 4),)
    assert stack.shapes("out") == ((-1, 2, 3, 2),)


def test_embeddings_that_do_not_fit() -> None:
    wanted = configs(OutType.NONE, ("a", 0, 1))
    with pytest.raises(InvalidArgumentError, match=r"batch\['a'\]: there is no such column"):
        arrange(wanted, {"b": torch.zeros(1, 5)})
    with pytest.raises(ConfigError, match="a layout pools or pads every feature"):
        arrange(wanted, {"a": Ragged(torch.zeros(1, 5), [0, 1])})


def test_messages_that_do_not_fit() -> None:
    message = feature_configs_to_proto(configs(OutType.STACK, ("a", 0, 1), ("b", 0, 1)))
    message.out_configs["out"].shape[0].dims[1] = 7
    with pytest.raises(
        ConfigError, match=r"out_configs\['out'\]\.shape: expected \(\(-1, 2, 1\),\), got \(\(-1, 7, 1\),\)"
    ):
        feature_configs_from_proto(message)
    del message.out_configs["out"].shape[:]
    assert feature_configs_from_proto(message).shapes("out") == ((-1, 2, 1),)
    message.feature_configs["a"].pooling_type = 2  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"pooling_type: 2 is not one of SUM=0, MEAN=1, FIRSTN=3"):
        feature_configs_from_proto(message)


def test_example_batches_that_do_not_fit() -> None:
    message = example_pb2.ExampleBatch(batch_size=2)
    column = message.named_feature_list.add(name="a")
    column.feature.add().fid_v2_list.value.append(7)
    with pytest.raises(InvalidArgumentError, match="feature 'a': has 1 rows, the batch 2"):
        batch_from_examples(message, ["a"])
    column.feature.add().float_list.value.append(0.5)
    with pytest.raises(InvalidArgumentError, match="feature 'a': expected fid_v1_list or fid_v2_list, got float_list"):
        batch_from_examples(message, ["a"])
    del column.feature[1]
    column.feature.add()
    assert batch_from_examples(message, ["a"])["a"].to_lists() == [[7], []]  # type: ignore[union-attr]
