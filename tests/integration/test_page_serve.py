"""Danger: the page works with a server made for tests and not with `monolith serve`, its token and its rollouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from chromium import browser
from serving_shards import export_rows

TOKEN = "a-token-of-tests-only"


class Served:
    """`monolith serve` as a process, with two versions of a model, a token and rollouts."""

    def __init__(self, folder: Path) -> None:
        exports = folder / "clicks" / "exported_models"
        self.old, self.new = (int(export_rows(exports, seed=seed).name) for seed in (5, 6))
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(TOKEN)
        command = [sys.executable, "-m", "monolith.cli", "serve", str(exports), "--http-port", "0", "--grpc-port", "0"]
        command += ["--token-file", str(self.token_file), "--rollout-dir", str(folder / "rollouts"), "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://{json.loads(self._process.stdout.readline())['http']}"

    def ask(self, path: str, body: object = None, *, token: str | None = TOKEN) -> tuple[dict[str, str], bytes]:
        headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self.url + path, data=data, headers=headers), timeout=60) as response:
            return {name.lower(): value for name, value in response.headers.items()}, response.read()

    def predict(self, path: str = "/v2/models/clicks/infer") -> None:
        inputs = [{"name": name, "shape": [2], "datatype": "INT64", "data": [1, 2]} for name in ("user", "item")]
        self.ask(path, {"inputs": inputs})

    def status(self) -> dict[str, Any]:
        return json.loads(self.ask("/status.json")[1])["replicas"][0]

    def close(self) -> None:
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    yield made
    made.close()


def test_the_numbers_of_a_real_server(served: Served) -> None:
    before = served.status()["requests"]["total"]
    for _ in range(5):
        served.predict()
    told = served.status()
    assert told["requests"]["total"] - before == 5
    versions = told["models"][0]["versions"]
    assert [(table["name"], table["rows"]) for table in versions[-1]["tables"]] == [("user", 3000), ("item", 3000)]
    _, row = served.ask("/ids/user/7")
    assert json.loads(row)["found"]
    headers, text = served.ask("/metrics")
    assert headers["content-type"].startswith("text/plain")
    labels = f'model="clicks",protocol="http-json",status="ok",version="{served.new}"'
    assert f"monolith_serving_requests_total{{{labels}}}".encode() in text
    assert b"monolith_serving_requests_in_flight" in text


def test_only_the_files_of_the_page_need_no_token(served: Served) -> None:
    headers, page = served.ask("/", token=None)
    assert b"<title>Monolith</title>" in page
    assert "default-src 'none'" in headers["content-security-policy"]
    served.ask("/static/page.js", token=None)
    for path in ("/status.json", "/ids/user/7", "/metrics"):
        with pytest.raises(OSError, match="401"):
            served.ask(path, token=None)


def test_a_rollback_from_the_browser(served: Served, tmp_path: Path) -> None:
    served.ask("/rollout", {"model": "clicks", "stable": served.old, "candidate": served.new, "share": 1.0})
    served.predict()
    with browser(tmp_path) as shown:
        shown.show()
        shown.open(served.url)
        shown.until("!document.getElementById('token-form').hidden")
        shown.evaluate(f"document.getElementById('token').value = '{TOKEN}'")
        shown.evaluate("document.querySelector('#token-form button').click()")
        shown.until("document.querySelector('.title button') && !document.querySelector('.title button').hidden")
        shown.evaluate("document.querySelector('.title button').click()")
        assert f"version {served.old} answers all requests" in shown.evaluate(
            "document.getElementById('rollback').innerText"
        )
        shown.evaluate("document.querySelector('#rollback-form button').click()")
        said = "document.getElementById('rollback-answer').textContent"
        shown.until(f"{said} && !{said}.includes('…')")
        answered = shown.evaluate(said)
        assert "Refused" not in answered
        assert str(served.old) in answered
        plan = json.loads(served.ask("/rollout")[1])
        assert '"candidate": null' in json.dumps(plan)
        shown.until("document.querySelector('.title button').hidden")
        assert shown.problems == []
