"""The base of all configuration objects: frozen, typed, keyword-only, validated, with errors that name the field."""

from __future__ import annotations

import inspect
import struct
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from monolith.errors import ConfigError

__all__ = ["Config", "Count", "Finite", "Fraction", "NonNegative", "Positive", "nearest_name"]


def _as_float32(value: float) -> float:
    """Refuse a number that float32, in which the core computes, turns into infinity, zero or one."""
    try:
        (single,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise ValueError("must fit into float32, whose largest number is 3.4e38") from None
    if value != single and single in (0, 1):
        raise ValueError(f"must be distinguishable from {single:g} in float32")
    return value


Finite = Annotated[float, AfterValidator(_as_float32)]
"""A number that float32 can hold."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number >= 0 that int64 can hold."""
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

    def __init__(self, *unnamed: object, **fields: Any) -> None:  # noqa: ANN401 - pydantic checks each field's own type
        if unnamed:
            name, first = type(self).__name__, next(iter(type(self).model_fields), "field")
            raise ConfigError(f"{name}: fields are given by name; write {name}({first}={unnamed[0]!r}, ...)")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    config_group: ClassVar[str] = ""
    """Group of configurations that users write together. An error about an unknown field also looks for it in the group."""

    # Tells pydantic that this __init__ only validates: without it, a Config inside another one would be built through Python
    # objects, losing the JSON rules (a list may become a tuple) and nesting one error text inside another.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401 - as pydantic declares it
        """Make `help()` show each field: pydantic shows no text, and types in a form that nobody has written."""
        super().__pydantic_init_subclass__(**options)
        fields = cls.__pydantic_fields__
        if vars(cls).get("__doc__"):
            described = (_described(cls, name, field) for name, field in fields.items())
            parameters = (Parameter(name, Parameter.KEYWORD_ONLY, default=_default(fields[name])) for name in fields)
            cls.__signature__ = Signature(list(parameters))
            cls.__doc__ = inspect.cleandoc(cls.__doc__ or "") + "\n\nFields:\n" + "\n".join(described)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build from what `model_dump_json` wrote. Wrong input raises `ConfigError`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None

    @classmethod
    def from_texts(cls, texts: Mapping[str, object]) -> Self:
        """Build from fields as strings, as in an environment. Wrong input raises `ConfigError`."""
        try:
            return cls.model_validate_strings(texts, strict=False)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None


def _default(field: FieldInfo) -> object:
    if field.is_required():
        return Parameter.empty
    return field.default if field.default_factory is None else ...


def _described(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """Return what `help()` says about a field: its type as it is written, its default, and the text below it."""
    owners = (vars(owner).get("__annotations__", {}) for owner in model.__mro__)
    written = next((own[name] for own in owners if name in own), field.annotation)
    default = "" if field.is_required() else f" = {_default(field)!r}"
    shown = written if isinstance(written, str) else getattr(written, "__name__", repr(written))
    text = textwrap.indent(field.description or "", " " * 8)
    return f"    {name}: {shown}{default}" + f"\n{text}" * bool(text)


_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "union_tag_not_found")
"""pydantic's names for a value where an object with fields belongs."""


def _config_classes(model: type[BaseModel], path: Sequence[int | str]) -> dict[str, type[BaseModel]]:
    """Return the configuration classes, by name, that the field at `path` accepts. None for a field of a field."""
    field = model.model_fields.get(str(path[0])) if path else None
    if field is None:
        return {}
    parts, found = [field.annotation], {}
    while parts:
        part = parts.pop()
        if isinstance(part, type) and issubclass(part, BaseModel):
            found[part.__name__] = part
        parts.extend(typing.get_args(part))
    return found


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that `name` is a misspelling of, None if there is none.

    Only a few letters of a word may differ: a name with another word in it may mean something else, and a wrong hint does more
    harm than none.

    Example:
        >>> nearest_name("model_dirs", ["model_dir", "log_dir"])
        'model_dir'
        >>> nearest_name("restore_dir", ["model_dir", "log_dir"])
    """
    near = [(sum(edits), other) for other in known if (edits := _misspelt(name, other)) is not None]
    return min(near)[1] if near else None


def _misspelt(name: str, other: str) -> list[int] | None:
    """Return how many letters differ in each word, None if too many for a misspelling."""
    words, others = name.split("_"), other.split("_")
    shared = min(len(words), len(others))
    if shared > 1 and len(words) != len(others) and words[:shared] == others[:shared]:
        return [abs(len(name) - len(other))]  # a word too many or too few at the end
    if len(words) != len(others):
        words, others = ["".join(words)], ["".join(others)]
    pairs = list(zip(words, others, strict=True))
    edits = [_edits(word, its) for word, its in pairs]
    # One letter in four, at least one, but none in a word of two letters, which is easily another word.
    allowed = [0 if longest < 3 else max(1, longest // 4) for longest in (max(map(len, pair)) for pair in pairs)]
    return edits if all(made <= most for made, most in zip(edits, allowed, strict=True)) else None


def _edits(word: str, other: str) -> int:
    """Return the number of letters to insert, remove, replace or swap with a neighbour to get `other`."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, its in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != its))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (other[j - 2], its):
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _owner(model: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """Return the configuration class that the fields at `path` belong to, as far as it is known."""
    members: list[type[BaseModel]] = []
    for part in path:
        # After a field that accepts several classes, pydantic names the one that came by its `kind`.
        chosen = [member for member in members if _kind(member) == part] or list(
            _config_classes(model, [part]).values()
        )
        model, members = (chosen[0], []) if len(chosen) == 1 else (model, chosen)
    return model


def _kind(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return None if field is None else field.default


def _where_it_belongs(model: type[BaseModel], name: str) -> str:
    """Return a hint about a field that `model` does not have: its class, a similar field, or all fields there are."""
    related = _related(model)
    homes = [other.__name__ for other in related if name in other.model_fields]
    if homes:
        inside = [field for field in model.model_fields if homes[0] in _config_classes(model, [field])]
        return f"it is a field of {' and of '.join(homes)}" + (f": write {inside[0]}.{name}" if inside else "")
    if near := nearest_name(name, model.model_fields):
        return f"did you mean {near!r}?"
    for other in related:
        if near := nearest_name(name, other.model_fields):
            return f"did you mean {near!r} of {other.__name__}?"
    return f"known fields: {', '.join(model.model_fields)}"


def _related(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the configurations that a user writes together with `model`, and may confuse it with."""
    group = getattr(model, "config_group", "")
    found, classes = [], [Config]
    while classes and group:
        config = classes.pop()
        classes.extend(config.__subclasses__())
        if config is not model and "config_group" in vars(config) and config.config_group == group:
            found.append(config)
    return sorted(found, key=lambda config: config.__name__)


def _nearest_class(kinds: Mapping[str, type[BaseModel]], value: object) -> str:
    by_lower = {name.lower(): name for name in kinds}
    near = nearest_name(str(value).lower(), by_lower)
    return (
        f"an object, as in {by_lower[near]}()" if near else f"one of {', '.join(f'{name}()' for name in sorted(kinds))}"
    )


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        # pydantic names the members of a union inside the path; a reader knows the field by its own name.
        path = [str(part) for part in problem["loc"] if not str(part).startswith("tagged-union")]
        where = ".".join([model.__name__, *path])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown field; {_where_it_belongs(_owner(model, problem['loc'][:-1]), path[-1])}")
        elif problem["type"] in _NOT_AN_OBJECT and (kinds := _config_classes(model, problem["loc"])):
            expected = _nearest_class(kinds, problem["input"])
            lines.append(f"{where}: expected {expected}{_shown(model, path, problem['input'])}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {message[:1].lower()}{message[1:]}{_shown(model, path, problem['input'])}")
    return "\n".join(lines)


def _shown(model: type[BaseModel], path: list[str], value: object) -> str:
    """Return the input, unless it could hold a secret: errors end up in logs."""
    is_whole = not path and _SECRET in model.model_fields
    is_secret = is_whole or _SECRET in path or _SECRET in repr(value)
    return "" if is_secret else f"; got {value!r}"


_SECRET = "token"
"""The name of fields whose values are not shown."""
