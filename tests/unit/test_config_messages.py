"""What a person reads who writes a configuration as other libraries take it: by position, or an object by its name."""

from __future__ import annotations

import pytest

from monolith import Feature
from monolith.errors import ConfigError


def test_fields_by_position_are_refused_with_the_form_to_write() -> None:
    with pytest.raises(ConfigError, match=r"^Feature: fields are given by name; write Feature\(name='user', \.\.\.\)$"):
        Feature("user", 8)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("optimizer", "adagrad", r"expected an object, as in Adagrad\(\); got 'adagrad'"),
        ("initializer", "zeros", r"expected an object, as in Zeros\(\); got 'zeros'"),
        ("optimizer", "lion", r"expected one of Adadelta\(\), Adagrad\(\), .*; got 'lion'"),
        ("compressor", 7, r"expected one of .*Fp16\(\).*; got 7"),
    ],
)
def test_a_word_in_place_of_an_object_names_the_object(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Feature\.{field}: {expected}$"):
        Feature(name="user", dim=8, **{field: value})
