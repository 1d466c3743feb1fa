"""`HttpApp`: the routes of the server, with admission and the token. It answers requests that `HttpConnection` has read."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, unquote

from monolith.errors import AuthenticationError, ModelNotFoundError, ProtocolError
from monolith.optional_packages import import_extra
from monolith.serve.server.failures import failure_of
from monolith.serve.server.handler import Handler, PendingAnswer, failure_response, http_json
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from monolith.serve.server.scheduling import INLINE_BYTES, PredictionScheduler
from monolith.transport.tokens import reveal

if TYPE_CHECKING:
    from monolith.serve.server.http_connection import IncomingRequest

__all__ = ["HttpApp"]

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


class _Prediction:
    """A request for predictions over HTTP."""

    __slots__ = ("_handler", "_request", "_target", "deadline", "is_small", "model")

    def __init__(self, handler: Handler, target: _Target, request: IncomingRequest) -> None:
        self._handler, self._target, self._request = handler, target, request
        self.model, self.is_small = target.model, len(request.body) <= INLINE_BYTES
        self.deadline = request.arrived + handler.config.deadline_secs

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._request.is_abandoned

    def answer(self) -> HttpResponse:
        """Read the request and predict."""
        target, request = self._target, self._request
        return self._handler.infer_http(
            target.model, target.version, request.headers, request.body, arrived=request.arrived
        )

    def failed(self, error: Exception) -> HttpResponse:
        """Return the answer to a request that was not predicted."""
        exchange = PendingAnswer("http-json", self._request.arrived, self.model)
        response = self._handler.failed_http(exchange, error)
        self._handler.observe(exchange)
        return response

    def respond(self, answer: HttpResponse) -> None:
        """Send the answer."""
        self._request.respond(answer)


class HttpApp:
    """Answers HTTP requests, in the thread of the event loop.

    Args:
        handler: Makes the answers.
        pool: Threads for requests that would hold up the event loop.
        routes: Paths beyond the protocol.
    """

    def __init__(self, handler: Handler, pool: Executor, routes: Sequence[HttpRoute] = ()) -> None:
        self._handler, self._routes = handler, tuple(routes)
        self._scheduler = PredictionScheduler(handler, pool)
        self._config = handler.config
        token = reveal(self._config.token)
        self._token = None if token is None else token.encode()
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
                self._scheduler.submit(_Prediction(self._handler, target, request))
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
