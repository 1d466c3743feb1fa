"""Danger: a field that `help()` does not explain, although its text is in the source."""

from __future__ import annotations

import importlib
import pkgutil
import pydoc
from collections.abc import Iterator

import pytest

import monolith
from monolith.config import Config

for module in pkgutil.walk_packages(monolith.__path__, "monolith."):
    if not module.name.endswith("._core"):
        importlib.import_module(module.name)


def configs(parent: type[Config] = Config) -> Iterator[type[Config]]:
    for child in parent.__subclasses__():
        if child.__module__.startswith("monolith.") and child.__doc__:
            yield child
        yield from configs(child)


@pytest.mark.parametrize("config", sorted(set(configs()), key=lambda config: (config.__module__, config.__qualname__)))
def test_help_shows_every_field_with_its_text(config: type[Config]) -> None:
    shown = " ".join(pydoc.render_doc(config, renderer=pydoc.plaintext).replace("|", " ").split())
    for name, field in config.model_fields.items():
        assert f" {name}: " in shown
        for line in (field.description or "").replace("|", " ").splitlines():
            assert " ".join(line.split()) in shown


def test_a_field_is_shown_as_it_is_written() -> None:
    class Rates(Config):
        """Two rates."""

        low: float = 0.5
        """The lower one."""
        high: float | None = None
        names: list[str]

    text = pydoc.render_doc(Rates, renderer=pydoc.plaintext)
    assert "Rates(*, low=0.5, high=None, names)" in text
    assert (
        "low: float = 0.5\n |          The lower one.\n |      high: float | None = None\n |      names: list[str]\n"
        in text
    )
