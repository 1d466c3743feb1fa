"""`HttpApp`: the routes of the server as an ASGI application, with admission and the token."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from typing import Any
from urllib.parse import parse_qsl

from monolith.errors import (
    AuthenticationError,
    DeadlineExceededError,
    MessageTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
)
from monolith.serve.server.failures import failure_of
from monolith.serve.server.handler import Handler, PendingAnswer, failure_response, http_json
from monolith.serve.server.http import HttpRequest, HttpResponse, HttpRoute
from monolith.transport.tokens import reveal

__all__ = ["HttpApp"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_INLINE_BYTES = 1 << 16
_INLINE_SECONDS = 0.002
"""A request up to this size, of a model that usually takes up to this long, is answered in the thread of the event loop: a pool
would take longer to hand it over. All others are answered in the pool, so that the loop stays free."""
_PUBLIC = {"/v2/health/live", "/v2/health/ready"}


_RUNS_PER_ITERATION = 8
"""With one, a server that refuses many requests answers fewer: each iteration also refuses all that have come."""


class _Turns:
    """Lets a few small requests run per iteration of the event loop, so that it reads and refuses others in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = 0

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            loop.call_soon(self._next)
        if self._taken >= _RUNS_PER_ITERATION:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn  # counted by those that let it run
        else:
            self._taken += 1

    def _next(self) -> None:
        """Begin another iteration: those that have waited longest run in it."""
        self._taken = 0
        while self._waiting and self._taken < _RUNS_PER_ITERATION:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._taken += 1
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)


