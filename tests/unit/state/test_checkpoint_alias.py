"""Danger: a parameter gets the weights of another because their names look alike."""

from __future__ import annotations

import pytest

from monolith.state import AliasRules, generate_aliases
from monolith.state.dense import DEFAULT_RULES


def test_nothing_to_do_when_every_name_is_there() -> None:
    assert generate_aliases(["a", "b/part_0", "b/part_1"], ["a", "b", "c"]) == {}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("tower/tower/dense/kernel", "tower/dense/kernel"),
        ("tower/dense/kernel", "tower/tower/dense/kernel"),
        ("model.model.bias", "model.bias"),
        ("ranking/c_dot/mlp/kernel", "ranking/c_dot/compress_tower/kernel"),
        ("x/dcn/kernel_2/trainable_norm", "x/dcn_2/kernel/trainable_norm"),
        ("x/dcn/kernel_0", "x/dcn_0/kernel"),
        ("x/dcn/bias_11", "x/dcn_11/bias"),
    ],
)
def test_one_name(new: str, old: str) -> None:
    assert generate_aliases([new, "same"], [old, "same"]) == {new: old}


def test_layers_that_were_counted_otherwise_keep_their_order() -> None:
    current = [f"deep/dense_{n}/{kind}" for n in (3, 4, 12) for kind in ("kernel", "bias")]
    saved = ["deep/dense/kernel", "deep/dense/bias"]
    saved += [f"deep/dense_{n}/{kind}" for n in (1, 2) for kind in ("kernel", "bias")]
    aliases = generate_aliases(current, saved)
    assert aliases is not None
    assert [aliases[name] for name in current] == saved


def test_each_tower_is_counted_by_itself() -> None:
    current = ["a/dense_7/bias", "b/dense_8/bias"]
    assert generate_aliases(current, ["b/dense_1/bias", "a/dense/bias"]) == {
        "a/dense_7/bias": "a/dense/bias",
        "b/dense_8/bias": "b/dense_1/bias",
    }


def test_layers_that_still_have_their_number_are_not_moved() -> None:
    aliases = generate_aliases(["t/dense/bias", "t/dense_9/bias"], ["t/dense/bias", "t/dense_1/bias", "t/dense_2/bias"])
    assert aliases == {"t/dense_9/bias": "t/dense_1/bias"}


def test_what_cannot_be_resolved_wholly_is_not_resolved_at_all() -> None:
    assert generate_aliases(["a/a/bias", "unknown"], ["a/bias"]) is None


def test_no_saved_name_is_used_twice() -> None:
    assert generate_aliases(["a/a/b", "a/b/b"], ["a/b"]) is None


def test_parts_stand_for_the_whole() -> None:
    assert generate_aliases(["a/a/w/part_0", "a/a/w/part_1"], ["a/w"]) == {"a/a/w": "a/w"}


def test_rules_can_be_added_and_come_first() -> None:
    rules = DEFAULT_RULES.add_mapping_rules({r"head_(\w+)\.(.*)": r"\1/\2", r"(.*)dcn/bias_(\d+)": r"\1cross_\2"})
    assert generate_aliases(["head_ctr.bias"], ["ctr/bias"], rules=rules) == {"head_ctr.bias": "ctr/bias"}
    assert next(rules.candidates("dcn/bias_1")) == "cross_1"
    assert generate_aliases(["head_ctr.bias"], ["ctr/bias"]) is None
    assert AliasRules().rules == {}
