"""Danger: a rollback to another moment than the operator meant, because a text was read generously."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from monolith.errors import InvalidArgumentError
from monolith.serve.rollout.moments import moment_of
from monolith.state.restore_points import Moment

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("10m-ago", "time=1699999400.000"),
        ("2h-ago", "time=1699992800.000"),
        ("90s-ago", "time=1699999910.000"),
        ("1.5h-ago", "time=1699994600.000"),
        ("0s-ago", "time=1700000000.000"),
        ("7d-ago", "time=1699395200.000"),
        ("step=500", "step=500"),
        ("sequence=0", "sequence=0"),
        ("time=1699999999", "time=1699999999"),
        ("time=1699999999.5", "time=1699999999.5"),
    ],
)
def test_a_moment_becomes_one_that_restore_points_take(text: str, moment: str) -> None:
    assert moment_of(text, now=NOW) == moment
    assert TypeAdapter(Moment).validate_python(moment) == moment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10m", "got '10m'; a moment in the past ends in -ago"),
        (
            "10 m-ago",
            "expected 10m-ago (s, m, h or d), step=N, sequence=N, time=SECONDS since 1970, or now, got '10 m-ago'",
        ),
        ("-10m-ago", "expected 10m-ago"),
        ("1e3s-ago", "expected 10m-ago"),
        ("10w-ago", "expected 10m-ago"),
        ("step=1.5", "expected 10m-ago"),
        ("step=-1", "expected 10m-ago"),
        ("sequence=", "expected 10m-ago"),
        ("time=nan", "expected 10m-ago"),
        ("step=\u0661", "expected 10m-ago"),  # a digit, but not of ASCII
        ("10m-ago\n", "expected 10m-ago"),
        ("", "expected 10m-ago"),
        ("time=1700000060", "'time=1700000060' is 60 s in the future"),
        ("999999999d-ago", "is before 1970"),
    ],
)
def test_what_is_not_a_moment_of_the_past_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        moment_of(text, now=NOW)
    assert message in str(caught.value)
