"""Which replicas answer a request, and who hears about the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from monolith.serve.replica import Replica

if TYPE_CHECKING:
    from monolith.serve.repository import ModelRepository

__all__ = ["AnswerProtocol", "AnswerStatus", "Answered", "DefaultRouter", "Observer", "ReplicaRoute", "Router"]

AnswerProtocol = Literal["http-json", "http-binary", "grpc", "python"]
"""How a request came."""
AnswerStatus = Literal["ok", "invalid", "overloaded", "deadline", "error"]
"""How it ended. "invalid" is the client's fault, "error" is the server's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRoute:
    """The replicas of one request."""

    primary: Replica
    """Its predictions are the answer."""
    shadows: tuple[Replica, ...] = ()
    """They predict as well, after the answer was sent. What they predict is only observed."""


class Router(Protocol):
    """Chooses the replicas of a request. Called in several threads at once, so it must be quick and thread-safe."""

    def route(self, name: str, version: int | None, key: str) -> ReplicaRoute:
        """Return the replicas for a request of the model `name`.

        Args:
            name: Name of the model.
            version: The version that the client asked for. None if it left the choice to the server.
            key: What a split of the traffic hashes: the request parameter `route_key`, else the first value of the input
                that `key_column` names, else the id of the request, else "".

        Raises:
            ModelNotFoundError: there is no such model or version.
        """

    def key_column(self, name: str) -> str | None:
        """Return the input by whose first value the traffic of the model `name` is split. None: by the request's own key."""


class DefaultRouter:
    """Takes the version that was asked for, else the default version of the model.

    Example:
        >>> from monolith.serve.repository import ModelRepository
        >>> DefaultRouter(ModelRepository()).route("clicks", None, "")
        Traceback (most recent call last):
            ...
        monolith.errors.ModelNotFoundError: model 'clicks': there is no such model; this server has no models
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def route(self, name: str, version: int | None, key: str) -> ReplicaRoute:
        """Return the replica of `version`, or of the default version."""
        return ReplicaRoute(primary=self._repository.get(name, version))

    def key_column(self, name: str) -> str | None:
        """Return None: the traffic is not split."""
        return None


@dataclass(kw_only=True, slots=True)  # not frozen, which would triple the time to make one
class Answered:
    """One request that was answered, well or badly. Observers share it, and do not change it."""

    model: str
    version: int
    """0 if no version was found, or none was looked for."""
    protocol: AnswerProtocol
    rows: int
    seconds: float
    """From the arrival of the request to its answer, as bytes. For a shadow the seconds of its prediction."""
    status: AnswerStatus
    request_id: str
    """The id that the client gave to the request, or that the server has given to it, else ""."""
    key: str = ""
    """What a split of the traffic hashes, see `Router.route`."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The columns of the request. Empty if they could not be read."""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The predictions by head, before the client's choice of outputs and `top_k`. Empty if there are none."""
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    """What the answer says about itself, such as `monolith_step` and `monolith_sequence` of a replica that follows a run."""
    shown: Sequence[int] | None = None
    """The rows that the client got, best first. None: all of them."""
    shadow: bool = False
    """Whether this was a prediction of a shadow, which no client has seen."""


class Observer(Protocol):
    """Hears of every answer."""

    def answered(self, answered: Answered) -> None:
        """Called in the thread that answered, in several threads at once. It must be quick and should not raise."""
