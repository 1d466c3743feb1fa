"""Write the sources of the documentation site: `python docs/site/stage.py FOLDER`.

Pages are the Markdown files of the tree as they are, with links that lead to the same page on the site. A link to a source file
leads to a copy of that file, so the site needs no other server. docs/index.md is the navigation: its sections are the groups, and
their links are the pages. A page that it does not name is put into a group at the end.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from reference import api_pages, cli_page

ROOT = Path(__file__).parents[2]
PROJECT = {
    "ARCHITECTURE.md": "project/architecture",
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
    "benchmarks/README.md": "project/benchmark-harness",
    "benchmarks/DEAD_ENDS.md": "project/dead-ends",
}
"""Pages outside docs/, and their places on the site."""
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)((?:#[^)]*)?\))")
STYLE = """:root{color-scheme:light dark}body{margin:0 auto;max-width:75rem;padding:1rem;font:15px/1.5 system-ui,sans-serif}
pre{overflow-x:auto;font:13px/1.5 ui-monospace,monospace}"""


def pages() -> dict[Path, str]:
    """Return the committed pages, and their places on the site without a suffix."""
    found = {page: page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    return {**dict(sorted(found.items())), **{ROOT / page: place for page, place in PROJECT.items()}}


def navigation(index: str) -> dict[str, dict[str, str]]:
    """Return the places of the pages in each group of docs/index.md, each with its short title."""
    places = {os.path.relpath(page, ROOT / "docs"): place for page, place in pages().items()}
    groups = {}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        links = re.findall(r"^- \[(.*?)\]\((.*?)\)", text, re.MULTILINE)
        groups[title] = {places[link]: short for short, link in links if link in places}
    return groups


def main(folder: Path) -> None:
    """Write everything that Sphinx reads into `folder`, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    _write(folder / "conf.py", (ROOT / "docs/site/conf.py").read_text())
    sources: set[Path] = set()
    places = pages()
    groups = navigation((ROOT / "docs/index.md").read_text())
    named = {place for group in groups.values() for place in group}
    groups["More"] = {place: place for place in places.values() if place not in named and place != "index"}
    generated = {f"reference/{package}": text for package, text in api_pages().items()}
    generated["reference/command-line"] = cli_page()
    generated_titles = {"reference/api": "Python API", "reference/command-line": "Command line"}
    groups["Reference"] = {**generated_titles, **groups.get("Reference", {})}
    generated["reference/api"] = _api_index(list(generated)[:-1])
    for page, place in places.items():
        text = "".join(_linked(page, place, places, sources))
        _write(folder / f"{place}.md", text + (_toctrees(groups) if place == "index" else ""))
    for place, text in generated.items():
        _write(folder / f"{place}.md", text)
    for picture in (*(ROOT / "docs").glob("*.svg"), *(ROOT / "docs/images").iterdir()):
        target = folder / picture.relative_to(ROOT / "docs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)
    for source in sources:
        shown = source.relative_to(ROOT).as_posix()
        _write(folder / "extra" / "source" / f"{shown}.html", _source_page(shown, source))


def _api_index(packages: list[str]) -> str:
    entries = [f"- [{place.removeprefix('reference/')}]({place.removeprefix('reference/')}.md)" for place in packages]
    names = [place.removeprefix("reference/") for place in packages]
    return "\n".join(
        [
            "# Python API\n",
            "What does every public name do? Each name that a package exports is on the page of its package.\n",
            *entries,
            "\n```{toctree}\n:hidden:\n:titlesonly:\n",
            *names,
            "```\n",
        ]
    )


def _toctrees(groups: dict[str, dict[str, str]]) -> str:
    parts = [
        "\n".join(["\n```{toctree}", ":hidden:", ":titlesonly:", f":caption: {title}\n", *_entries(titles), "```\n"])
        for title, titles in groups.items()
        if titles
    ]
    return "".join(parts)


def _entries(titles: dict[str, str]) -> list[str]:
    return [f"{title} <{place}>" for place, title in titles.items()]


def _linked(page: Path, place: str, places: dict[Path, str], sources: set[Path]) -> Iterator[str]:
    """Yield the text of a page with links of the site, and add the files that it links to `sources`."""

    def replaced(link: re.Match[str]) -> str:
        before, path, after = link.groups()
        target = Path(os.path.normpath(page.parent / path))
        if target == ROOT / "README.md":
            target = ROOT / "docs/index.md"
        if target in places:
            return f"{before}{os.path.relpath(places[target] + '.md', Path(place).parent)}{after}"
        if target.is_relative_to(ROOT / "docs") and target.suffix in (".svg", ".png"):
            return link.group()
        if not target.exists():
            raise SystemExit(f"{page.relative_to(ROOT)}: the link {path} leads nowhere")
        sources.add(target)
        # conf.py makes an address on the site of it, which depends on how deep the page is.
        return f"{before}source{place.count('/')}:{target.relative_to(ROOT).as_posix()})"

    fence = False
    for line in page.read_text().splitlines(keepends=True):
        fence ^= line.startswith("```")
        yield line if fence or line.startswith("    ") else LINK.sub(replaced, line)


def _source_page(shown: str, source: Path) -> str:
    if source.is_dir():
        body = "\n".join(
            sorted(entry.name + "/" * entry.is_dir() for entry in source.iterdir() if entry.name[0] not in "._")
        )
    else:
        body = source.read_text(errors="replace")
    title = html.escape(shown)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<meta name="viewport" content="width=device-width"><h1>{title}</h1><pre>{html.escape(body)}</pre></html>\n'
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