class HttpApp:
    """Answers HTTP requests.

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
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        arrived = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        taken = [0]
        try:
            response = await self._respond(scope, headers, receive, arrived, taken)
        except Exception as error:
            response = failure_response(failure_of(error))
        finally:
            self._buffered -= taken[0]
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
        sent.append((b"content-length", str(len(response.body)).encode()))
        await send({"type": "http.response.start", "status": response.status, "headers": sent})
        await send({"type": "http.response.body", "body": response.body if scope["method"] != "HEAD" else b""})

    async def _respond(
        self, scope: Scope, headers: Mapping[str, str], receive: Receive, arrived: float, taken: list[int]
    ) -> HttpResponse:
        path: str = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if path in _PUBLIC:
            return self._health(path)
        parts = path.split("/")
        if parts[:2] == ["", "v2"]:
            self._check_token(method, headers)
            if parts[-1] == "infer" and method == "POST":
                model, version = _model_and_version(parts[:-1])
                body = await self._body(headers, receive, arrived, taken)
                return await self._infer(model, version, headers, body, arrived)
            if method not in ("GET", "POST"):
                return _method_not_allowed("GET, POST")
            await self._body(headers, receive, arrived, taken)
            return self._metadata(method, parts)
        return await self._extra(scope, method, headers, receive, arrived, taken)

    def _health(self, path: str) -> HttpResponse:
        if path == "/v2/health/live":
            return http_json({"live": True})
        ready = self._handler.ready
        return http_json({"ready": ready}, 200 if ready else 503)

    def _metadata(self, method: str, parts: list[str]) -> HttpResponse:
        handler = self._handler
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

    async def _infer(
        self, model: str, version: str, headers: Mapping[str, str], body: bytes, arrived: float
    ) -> HttpResponse:
        handler = self._handler
        try:
            handler.admission.admit()
        except OverloadedError as error:
            exchange = PendingAnswer("http-json", arrived, model)
            response = handler.failed_http(exchange, error)
            handler.observe(exchange)
            return response
        try:
            quick = self._usual_seconds.get(model, 0.0) <= _INLINE_SECONDS and len(body) <= _INLINE_BYTES
            if quick and not handler.batches:
                await self._turns.take()
                if handler.admission.try_start():
                    return self._answer(model, version, headers, body, arrived)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._in_turn, model, version, headers, body, arrived)
        finally:
            handler.admission.leave()

    def _in_turn(
        self, model: str, version: str, headers: Mapping[str, str], body: bytes, arrived: float
    ) -> HttpResponse:
        """Answer in a thread of the pool, when its turn has come."""
        handler = self._handler
        if handler.batches:  # takes a turn for all requests that are predicted together
            return handler.infer_http(model, version, headers, body, arrived=arrived)
        try:
            handler.admission.start(arrived + self._config.deadline_secs)
        except DeadlineExceededError as error:
            exchange = PendingAnswer("http-json", arrived, model)
            response = handler.failed_http(exchange, error)
            handler.observe(exchange)
            return response
        return self._answer(model, version, headers, body, arrived)

    def _answer(
        self, model: str, version: str, headers: Mapping[str, str], body: bytes, arrived: float
    ) -> HttpResponse:
        """Answer a request that has started."""
        started = time.perf_counter()
        try:
            return self._handler.infer_http(model, version, headers, body, arrived=arrived)
        finally:
            self._handler.admission.finish()
            if len(body) <= _INLINE_BYTES and (model in self._usual_seconds or self._handler.repository.ready(model)):
                # The names that clients ask for are not kept unless there is such a model: they could be any number.
                usual = self._usual_seconds.get(model, 0.0)
                self._usual_seconds[model] = usual + 0.05 * (min(time.perf_counter() - started, 1.0) - usual)

    async def _body(self, headers: Mapping[str, str], receive: Receive, arrived: float, taken: list[int]) -> bytes:
        limit = self._config.max_message_bytes
        stated = headers.get("content-length", "0")
        if not stated.isdecimal() or len(stated) > 15 or int(stated) > limit:
            raise MessageTooLargeError(f"body: expected at most {limit:,} bytes, got {stated:.20}")
        if headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(f"content-encoding: expected none, got {headers['content-encoding']!r:.40}")
        message = await receive()
        if not message.get("more_body"):
            return self._counted(message.get("body", b""), taken)
        parts = [self._counted(message.get("body", b""), taken)]
        try:
            async with asyncio.timeout(max(0.0, arrived + self._config.deadline_secs - time.monotonic())):
                while message.get("more_body"):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ProtocolError("body: the client closed the connection before it had sent all of it")
                    parts.append(self._counted(message.get("body", b""), taken))
        except TimeoutError:
            raise DeadlineExceededError("the deadline of the request was exceeded before all of it had come") from None
        return b"".join(parts)

    def _counted(self, part: bytes, taken: list[int]) -> bytes:
        """Count bytes that are held for requests, so that all clients together cannot fill the memory."""
        taken[0] += len(part)
        self._buffered += len(part)
        if taken[0] > self._config.max_message_bytes:
            raise MessageTooLargeError(f"body: expected at most {self._config.max_message_bytes:,} bytes")
        if self._buffered > 4 * self._config.max_message_bytes:
            raise OverloadedError("other requests hold all memory there is for them; back off and retry")
        return part

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

    async def _extra(
        self, scope: Scope, method: str, headers: Mapping[str, str], receive: Receive, arrived: float, taken: list[int]
    ) -> HttpResponse:
        path: str = scope["path"]
        allowed: set[str] = set()
        for route in self._routes:
            found = route.match(path)
            if found is None:
                continue
            if route.method != method:
                allowed.add(route.method)
                continue
            if route.needs_token and self._token is None:
                raise AuthenticationError(
                    f"{path}: needs a token, and this server has none; start it with --token-file"
                )
            if not route.is_public:
                self._check_token(method, headers)
            body = await self._body(headers, receive, arrived, taken)
            query = dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=100))
            return await route.handler(
                HttpRequest(method=method, path=path, query=query, headers=headers, body=body, path_parameters=found)
            )
        if allowed:
            return _method_not_allowed(", ".join(sorted(allowed)))
        return http_json({"error": f"{path:.200}: there is no such path"}, 404)


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
