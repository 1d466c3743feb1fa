"""The base of all configuration objects: frozen, typed, keyword-only, validated, with errors that name the field."""

from __future__ import annotations

import difflib
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from monolith.errors import ConfigError

__all__ = ["Config", "Finite", "Fraction", "NonNegative", "Positive"]


def _as_float32(value: float) -> float:
    """The core computes in float32: a number that becomes infinite, zero or one there is not the one that was asked for."""
    try:
        (single,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise ValueError("must fit into float32, whose largest number is 3.4e38") from None
    if value != single and single in (0, 1):
        raise ValueError(f"must be distinguishable from {single:g} in float32")
    return value


Finite = Annotated[float, AfterValidator(_as_float32)]
"""A number that float32 can hold."""
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_as_float32)]
"""A number >= 0 that float32 can hold."""
Positive = Annotated[float, Field(gt=0), AfterValidator(_as_float32)]
"""A number > 0 that float32 can hold."""
Fraction = Annotated[float, Field(ge=0, lt=1), AfterValidator(_as_float32)]
"""A number in [0, 1) that is still below 1 in float32."""


class Config(BaseModel):
    """A frozen, keyword-only value object. Building one from wrong input raises `ConfigError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - pydantic checks each field's own type
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    # Tells pydantic that this __init__ only validates: without it, a Config inside another one would be built through Python
    # objects, losing the JSON rules (a list may become a tuple) and nesting one error text inside another.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build from what `model_dump_json` wrote; wrong input raises `ConfigError`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None

    @classmethod
    def from_texts(cls, texts: Mapping[str, object]) -> Self:
        """Build from fields as texts, as an environment has them; wrong input raises `ConfigError`."""
        try:
            return cls.model_validate_strings(texts, strict=False)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        # pydantic names the members of a union inside the path; a reader knows the field by its own name.
        path = [str(part) for part in problem["loc"] if not str(part).startswith("tagged-union")]
        where = ".".join([model.__name__, *path])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(problem["loc"][-1]), list(model.model_fields), n=1)
            known = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(model.model_fields)}"
            lines.append(f"{where}: unknown field; {known}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {message[:1].lower()}{message[1:]}{_shown(model, path, problem['input'])}")
    return "\n".join(lines)


def _shown(model: type[BaseModel], path: list[str], value: object) -> str:
    """What came, unless a secret could be in it: errors end up in logs."""
    is_whole = not path and _SECRET in model.model_fields
    is_secret = is_whole or _SECRET in path or _SECRET in repr(value)
    return "" if is_secret else f"; got {value!r}"


_SECRET = "token"
"""The name of fields whose values are not shown."""
