"""`Overview`: one page for several replicas and runs, as `monolith page` serves it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from monolith.errors import ConfigError, InvalidArgumentError, MonolithError
from monolith.serve.page.page import charts_installed, json_response, static_routes
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from monolith.state.model_dir import LOG, ModelDir
from monolith.transport.server import is_loopback

__all__ = ["Overview", "PageServer"]

_MAX_ANSWER = 2**24
_RUN_SECS = 2.0


class _NoRedirect(HTTPRedirectHandler):
    """A replica does not redirect, and the token is not for anybody else."""

    def redirect_request(self, *values: object) -> None:
        return None


class Overview:
    """Collects the `/status.json` of several replicas, and what the folders of runs tell.

    Args:
        replicas: URLs of replicas, such as `http://127.0.0.1:8000`.
        runs: Local model_dirs of runs.
        token: Sent to the replicas. Not over plain HTTP to other machines.
        tls_root_certs: CA bundle (PEM) that signed the replicas' certificates. By default those of the system.
        timeout: Seconds to wait for a replica.
        live: Returns what a run that goes on says about itself, such as `state` and `lag_records`, with `answers`, or a `problem`
            if it does not answer. None: no run goes on there.
        now: Seconds since 1970.

    Example:
        >>> Overview([]).status()["replicas"]
        []
    """

    def __init__(
        self,
        replicas: Sequence[str],
        runs: Sequence[str | Path] = (),
        *,
        token: str | None = None,
        tls_root_certs: Path | None = None,
        timeout: float = 2.0,
        live: Callable[[Path], Mapping[str, object] | None] = lambda path: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._live = live
        self._replicas = [_checked(url, token) for url in replicas]
        self._runs = [Path(run) for run in runs]
        self._token, self._timeout, self._now = token, timeout, now
        context = ssl.create_default_context(cafile=None if tls_root_certs is None else str(tls_root_certs))
        self._opener = build_opener(_NoRedirect, HTTPSHandler(context=context), ProxyHandler({}))
        self._known_runs: tuple[float, list[dict[str, object]]] = 0.0, []
        self._asking_runs = threading.Lock()

    def routes(self) -> tuple[HttpRoute, ...]:
        """Return the routes of the page."""

        async def status(request: HttpRequest) -> HttpResponse:
            return json_response(await asyncio.to_thread(self.status, request.query.get("since", "0")))

        async def row(request: HttpRequest) -> HttpResponse:
            return await asyncio.to_thread(self._row, request)

        return (
            *static_routes(),
            HttpRoute(method="GET", path="/status.json", handler=status),
            HttpRoute(method="GET", path="/ids/{table}/{id}", handler=row),
        )

    def status(self, since: str = "0") -> dict[str, object]:
        """Return what the page shows, with the samples of the load after the time `since`."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._replicas))) as pool:
            replicas = list(pool.map(lambda url: self._replica(url, since), self._replicas))
        return {"time": self._now(), "charts": charts_installed(), "replicas": replicas, "runs": self.runs()}

    def runs(self) -> list[dict[str, object]]:
        """Return what is known of the runs, at most a few seconds old."""
        with self._asking_runs:
            at, runs = self._known_runs
            if self._now() - at > _RUN_SECS:
                with ThreadPoolExecutor(max_workers=max(1, len(self._runs))) as pool:
                    lives = list(pool.map(self._live, self._runs))
                runs = [{**_run(path), "live": live} for path, live in zip(self._runs, lives, strict=True)]
                self._known_runs = self._now(), runs
            return runs

    def _replica(self, url: str, since: str) -> dict[str, object]:
        try:
            status, answer = self._get(url, f"/status.json?{urlencode({'since': since})}")
            if status != 200:
                raise ValueError(f"HTTP {status}: {answer.get('error', '')}")
            replica = answer["replicas"]
            if not (isinstance(replica, list) and len(replica) == 1 and isinstance(replica[0], dict)):
                raise ValueError("it does not look like a replica")
            # This page has no token of its own and changes nothing: rollbacks are for the page of the replica.
            none = {"possible": False, "reason": f"use {url}"}
            models = [{**model, "rollback": none} for model in replica[0]["models"]]
        except (OSError, ValueError, KeyError, TypeError, HTTPException) as error:
            return {"address": url, "reachable": False, "error": f"{type(error).__name__}: {error}"}
        return {**replica[0], "address": url, "models": models}

    def _row(self, request: HttpRequest) -> HttpResponse:
        url = request.query.get("replica", "")
        if url not in self._replicas:
            return json_response({"error": "replica: it is none of this page"}, status=404)
        parts = request.path_parameters
        query = urlencode({name: request.query[name] for name in ("model", "version", "text") if name in request.query})
        try:
            path = f"/ids/{quote(parts['table'], safe='')}/{quote(parts['id'], safe='')}?{query}"
            status, answer = self._get(url, path)
        except (OSError, ValueError, HTTPException) as error:
            return json_response({"error": f"{url}: no answer: {error}"}, status=502)
        return json_response(answer, status=status)

    def _get(self, url: str, path: str) -> tuple[int, dict[str, object]]:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            with self._opener.open(Request(url + path, headers=headers), timeout=self._timeout) as response:
                return response.status, _object(response)
        except HTTPError as error:
            with error:
                return error.code, _object(error)


