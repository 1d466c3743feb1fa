"""Sphinx' settings of the site. `make docs` builds it from what stage.py writes."""

from __future__ import annotations

import re
from importlib.metadata import version as installed

from sphinx.application import Sphinx

project = "Monolith for PyTorch"
copyright = "the authors of Monolith for PyTorch"  # noqa: A001 - Sphinx' name
version = release = installed("monolith-torch")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["extra"]
html_extra_path = ["extra"]
html_theme = "furo"
html_title = "Monolith for PyTorch"
html_show_sphinx = False
html_copy_source = False
smartquotes = False  # it would make a dash of the two hyphens of an option

myst_heading_anchors = 6
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "source0": "source/{{path}}.html",
    "source1": "../source/{{path}}.html",
}

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_numpy_docstring = False
# A type in a signature, such as `type`, is also the name of several fields. It is then shown without a link.
suppress_warnings = ["ref.python"]


def setup(app: Sphinx) -> None:
    """Make reStructuredText of docstrings before napoleon reads their sections."""
    app.connect("autodoc-process-docstring", _as_rst, priority=100)


def _as_rst(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Our docstrings know three rules: `code`, examples that begin with >>>, and indented blocks after a colon."""
    # Config.__doc__ lists the fields for help(). On the page they follow as members.
    text = "\n".join(lines).partition("\n\nFields:\n")[0]
    text = re.sub(r":\n\n(?= {4,}(?!>>>)\S)", "::\n\n", text)
    parts = re.split(r"(^ *>>> (?:.+\n?)*|(?<=::\n\n)(?: {4,}.*\n?|\n)+)", text, flags=re.MULTILINE)
    parts[::2] = [_escaped(part) for part in parts[::2]]
    # napoleon takes what stands before a colon in the first line of a field's text for the type of the field.
    first = [""] if what == "attribute" else []
    lines[:] = [*first, *"".join(parts).split("\n"), ""]


def _escaped(text: str) -> str:
    spans = re.split(r"(?<!`)`([^`]+)`(?!`)", text)
    spans[::2] = [re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", span) for span in spans[::2]]
    # The escaped space is nothing but the end of the code, which a letter may follow, as in `Batch`es.
    spans[1::2] = [f"``{' '.join(span.split())}``\\ " for span in spans[1::2]]
    return "".join(spans)
