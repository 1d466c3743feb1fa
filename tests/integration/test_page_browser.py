"""Danger: the page looks right in the source and not in a browser: blank, old without saying so, or running a hostile name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from chromium import Browser, browser
from monolith.serve.metrics import ServingMetrics
from monolith.serve.page import Overview, Page, PageServer
from monolith.serve.page.page import charts_installed
from monolith.serve.server.http import HttpRequest, HttpResponse
from page_replicas import QUALITY, Clock, SetLag, answer, busy_metrics, change, replica, repository

HOSTILE = "</td><img src=x onerror=window.broken=1><script>window.broken=1</script>"
TILE = "document.querySelectorAll('.tiles dd')"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def shown(tab: Browser) -> Iterator[Browser]:
    tab.show()
    tab.problems.clear()
    tab.requests.clear()
    yield tab
    tab.open("about:blank")
    assert tab.problems == []


def submit(shown: Browser, form: str, **values: str) -> None:
    for name, value in values.items():
        shown.evaluate(f"document.getElementById('{name}').value = {json.dumps(value)}")
    shown.evaluate(f"document.querySelector('#{form} button').click()")


def test_it_follows_the_server_and_says_when_it_stops(shown: Browser) -> None:
    clock, follower = Clock(), SetLag(seconds=0.25)
    metrics = ServingMetrics(repository(replica(follower=follower)), clock=clock, now=clock, in_flight=lambda: 6)
    with PageServer(Page(metrics, now=clock).routes()) as server:
        shown.open(server.address)
        shown.until(f"{TILE}[0]?.textContent === '250 ms'")
        assert shown.evaluate(f"{TILE}[6].textContent") == "6"
        assert "Live" in shown.text()
        follower.fields |= {"seconds": 1.5, "connected": False}
        for _ in range(12):
            metrics.answered(answer())
        clock.now += 1
        metrics.tick()
        shown.until(f"{TILE}[0].textContent === '1.50 s' && {TILE}[1].textContent === '12 /s'")
        assert shown.evaluate(f"{TILE}[0].parentElement.className") == "bad", "it is not connected to training"
        # Only the page itself, and nothing from anywhere else.
        assert {url for url in shown.requests if not url.startswith(("data:", server.address))} == set()
        assert shown.evaluate("document.getElementById('silent').hidden")
    shown.until("!document.getElementById('silent').hidden")
    assert "What you see is old" in shown.text()
    assert shown.evaluate("document.getElementById('content').className") == "old"
    assert "Live" not in shown.text()


def test_it_says_that_the_last_changes_of_a_run_may_be_missing(shown: Browser) -> None:
    clock, follower = Clock(), SetLag(connected=False)
    metrics = ServingMetrics(repository(replica(follower=follower)), clock=clock, now=clock)
    with PageServer(Page(metrics, now=clock).routes()) as server:
        shown.open(server.address)
        banner = "document.querySelector('section.card .banner')"
        shown.until(f"{banner}?.hidden")
        follower.fields["missing"] = "run /runs/clicks: no answer, and there is no such folder here"
        clock.now += 1
        metrics.tick()
        shown.until(f"!{banner}.hidden")
        text = shown.evaluate(f"{banner}.textContent")
        assert "may lack the last changes of its run. run /runs/clicks: no answer" in text
        follower.fields["missing"] = ""
        clock.now += 1
        metrics.tick()
        shown.until(f"{banner}.hidden")


def test_it_says_that_training_is_behind_although_the_replica_is_not(shown: Browser) -> None:
    live = {"answers": True, "state": "training", "lag_records": 40, "lag_seconds": 0.2, "bad_records": 0}
    log = {"segments": 1, "bytes": 9, "sequence": 7, "time": 0.0}
    run = {"path": "runs/clicks", "step": 7, "checkpoint": None, "log": log, "live": live}
    clock = Clock()
    metrics = ServingMetrics(repository(replica(follower=SetLag())), clock=clock, now=clock)
    with PageServer(Page(metrics, runs=lambda: [run], now=clock).routes()) as server:
        shown.open(server.address)
        shown.until("document.body.innerText.includes('40 records behind, 200 ms')")
        assert shown.evaluate("document.getElementById('behind').hidden")
        live |= {"lag_records": 50_000, "lag_seconds": 12.5}
        shown.until("!document.getElementById('behind').hidden")
        said = "document.getElementById('behind').textContent"
        shown.until(f"{said}.includes('Training of runs/clicks is 50,000 records (12.5 s) behind its stream')")
        assert "the lag grows" in shown.evaluate(said)
        live |= {"lag_records": 20_000, "lag_seconds": 7.0}
        shown.until(f"{said}.includes('it catches up')")
        run["live"] = {"answers": False, "problem": "it was killed"}
        shown.until(f"{said}.includes('Training of runs/clicks does not answer')")
        assert "it was 20,000 records behind" in shown.evaluate(said)
        assert "it was killed" in shown.text()
        run["live"] = live | {"lag_records": 0, "lag_seconds": 0.0}
        shown.until("document.getElementById('behind').hidden")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 360])
def test_it_fits_a_desk_and_a_phone(shown: Browser, dark: bool, width: int) -> None:
    clock = Clock()
    page = Page(busy_metrics(clock, seconds=60), quality=lambda: QUALITY, now=clock)
    with PageServer(page.routes()) as server:
        shown.show(dark=dark, width=width)
        shown.open(server.address)
        shown.until("document.querySelectorAll('figure .plot > *').length === 3")
        submit(shown, "lookup-form", **{"lookup-id": "7"})
        shown.until("document.querySelector('#lookup-answer table')")
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        back = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(18, 20, 23)" if dark else "rgb(246, 247, 249)")
        assert shown.evaluate("document.getElementById('reduced').hidden") is charts_installed()
        assert contrast(shown) >= 4.5
        columns = shown.evaluate(
            "getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length"
        )
        assert columns == (3 if width == 1200 else 1)
        assert "0.7745" in shown.text()


def contrast(shown: Browser) -> float:
    """The least contrast of a text with its background, as WCAG defines it."""
    return shown.evaluate(
        """(() => {
          const light = (text) => {
            const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = text.match(/[0-9.]+/g).map((x) => linear(x / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const back = (node) => {
            const colour = getComputedStyle(node).backgroundColor;
            return colour === "rgba(0, 0, 0, 0)" ? back(node.parentElement) : colour;
          };
          const texts = [...document.querySelectorAll("h1, h2, p, dt, dd, th, td, td span, caption, label, button, .key")];
          const ratios = texts.filter((node) => node.textContent && !node.hidden).map((node) => {
            const [one, other] = [light(getComputedStyle(node).color), light(back(node))];
            return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
          });
          return Math.min(...ratios);
        })()"""
    )


def test_names_that_are_code_are_shown_as_text(shown: Browser) -> None:
    page = Page(
        ServingMetrics(repository(replica(name=HOSTILE, tables=(HOSTILE.replace("/", "|"),)))),
        quality=lambda: {HOSTILE: {3: {HOSTILE: HOSTILE}}},
        rollback=lambda model: (True, HOSTILE),
        history=lambda table, id_: [change(1)],
    )
    with PageServer(page.routes()) as server:
        shown.open(server.address)
        shown.until("document.querySelectorAll('table').length >= 3")
        assert HOSTILE in shown.text()
        submit(shown, "lookup-form", **{"lookup-id": "7"})
        shown.until("document.querySelectorAll('#lookup-answer table').length === 2")
        shown.evaluate("document.querySelector('.title button').click()")
        shown.until("document.getElementById('rollback').open")
        assert HOSTILE in shown.evaluate("document.getElementById('rollback-reason').textContent")
        assert shown.evaluate("document.images.length") == 0
        assert shown.evaluate("window.broken === undefined")


def test_one_id_is_looked_up(shown: Browser) -> None:
    clock, follower = Clock(), SetLag(sequence=4)
    metrics = ServingMetrics(repository(replica(follower=follower)), now=clock)
    metrics.tick()
    page = Page(metrics, now=clock, history=lambda table, id_: [change(3, (0.3, 0.4)), change(4)])
    with PageServer(page.routes()) as server:
        shown.open(server.address)
        shown.until("!document.getElementById('lookup').hidden")
        submit(shown, "lookup-form", **{"lookup-id": "7"})
        shown.until("document.querySelectorAll('#lookup-answer table').length === 2")
        text = shown.evaluate("document.getElementById('lookup-answer').innerText")
        assert "3.0000 4.0000" in text
        assert "2023-11-14 22:13:23, step 30" in text, "when it was learnt"
        assert "before 2023-11-14 22:13:20" in text, "since when it is served"
        submit(shown, "lookup-form", **{"lookup-id": "-9223372036854775809"})
        shown.until("document.querySelector('#lookup-answer .banner')")
        assert "expected an int64" in shown.text()


class Guarded(BaseHTTPRequestHandler):
    """A server with a token: static files are open, the rest is not. The routes of the rollout are not built here."""

    page: Page
    token = "s" * 20
    posted: list[tuple[str, str, bytes]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        allowed = path == "/" or path.startswith("/static/") or self.authorized
        response = HttpResponse(status=401, body=b'{"error": "a token is needed"}')
        for route in self.page.routes() if allowed else ():
            found = route.match(path)
            if found is not None:
                response = asyncio.run(route.handler(HttpRequest(method="GET", path=path, path_parameters=found)))
                break
        self.answer(response.status, response.body, dict(response.headers))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.path, self.headers.get("Authorization", ""), body))
        if self.authorized:
            self.answer(200, b'{"message": "now at version 41"}', {"Content-Type": "application/json"})
        else:
            self.answer(403, b'{"error": "another token is needed"}', {"Content-Type": "application/json"})

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.token}"

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the name in the base class
        pass


@pytest.fixture
def guarded() -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    page = Page(ServingMetrics(repository(replica())), rollback=lambda model: (True, "To version 41."))
    handler = type("GuardedPage", (Guarded,), {"page": page, "posted": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.posted
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_page_asks_for_the_token_and_rolls_back_with_it(
    shown: Browser, guarded: tuple[str, list[tuple[str, str, bytes]]]
) -> None:
    address, posted = guarded
    shown.open(address)
    shown.until("!document.getElementById('token-form').hidden")
    assert "it needs its token" in shown.text()
    submit(shown, "token-form", token="s" * 20)
    shown.until("document.querySelector('.title button') && document.getElementById('token-form').hidden")
    shown.evaluate("document.querySelector('.title button').click()")
    assert "To version 41." in shown.evaluate("document.getElementById('rollback').innerText")
    submit(shown, "rollback-form", **{"rollback-token": "wrong token wrong token"})
    said = "document.getElementById('rollback-answer').textContent"
    shown.until(f"{said}.startsWith('Refused (403): another token is needed')")
    submit(shown, "rollback-form", **{"rollback-token": "s" * 20, "rollback-to": " 10m-ago"})
    shown.until(f"{said} === 'now at version 41'")
    assert posted == [
        ("/rollout/rollback", "Bearer wrong token wrong token", b'{"model":"clicks","to":null}'),
        ("/rollout/rollback", f"Bearer {'s' * 20}", b'{"model":"clicks","to":"10m-ago"}'),
    ]


def test_without_a_rollout_there_is_no_button(shown: Browser) -> None:
    with PageServer(Page(ServingMetrics(repository(replica()))).routes()) as server:
        shown.open(server.address)
        shown.until("document.querySelectorAll('table').length >= 2")
        assert shown.evaluate("document.querySelector('.title button').hidden")


def test_without_the_chart_library_it_draws_lines_and_says_so(shown: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monolith.serve.page.page.charts_installed", lambda: False)
    clock = Clock()
    with PageServer(Page(busy_metrics(clock, seconds=30), now=clock).routes()) as server:
        shown.open(server.address)
        shown.until("document.querySelectorAll('svg.plot path').length === 6")
        assert shown.evaluate("document.querySelector('svg.plot path').getAttribute('d').split('L').length") == 30
        assert "Charts are reduced" in shown.text()
        assert re.search(r"lag \d+\.\d ms, at most \d+\.\d ms", shown.text())
        assert not [url for url in shown.requests if "uplot" in url]


def test_several_replicas_and_a_run_on_one_page(shown: Browser, tmp_path: Path) -> None:
    page = Page(ServingMetrics(repository(replica())))
    (tmp_path / "run").mkdir()
    with PageServer(page.routes()) as one:
        with PageServer(page.routes()) as dying:
            addresses = [one.address, dying.address]
        with PageServer(Overview(addresses, [tmp_path / "run"], timeout=30).routes()) as server:
            shown.open(server.address)
            shown.until("document.querySelectorAll('main > section').length === 3")
            text = shown.text()
            assert "No answer from this replica: URLError: <urlopen error [Errno 111] Connection refused>" in text
            assert str(tmp_path / "run") in text
            submit(shown, "lookup-form", **{"lookup-id": "7"})
            shown.until("document.querySelector('#lookup-answer table')")
