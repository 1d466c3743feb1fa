"""A flag for every field of the typed configuration of runs."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from monolith.train import RunConfig

__all__ = ["run_flags"]


def run_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give `verb`, which takes a dict `flags`, one flag for each field of `RunConfig` that is a single value."""

    # A mapping has no form on a command line; `--set` and files have one.
    names = [name for name, field in RunConfig.model_fields.items() if typing.get_origin(field.annotation) is not dict]

    @functools.wraps(verb)
    def with_flags(**arguments: Any) -> None:  # noqa: ANN401 - typer passes what the signature below says
        flags = {name: arguments.pop(name) for name in names}
        verb(**arguments, flags=flags)

    own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "flags"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_flag(name)) for name in names
    ]
    with_flags.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {}
    return with_flags


def _flag(name: str) -> object:
    field = RunConfig.model_fields[name]
    default = "" if field.default is None else f" [default: {field.default}]"
    option = typer.Option(help=f"{field.description}{default}", rich_help_panel="Run", show_default=False)
    return Annotated[_plain(field.annotation) | None, option]


def _plain(annotation: Any) -> Any:  # noqa: ANN401 - type forms have no common type
    """`float` of `Annotated[float, ...] | None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
