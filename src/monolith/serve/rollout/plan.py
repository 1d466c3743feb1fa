"""What a rollout is to do and what it has done: the plan of a model, its bounds, and the state that survives a restart."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from monolith.config import Config
from monolith.durable import write_durably
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, StorageError
from monolith.serve.rollout.moments import moment_of
from monolith.writer_lock import WriterLock

__all__ = [
    "MAX_SHADOWS",
    "ModelRollout",
    "QualityBounds",
    "RolloutEvent",
    "RolloutFile",
    "RolloutPlan",
    "RolloutState",
    "split_point",
]

MAX_SHADOWS = 4
"""How many versions may answer a request in the shadow of the one that is returned."""

_MAX_EVENTS = 100
_Version = Annotated[int, Field(ge=0, lt=2**63)]
_Share = Annotated[float, Field(ge=0, le=1)]


def _as_rewind(text: str | None) -> str | None:
    try:
        return None if text is None else (moment_of(text, now=2.0**40), text)[1]
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None


def split_point(model: str, candidate: int, key: str) -> float:
    """Return where in [0, 1) a request key falls. The candidate answers if that is below its share.

    It is the first 53 bits of BLAKE2b-64 of `model NUL candidate NUL key`, divided by 2^53. The same key gets the same version
    from every server and after every restart, and a larger share keeps the keys of a smaller one. Another candidate gets other
    keys, so that it is not always the same users who see new versions first.

    Example:
        >>> split_point("clicks", 8, "user-1") == split_point("clicks", 8, "user-1")
        True
        >>> split_point("clicks", 8, "user-1") == split_point("clicks", 9, "user-1")
        False
    """
    text = f"{model}\0{candidate}\0{key}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


class QualityBounds(Config):
    """How good the judged version must be. A broken bound rolls it back.

    The judged version is the candidate. Differences are candidate minus stable. In a plan with `rewind` and without a
    candidate it is the stable version, which has nothing to differ from. None switches a bound off.

    Example:
        >>> QualityBounds(min_labels=500).max_calibration_error
        0.2
    """

    max_log_loss_difference: float | None = 0.02
    """Log loss in nats."""
    max_calibration_error: Annotated[float, Field(ge=0)] | None = 0.2
    """Of |mean prediction / mean label - 1|."""
    min_auc_difference: Annotated[float, Field(ge=-1, le=1)] | None = -0.02
    """A candidate may lose so much AUC: -0.02 is two hundredths less than the stable version."""
    max_invalid_share: Annotated[float, Field(ge=0, le=1)] | None = 0.01
    """Of labelled predictions that are NaN or outside [0, 1]. They are left out of the other numbers."""
    max_log_loss: Annotated[float, Field(ge=0)] | None = None
    """Of the judged version itself."""
    min_auc: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the judged version itself."""
    min_labels: Annotated[int, Field(ge=1, lt=2**63)] = 1000
    """Labelled predictions that each compared version needs in the window before there is a verdict."""
    confidence: Annotated[float, Field(ge=0, le=100)] = 3.0
    """A bound is broken when a number is beyond it by this many standard errors, so that chance alone rolls nothing back.
    0 judges the bare numbers."""
    window_secs: Annotated[float, Field(gt=0, le=86400.0 * 30)] = 3600.0
    """Answers of so many seconds count for the verdict."""


