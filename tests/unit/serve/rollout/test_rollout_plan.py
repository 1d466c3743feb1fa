"""Danger: a user who sees two versions in turn, because the hash of a split differs between servers, releases or shares."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from monolith.errors import ConfigError
from monolith.serve.rollout.plan import QualityBounds, RolloutPlan, split_point

# They may never change: while a release is deployed, servers of both answer the same users.
GOLDEN = {
    ("clicks", 8, "user-1"): 0.5125237811786093,
    ("clicks", 8, "42"): 0.04849885736175008,
    ("clicks", 1700000000, ""): 0.9651689974036808,
    ("Modell-ü", 8, "日本"): 0.018276726008108035,
}


@pytest.mark.parametrize(("what", "point"), GOLDEN.items())
def test_the_hash_is_that_of_earlier_releases(what: tuple[str, int, str], point: float) -> None:
    assert split_point(*what) == point


def test_a_share_is_met_and_a_larger_one_keeps_its_keys() -> None:
    keys = [str(user) for user in range(20_000)]

    def chosen(share: float) -> set[str]:
        plan = RolloutPlan(model="clicks", stable=7, candidate=8, share=share)
        return {key for key in keys if plan.version_of(key) == 8}

    few, more = chosen(0.05), chosen(0.2)
    assert few < more
    assert len(few) == pytest.approx(1000, abs=150)
    assert len(more) == pytest.approx(4000, abs=250)
    assert chosen(0.0) == set()
    assert chosen(1.0) == set(keys)


def test_another_candidate_gets_other_keys() -> None:
    points = [
        (split_point("clicks", 8, str(key)) < 0.1, split_point("clicks", 9, str(key)) < 0.1) for key in range(10_000)
    ]
    assert sum(one and other for one, other in points) == pytest.approx(100, abs=40)


def test_shadows_of_a_share_of_the_keys() -> None:
    plan = RolloutPlan(model="clicks", stable=7, shadows=(8, 9), shadow_share=0.25)
    answers = [plan.shadows_of(str(key)) for key in range(4000)]
    assert set(answers) == {(), (8, 9)}
    assert answers.count((8, 9)) == pytest.approx(1000, abs=120)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": 0.5}, "share: expected 0 without a candidate, got 0.5"),
        ({"candidate": 7}, "candidate: expected another version than stable, got 7"),
        ({"candidate": 8, "share": 1.5}, "RolloutPlan.share"),
        ({"candidate": 8, "share": float("nan")}, "RolloutPlan.share"),
        ({"shadows": (7,)}, "shadows: expected distinct versions that answer no requests already, got 7"),
        ({"shadows": (8, 8)}, "shadows: expected distinct versions"),
        ({"candidate": 8, "share": 0.1, "shadows": (8,)}, "shadows: expected distinct versions"),
        ({"shadows": (1, 2, 3, 4, 5)}, "RolloutPlan.shadows"),
        ({"rewind": "yesterday"}, "RolloutPlan.rewind: moment: expected 10m-ago"),
        ({"candidat": 8}, "did you mean 'candidate'?"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutPlan(model="clicks", stable=7, **fields)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_plan_of_the_guide_has_all_fields_with_their_defaults() -> None:
    page = (Path(__file__).parents[4] / "docs" / "guide-rollout.md").read_text()
    (block,) = re.findall(r"^```yaml plan.yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    plan = RolloutPlan.from_json(json.dumps(yaml.safe_load(block)))
    assert plan.bounds == QualityBounds()
    assert plan.bounds.model_fields_set == set(QualityBounds.model_fields)
    assert plan.model_fields_set == set(RolloutPlan.model_fields) - {"rewind"}


def test_a_plan_survives_json() -> None:
    plan = RolloutPlan(
        model="clicks",
        stable=7,
        candidate=8,
        share=0.1,
        shadows=(9,),
        bounds=QualityBounds(min_labels=5),
        rewind="10m-ago",
    )
    assert RolloutPlan.from_json(plan.model_dump_json()) == plan
