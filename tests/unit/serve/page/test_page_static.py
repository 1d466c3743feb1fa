"""Danger: the page asks another host for something, runs text from a server as code, or a path leads out of its folder."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import monolith.serve.page.page as page_module
from monolith.serve.page import static_routes
from monolith.serve.server.http import HttpRequest, HttpResponse

STATIC = Path(page_module.__file__).parent / "static"
OURS = ("index.html", "page.js", "page.css")


def get(path: str) -> HttpResponse:
    for route in static_routes():
        found = route.match(path)
        if found is not None:
            return asyncio.run(route.handler(HttpRequest(method="GET", path=path, path_parameters=found)))
    raise AssertionError(f"no route takes {path}")


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/static/page.js", "text/javascript"), ("/static/page.css", "text/css")]
)
def test_files_have_their_type_and_a_strict_policy(path: str, kind: str) -> None:
    response = get(path)
    assert response.status == 200
    assert response.headers["Content-Type"].startswith(kind)
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/static/../page.py", "/static/nothing", "/static//etc/passwd", "/static/uplot/../../page.py"]
)
def test_no_other_file_is_served(path: str) -> None:
    assert get(path).status == 404


@pytest.mark.parametrize("name", OURS)
def test_nothing_of_ours_names_another_host(name: str) -> None:
    text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) == []


def test_text_of_servers_is_never_parsed_as_html() -> None:
    script = (STATIC / "page.js").read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|\.href ="
    assert re.findall(forbidden, script) == []


def test_every_control_has_a_label() -> None:
    text = (STATIC / "index.html").read_text()
    controls = set(re.findall(r'<(?:input|select)[^>]* id="([^"]+)"|<(?:input|select) id="([^"]+)"', text))
    names = {name for pair in controls for name in pair if name}
    assert names == set(re.findall(r'<label for="([^"]+)"', text))