class RolloutPlan(Config):
    """Which versions of a model answer which requests.

    Example:
        >>> plan = RolloutPlan(model="clicks", stable=7, candidate=8, share=0.25, split_by="user_id")
        >>> sum(plan.version_of(str(user)) == 8 for user in range(1000))
        261
    """

    model: Annotated[str, Field(min_length=1)]
    stable: _Version
    """Answers all requests that the candidate does not."""
    candidate: _Version | None = None
    """The version that is tried."""
    share: _Share = 0.0
    """Of request keys that the candidate answers."""
    split_by: Annotated[str, Field(min_length=1)] | None = None
    """Column whose value in the first row is the key of a request, so that one user sees one version. None: the request id."""
    shadows: Annotated[tuple[_Version, ...], Field(max_length=MAX_SHADOWS)] = ()
    """Versions that also answer. Their answers are compared with the returned one and judged by labels, and dropped."""
    shadow_share: _Share = 1.0
    """Of request keys that the shadows answer."""
    bounds: QualityBounds = QualityBounds()
    rewind: Annotated[str | None, AfterValidator(_as_rewind)] = None
    """A moment such as "10m-ago", for a model that follows a run. If the stable version, without a candidate, breaks a bound, its
    replica goes back there."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.candidate is None and self.share:
            raise ValueError(f"share: expected 0 without a candidate, got {self.share}")
        if self.candidate == self.stable:
            raise ValueError(f"candidate: expected another version than stable, got {self.candidate}")
        doubled = [version for version in self.shadows if self.shadows.count(version) > 1 or version == self.stable]
        if doubled or (self.candidate is not None and self.candidate in self.shadows and self.share):
            found = doubled[0] if doubled else self.candidate
            raise ValueError(f"shadows: expected distinct versions that answer no requests already, got {found}")
        return self

    def version_of(self, key: str) -> int:
        """Return the version that answers a request with this key."""
        if self.candidate is None or not self.share:
            return self.stable
        return self.candidate if split_point(self.model, self.candidate, key) < self.share else self.stable

    def shadows_of(self, key: str) -> tuple[int, ...]:
        """Return the versions that answer a request with this key in the shadow."""
        if self.shadow_share == 1 or not self.shadows:
            return self.shadows
        # The stable version as salt: whether a key is shadowed has nothing to do with who answers it.
        return self.shadows if split_point(self.model, self.stable, key) < self.shadow_share else ()

    def replaced(self, **fields: object) -> RolloutPlan:
        """Return the plan with other values of some fields."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in RolloutPlan.model_fields}
        return RolloutPlan(**{**kept, **fields})

    def describe(self) -> str:
        """Return what the plan does, in words."""
        parts = [f"stable {self.stable}"]
        if self.candidate is not None:
            parts.append(f"candidate {self.candidate} for {self.share:.4g} of {self.split_by or 'requests'}")
        if self.shadows:
            parts.append(f"shadows {', '.join(map(str, self.shadows))}")
        return ", ".join(parts)

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions of the plan, the stable one first."""
        return (self.stable, *(() if self.candidate is None else (self.candidate,)), *self.shadows)


class RolloutEvent(Config):
    """A change of a rollout, for the record."""

    time: float
    """Seconds since 1970."""
    kind: Literal["plan", "promote", "rollback", "rewind"]
    version: int
    """The version that the change is about: the candidate of a plan, what was promoted or rolled back."""
    automatic: bool = False
    """Whether a broken bound caused it, not an operator."""
    reason: str = ""


class ModelRollout(Config):
    """The rollout of one model: its plan in force, since when, and what happened before."""

    plan: RolloutPlan
    started: float
    """When the plan came into force, seconds since 1970."""
    previous: int | None = None
    """The stable version before the last promotion, to which a rollback without a candidate returns."""
    rejected: tuple[int, ...] = ()
    """Versions that were rolled back. A plan that tries one again must say so."""
    events: tuple[RolloutEvent, ...] = ()
    """The newest last. The oldest of many are removed."""

    @property
    def loaded(self) -> tuple[int, ...]:
        """The versions that the server must have, also for a rollback."""
        extra = () if self.previous is None or self.previous in self.plan.versions else (self.previous,)
        return (*self.plan.versions, *extra)

    def recorded(self, event: RolloutEvent) -> Self:
        """Return it as of the time of `event`, which is added to the record."""
        return self.model_copy(update={"started": event.time, "events": (*self.events, event)[-_MAX_EVENTS:]})

    def way_back(self) -> tuple[bool, str]:
        """Return whether there is something to roll back to, and what that would do, or why not."""
        stable, candidate = self.plan.stable, self.plan.candidate
        if candidate is not None:
            return True, f"version {stable} answers all requests, version {candidate} none"
        if self.previous is not None:
            return True, f"version {self.previous} answers all requests, as before the last promotion"
        return (
            False,
            f"version {stable} of {self.plan.model!r} answers all requests, and nothing was promoted before it",
        )


class RolloutState(Config):
    """The file rollout.json: the rollouts of all models of a server."""

    format_version: Literal[1] = 1
    models: dict[str, ModelRollout] = {}


class RolloutFile:
    """The file rollout.json in the state folder of a server, which one server at a time may use.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = RolloutFile(Path(folder))
        ...     file.write(RolloutState())
        ...     file.read().models
        {}
    """

    NAME = "rollout.json"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(folder)
        except StorageError:
            raise StorageError(
                f"{folder}: another server keeps its rollouts in this folder; give each server a folder of its own"
            ) from None
        except OSError as error:
            raise StorageError(f"{folder}: cannot hold the state of rollouts: {error.strerror}") from error

    def read(self) -> RolloutState:
        """Return the state. If the file cannot be read, another server may use the folder."""
        try:
            return RolloutState.from_json(self._path.read_text())
        except FileNotFoundError:
            return RolloutState()
        except (ConfigError, UnicodeDecodeError) as error:
            self.close()
            raise CorruptFileError(
                f"{self._path}: {error}; repair it, or remove it to begin without rollouts: then every model is answered by "
                "its newest version, also by one that was rolled back"
            ) from None
        except OSError as error:
            self.close()
            raise StorageError(f"{self._path}: cannot be read: {error.strerror}") from error

    def write(self, state: RolloutState) -> None:
        """Replace the state. It is durable when this returns."""
        try:
            write_durably(self._path, state.model_dump_json(indent=1).encode())
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Let another server use the folder. Calling it twice is harmless."""
        self._lock.release()