def _object(response: IO[bytes]) -> dict[str, object]:
    data = response.read(_MAX_ANSWER + 1)
    if len(data) > _MAX_ANSWER:
        raise ValueError(f"its answer is larger than {_MAX_ANSWER} bytes")
    answer = json.loads(data)
    if not isinstance(answer, dict):
        raise ValueError("its answer is not a JSON object")
    return answer


def _checked(url: str, token: str | None) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"replica: expected a URL such as http://127.0.0.1:8000, got {url!r}")
    if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(f"replica: {url!r} would send the token unencrypted to another machine; use https://")
    return url.rstrip("/")


def _run(path: Path) -> dict[str, object]:
    answer: dict[str, object] = {"path": str(path), "step": None, "checkpoint": None}
    log: dict[str, object] = {"segments": 0, "bytes": 0, "sequence": None, "time": None}
    try:
        if not path.is_dir():
            raise InvalidArgumentError("there is no such folder")
        home = ModelDir(path)
        manifests = {name: home.manifest(name) for name in home.checkpoints()}
        if manifests:
            name, newest = max(manifests.items(), key=lambda item: item[1].time)
            answer |= {"step": newest.step, "checkpoint": {"name": name, "step": newest.step, "time": newest.time}}
        if (path / LOG).is_dir():
            log = _log_size(home, path / LOG)
            answer["step"] = max(_int(answer["step"]), _int(log["step"]))
    except (MonolithError, OSError) as error:  # a run that is pruned meanwhile, or damaged
        answer["error"] = str(error)
    return {**answer, "log": log}


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _log_size(home: ModelDir, folder: Path) -> dict[str, object]:
    sequences = home.log.sequences()
    newest = home.log.info(sequences[-1]) if sequences else None
    return {
        "segments": len(sequences),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "sequence": None if newest is None else newest.sequence,
        "step": None if newest is None else newest.step,
        "time": None if newest is None else newest.time,
    }


class PageServer:
    """Serves routes over plain HTTP to this machine, one thread for each connection. For pages, not for predictions.

    Example:
        >>> with PageServer(static_routes()) as server:
        ...     server.address.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, routes: Iterable[HttpRoute], *, host: str = "127.0.0.1", port: int = 0) -> None:
        if not is_loopback(host):
            raise ConfigError(
                f"host: {host!r} can be reached from other machines, and this page has no token; use 127.0.0.1 and a "
                "tunnel, as `ssh -L 8080:127.0.0.1:8080 HOST`, or a proxy that authenticates"
            )
        try:
            self._server = ThreadingHTTPServer((host, port), _request_handler(tuple(routes)))
        except OSError as error:
            raise ConfigError(
                f"port: cannot listen on {host}:{port}: {error.strerror}; choose another, 0 for any"
            ) from None
        self._host = host
        self._thread = threading.Thread(target=self._server.serve_forever, name="page-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{self._host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _request_handler(routes: tuple[HttpRoute, ...]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "monolith", "", 30

        def do_GET(self) -> None:
            response = asyncio.run(_answer(routes, self.path, dict(self.headers.items())))
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the name in the base class
            pass  # a page that is open asks every second

    return Handler


async def _answer(routes: tuple[HttpRoute, ...], target: str, headers: Mapping[str, str]) -> HttpResponse:
    lower = {name.lower(): value for name, value in headers.items()}
    # Another site whose name was made to point to this machine must not read the page.
    if not is_loopback(urlsplit(f"//{lower.get('host', '')}").hostname or ""):
        return json_response({"error": "Host: expected 127.0.0.1 or localhost"}, status=403)
    parts = urlsplit(target)
    for route in routes:
        found = route.match(unquote(parts.path))
        if route.method == "GET" and found is not None:
            query = dict(parse_qsl(parts.query))
            request = HttpRequest(
                method="GET", path=unquote(parts.path), query=query, headers=lower, path_parameters=found
            )
            return await route.handler(request)
    return json_response({"error": "there is no such page"}, status=404)
