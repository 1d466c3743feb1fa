"""Requests and responses of HTTP, and the routes that other parts add to the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["HttpHandler", "HttpRequest", "HttpResponse", "HttpRoute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpRequest:
    """A request with its whole body."""

    method: str
    path: str
    """Decoded, without the query."""
    query: Mapping[str, str] = field(default_factory=dict)
    """The last value of each name."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case. The last value of each name."""
    body: bytes = b""
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    """The parts of the path that stand for a `{name}` of the route."""


@dataclass(kw_only=True, slots=True)  # not frozen, which would double the time to make one
class HttpResponse:
    """A response with its whole body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    """Content-Length is added."""
    body: bytes = b""


HttpHandler = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Answers a request in the event loop of the server. Whatever blocks belongs into `asyncio.to_thread`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpRoute:
    """A path beyond the protocol, given to `ModelServer(extra_routes=...)`.

    Example:
        >>> async def hello(request: HttpRequest) -> HttpResponse:
        ...     return HttpResponse(body=b"hello " + request.path_parameters["name"].encode())
        >>> HttpRoute(method="GET", path="/hello/{name}", handler=hello).match("/hello/you")
        {'name': 'you'}
    """

    method: str
    path: str
    """As "/ids/{table}/{id}": a part in braces takes one part of the path. "{name:path}" at the end takes all that follow."""
    handler: HttpHandler
    needs_token: bool = False
    """Whether it is refused by a server that has no token, as routes that change something must be."""
    is_public: bool = False
    """Whether it is answered without the token that all other routes need if the server has one."""

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parts of `path` that stand for names in braces. None if it is another path."""
        found: dict[str, str] = {}
        parts, wanted = path.split("/"), self.path.split("/")
        for position, part in enumerate(wanted):
            if part.endswith(":path}"):
                rest = "/".join(parts[position:])
                return {**found, part[1:-6]: rest} if rest else None
            if position >= len(parts) or (part != parts[position] and not part.startswith("{")):
                return None
            if part.startswith("{"):
                if not parts[position]:
                    return None
                found[part[1:-1]] = parts[position]
        return found if len(parts) == len(wanted) else None
