"""Flags that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Json", "Sets", "Target", "Untrained"]

Target = Annotated[str, typer.Argument(help="A YAML file, or module:Model.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="A field of the configuration, as run.clip_norm=10. May be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text for people.")]
Untrained = Annotated[
    bool,
    typer.Option("--untrained", help="Use the initial weights if the model_dir has no checkpoint, instead of failing."),
]
