"""Danger: two features share a table by accident, or one silently gets other rows than declared."""

from __future__ import annotations

import pytest

from monolith import ConfigError, Segment
from monolith.features import Declaration, Feature, declare_tables
from monolith.table import SGD


def names(declaration: Declaration) -> list[list[str]]:
    return [[feature.name for feature in table.features] for table in declaration.tables]


def test_without_a_slot_every_feature_has_its_own_table() -> None:
    declared = declare_tables([Feature(name="a", dim=4), Feature(name="b", dim=4)], seed=5)
    assert declared.assignment == {"a": "a", "b": "b"}
    assert [table.slots for table in declared.tables] == [(None,), (None,)]
    assert [table.config.seed for table in declared.tables] == [5, 5]


def test_features_with_slots_and_equal_rows_lie_in_one_table() -> None:
    declared = declare_tables(
        [
            Feature(name="a", slot=1, dim=4),
            Feature(name="b", slot=2, dim=8),
            Feature(name="c", slot=3, dim=4, pooling="mean"),
            Feature(name="d", slot=4, dim=4, optimizer=SGD()),
            Feature(name="e", slot=5, dim=4, table="mine"),
            Feature(name="f", slot=6, dim=4, bias=True),
        ]
    )
    assert names(declared) == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    assert declared.tables[0].slots == (1, 3)
    assert [table.has_bias for table in declared.tables] == [False] * 4 + [True]
    assert declared["mine"].config.dim == 4


def test_the_name_of_a_merged_table_follows_from_its_segments_alone() -> None:
    (alone,) = declare_tables([Feature(name="a", slot=1, dim=4)]).tables
    more = declare_tables([Feature(name=x, slot=i, dim=4) for i, x in enumerate("zyxa")]).tables
    assert [table.config.name for table in more] == [alone.config.name]
    # Checkpoints carry it, so it may not change.
    assert alone.config.name == "slots_4_adagrad"
    (bias,) = declare_tables([Feature(name="a", slot=1, dim=4, bias=True)]).tables
    assert bias.config.name == "slots_1_ftrl_4_adagrad"


def test_schedules_keep_tables_apart() -> None:
    def slow(step: int) -> float:
        return 0.1 / (1 + step)

    declared = declare_tables(
        [
            Feature(name="a", slot=1, dim=4),
            Feature(name="b", slot=2, dim=4, learning_rate=slow),
            Feature(name="c", slot=3, dim=4, learning_rate=slow),
        ]
    )
    assert names(declared) == [["a"], ["b", "c"]]
    first, second = (table.config.name for table in declared.tables)
    assert second == f"{first}_2"
    assert declared.tables[1].learning_rates(1) == (0.05,)
    assert declared.tables[0].learning_rates(1) == declared.tables[0].config.learning_rates


def test_thresholds_and_expiry_are_kept_by_slot_inside_one_table() -> None:
    (table,) = declare_tables(
        [
            Feature(name="a", slot=1, dim=4, occurrence_threshold=3),
            Feature(name="b", slot=2, dim=4, expire_seconds=60),
            Feature(name="c", shared_with="a"),
        ]
    ).tables
    assert table.config.expiry.slots == {2: 60}
    assert table.admission is not None
    assert {s: t for s, t in table.admission.slot_thresholds.items() if t} == {1: 3}
    (own,) = declare_tables([Feature(name="a", dim=4, occurrence_threshold=3, expire_seconds=60)]).tables
    assert own.config.expiry.default == 60
    assert own.admission is not None
    assert own.admission.default_threshold == 3


def test_sharing_means_the_same_table_and_slot_wherever_it_is_declared() -> None:
    features = [Feature(name="clicks", shared_with="item", pooling="mean"), Feature(name="item", slot=9, dim=4)]
    (table,) = declare_tables(features).tables
    assert table.slots == (9, 9)
    assert table.pooling == "sum"
    (own,) = declare_tables(
        [Feature(name="item", dim=4, pooling="mean"), Feature(name="c", shared_with="item", pooling="none")]
    ).tables
    assert own.slots == (None, None)
    assert own.pooling == "mean"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            [Feature(name="a", dim=4), Feature(name="a", dim=8)],
            r"features\[1\]: the output 'a' is already that of features\[0\]",
        ),
        (
            [Feature(name="a", dim=4, bias=True), Feature(name="a.bias", dim=1)],
            r"features\[1\]: the output 'a.bias' is already that of features\[0\]",
        ),
        (
            [Feature(name="a", slot=7, dim=4), Feature(name="b", slot=7, dim=4)],
            r"features\[1\] 'b': slot 7 is already that of features\[0\] 'a'.*shared_with='a'",
        ),
        (
            [Feature(name="a", shared_with="b")],
            r"features\[0\] 'a': shared_with='b', but there is no such feature; known: a",
        ),
        (
            [Feature(name="a", dim=4), Feature(name="b", shared_with="a", dim=8)],
            r"features\[1\] 'b': dim 8, but it shares rows of dim 4 with features\[0\] 'a'",
        ),
        (
            [Feature(name="a", dim=4), Feature(name="b", shared_with="a", bias=True)],
            r"features\[1\] 'b': bias, but it shares rows that have none with features\[0\] 'a'",
        ),
        (
            [Feature(name="a", dim=4), Feature(name="b", shared_with="a"), Feature(name="c", shared_with="b")],
            r"features\[2\] 'c': shared_with features\[1\] 'b', which has no rows of its own; write shared_with='a'",
        ),
        (
            [Feature(name="a", slot=1, dim=4, table="t"), Feature(name="b", slot=2, dim=8, table="t")],
            r"features\[1\] 'b': its table 't' is already that of features\[0\] 'a'",
        ),
        (
            [Feature(name="a", dim=4), Feature(name="b", dim=4, table="a")],
            r"features\[1\] 'b': its table 'a' is already that of features\[0\] 'a'",
        ),
    ],
)
def test_errors_name_both_places(features: list[Feature], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare_tables(features)


def test_a_shared_dim_counts_segments_without_the_bias() -> None:
    owner = Feature(name="a", segments=(Segment(dim=3), Segment(dim=5)), bias=True)
    (table,) = declare_tables([owner, Feature(name="b", shared_with="a", dim=8)]).tables
    assert table.config.dim == 9
