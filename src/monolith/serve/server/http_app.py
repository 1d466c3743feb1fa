"""`HttpApp`: the routes of the server, with admission and the token. It answers requests that `HttpConnection` has read."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote

from monolith.errors import (
    AuthenticationError,
    DeadlineExceededError,
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from monolith.optional_packages import import_extra
from monolith.serve.server.failures import failure_of
from monolith.serve.server.handler import Handler, PendingAnswer, failure_response, http_json
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from monolith.transport.tokens import reveal

if TYPE_CHECKING:
    from monolith.serve.server.http_connection import IncomingRequest

__all__ = ["HttpApp"]

_log = logging.getLogger(__name__)
_INLINE_BYTES = 1 << 16
_INLINE_SECONDS = 0.002
"""A request up to this size, of a model that usually takes up to this long, is answered in the thread of the event loop: a pool
would take longer to hand it over. All others are answered in the pool, so that the loop stays free."""
_RUNS_PER_ITERATION = 8
"""With one, a server that refuses many requests answers fewer: each iteration also refuses all that have come."""
_MAX_TARGETS = 1024
_PUBLIC = {"/v2/health/live", "/v2/health/ready"}


@dataclass(frozen=True, slots=True)
class _Target:
    """What a URL asks for."""

    kind: Literal["health", "infer", "metadata", "extra"]
    path: str
    """Decoded, without the query."""
    model: str = ""
    version: str = ""
    query: Mapping[str, str] = field(default_factory=dict)


class _Turns:
    """Lets a few small requests run per iteration of the event loop, so that it reads and refuses others in between."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._taken = 0

    def take(self, run: Callable[[], None]) -> None:
        """Call `run` now or in a later iteration. It must not raise."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._next)
        if self._taken >= _RUNS_PER_ITERATION:
            self._waiting.append(run)
        else:
            self._taken += 1
            run()

    def _next(self) -> None:
        """Begin another iteration: those that have waited longest run in it."""
        self._taken = 0
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._taken < _RUNS_PER_ITERATION:
            self._taken += 1
            self._waiting.popleft()()


class HttpApp:
    """Answers HTTP requests, in the thread of the event loop.

    Args:
        handler: Makes the answers.
        pool: Threads for requests that would hold up the event loop.
        routes: Paths beyond the protocol.
    """

    def __init__(self, handler: Handler, pool: Executor, routes: Sequence[HttpRoute] = ()) -> None:
        self._handler, self._pool, self._routes = handler, pool, tuple(routes)
        self._config = handler.config
        token = reveal(self._config.token)
        self._token = None if token is None else token.encode()
        self._turns = _Turns()
        self._usual_seconds: dict[str, float] = {}
        self._targets: dict[bytes, _Target] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def refusal(self, request: IncomingRequest) -> HttpResponse | None:
        """Return the answer to a request without the token that it needs. Otherwise None."""
        try:
            target = self._target(request.url)
            if target.kind == "extra":
                self._check_route(target, request)
            elif target.kind != "health":
                self._check_token(_method(request), request.headers)
        except Exception as error:
            return failure_response(failure_of(error))
        return None

    def answer(self, request: IncomingRequest) -> None:
        """Answer now, or later in the same thread."""
        try:
            target = self._target(request.url)
            if target.kind == "infer" and request.method == "POST":
                self._infer(target, request)
            elif target.kind == "extra":
                self._extra(target, request)
            else:
                request.respond(
                    self._health(target.path) if target.kind == "health" else self._metadata(target, request)
                )
        except Exception as error:
            request.respond(failure_response(failure_of(error)))

    def _target(self, url: bytes) -> _Target:
        known = self._targets.get(url)
        if known is None:
            if len(self._targets) >= _MAX_TARGETS:
                self._targets.clear()
            known = self._targets[url] = _parsed_target(url)
        return known

    def _health(self, path: str) -> HttpResponse:
        if path == "/v2/health/live":
            return http_json({"live": True})
        ready = self._handler.ready
        return http_json({"ready": ready}, 200 if ready else 503)

    def _metadata(self, target: _Target, request: IncomingRequest) -> HttpResponse:
        handler, parts = self._handler, target.path.split("/")
        method = _method(request)
        if method not in ("GET", "POST"):
            return _method_not_allowed("GET, POST")
        if len(parts) == 2 or parts[2:] == [""]:
            return http_json(handler.server_metadata())
        if parts[2:] == ["models"]:
            return http_json({"models": list(handler.repository.names())})
        if parts[2:] == ["repository", "index"]:
            return http_json(handler.repository_index())
        if method != "GET":
            return _method_not_allowed("GET")
        if parts[-1] == "ready":
            ready = handler.model_ready(*_model_and_version(parts[:-1]))
            return http_json({"ready": ready}, 200 if ready else 503)
        return http_json(handler.model_metadata(*_model_and_version(parts)))

    # Predictions

    def _infer(self, target: _Target, request: IncomingRequest) -> None:
        handler = self._handler
        try:
            handler.admission.admit()
        except (OverloadedError, UnavailableError) as error:
            request.respond(self._failed(target, request, error))
            return
        quick = self._usual_seconds.get(target.model, 0.0) <= _INLINE_SECONDS and len(request.body) <= _INLINE_BYTES
        if quick and not handler.batches:
            self._turns.take(lambda: self._run(target, request))
        else:
            self._run_in_pool(target, request)

    def _run(self, target: _Target, request: IncomingRequest) -> None:
        """Answer an admitted request in this thread, if one more may run."""
        admission = self._handler.admission
        if not request.is_abandoned and not admission.try_start():
            self._run_in_pool(target, request)
            return
        try:
            if not request.is_abandoned:
                request.respond(self._answer(target, request))
        except Exception as error:
            request.respond(failure_response(failure_of(error)))
        finally:
            admission.leave()

    def _run_in_pool(self, target: _Target, request: IncomingRequest) -> None:
        loop = asyncio.get_running_loop()

        def finish(response: HttpResponse) -> None:
            try:
                request.respond(response)
            finally:
                self._handler.admission.leave()

        def run() -> None:
            try:
                response = self._in_turn(target, request)
            except Exception as error:
                response = failure_response(failure_of(error))
            try:
                loop.call_soon_threadsafe(finish, response)
            except RuntimeError:  # the server did not wait for this answer any longer
                self._handler.admission.leave()
                _log.warning("an answer came after the server had stopped, and was not sent")

        try:
            self._pool.submit(run)
        except RuntimeError:  # the pool has ended
            finish(self._failed(target, request, UnavailableError("the server is stopping; ask another one")))

    def _in_turn(self, target: _Target, request: IncomingRequest) -> HttpResponse:
        """Answer in a thread of the pool, when its turn has come."""
        handler = self._handler
        if handler.batches:  # takes a turn for all requests that are predicted together
            return self._handled(target, request)
        try:
            handler.admission.start(request.arrived + self._config.deadline_secs)
        except DeadlineExceededError as error:
            return self._failed(target, request, error)
        return self._answer(target, request)

    def _answer(self, target: _Target, request: IncomingRequest) -> HttpResponse:
        """Answer a request that has started."""
        started = time.perf_counter()
        try:
            return self._handled(target, request)
        finally:
            self._handler.admission.finish()
            model = target.model
            if len(request.body) <= _INLINE_BYTES and (
                model in self._usual_seconds or self._handler.repository.ready(model)
            ):
                # The names that clients ask for are not kept unless there is such a model: they could be any number.
                usual = self._usual_seconds.get(model, 0.0)
                self._usual_seconds[model] = usual + 0.05 * (min(time.perf_counter() - started, 1.0) - usual)

    def _handled(self, target: _Target, request: IncomingRequest) -> HttpResponse:
        return self._handler.infer_http(
            target.model, target.version, request.headers, request.body, arrived=request.arrived
        )

    def _failed(self, target: _Target, request: IncomingRequest, error: Exception) -> HttpResponse:
        """Return the answer to a request that was not predicted, which observers hear of."""
        exchange = PendingAnswer("http-json", request.arrived, target.model)
        response = self._handler.failed_http(exchange, error)
        self._handler.observe(exchange)
        return response

    # The token

    def _check_token(self, method: str, headers: Mapping[str, str]) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        secret = given.strip().encode()
        if scheme.lower() == "basic" and method == "GET":
            # For people with a browser, which asks for a password. It sends the password along with requests that other
            # sites make it send, so nothing can be changed with it.
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                secret = b""
        elif scheme.lower() != "bearer":
            secret = b""
        if not hmac.compare_digest(secret, self._token):
            raise AuthenticationError("authorization: expected the token of this server, as in 'Bearer TOKEN'")

    # Other routes

    def _route(self, target: _Target, method: str) -> tuple[HttpRoute, Mapping[str, str]] | HttpResponse:
        """Return the route of a path and the parts of the path that it names, or the answer if there is none."""
        allowed: set[str] = set()
        for route in self._routes:
            found = route.match(target.path)
            if found is None:
                continue
            if route.method == method:
                return route, found
            allowed.add(route.method)
        if allowed:
            return _method_not_allowed(", ".join(sorted(allowed)))
        return http_json({"error": f"{target.path:.200}: there is no such path"}, 404)

    def _check_route(self, target: _Target, request: IncomingRequest) -> None:
        found = self._route(target, _method(request))
        if isinstance(found, HttpResponse):
            return
        route, _ = found
        if route.needs_token and self._token is None:
            raise AuthenticationError(
                f"{target.path}: needs a token, and this server has none; start it with --token-file"
            )
        if not route.is_public:
            self._check_token(_method(request), request.headers)

    def _extra(self, target: _Target, request: IncomingRequest) -> None:
        found = self._route(target, _method(request))
        if isinstance(found, HttpResponse):
            request.respond(found)
            return
        route, parameters = found
        asked = HttpRequest(
            method=_method(request),
            path=target.path,
            query=target.query,
            headers=request.headers,
            body=request.body,
            path_parameters=parameters,
        )

        async def answer() -> None:
            try:
                response = await route.handler(asked)
            except Exception as error:
                response = failure_response(failure_of(error))
            request.respond(response)

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)  # which the loop itself does not keep
        task.add_done_callback(self._tasks.discard)


def _method(request: IncomingRequest) -> str:
    """Return the method of a request. HEAD is GET, of which the body is not sent."""
    return "GET" if request.method == "HEAD" else request.method


def _parsed_target(url: bytes) -> _Target:
    """Return what a URL asks for.

    Raises:
        ModelNotFoundError: it asks for predictions of something that is no model.
        ProtocolError: it cannot be read.
    """
    httptools = import_extra("httptools", extra="serve", purpose="serving over HTTP")
    try:
        parsed = httptools.parse_url(url)
        path = (parsed.path or b"/").decode("ascii")
        query = dict(parse_qsl((parsed.query or b"").decode("latin-1"), max_num_fields=100))
    except (httptools.HttpParserInvalidURLError, ValueError):
        raise ProtocolError(f"URL: expected a path in ASCII and at most 100 parameters, got {url!r:.200}") from None
    path = unquote(path) if "%" in path else path
    if path in _PUBLIC:
        return _Target("health", path)
    parts = path.split("/")
    if parts[:2] != ["", "v2"]:
        return _Target("extra", path, query=query)
    if parts[-1] != "infer":
        return _Target("metadata", path)
    return _Target("infer", path, *_model_and_version(parts[:-1]))


def _model_and_version(parts: list[str]) -> tuple[str, str]:
    """Split `/v2/models/{model}[/versions/{version}]`."""
    if len(parts) == 4 and parts[2] == "models" and parts[3]:
        return parts[3], ""
    if len(parts) == 6 and parts[2] == "models" and parts[4] == "versions" and parts[5]:
        return parts[3], parts[5]
    raise ModelNotFoundError(f"{'/'.join(parts):.200}: expected /v2/models/MODEL or /v2/models/MODEL/versions/VERSION")


def _method_not_allowed(allowed: str) -> HttpResponse:
    answer = http_json({"error": f"expected the method {allowed}"}, 405)
    return HttpResponse(status=405, headers={**answer.headers, "allow": allowed}, body=answer.body)
