"""`ModelRepository`: the models of a server by name and version, swapped without a failed request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from monolith.config import nearest_name
from monolith.errors import InvalidArgumentError, ModelNotFoundError
from monolith.serve.replica import Replica

__all__ = ["ModelRepository"]


class _Model:
    """The versions of one model."""

    __slots__ = ("default", "pinned", "versions")

    def __init__(self) -> None:
        self.versions: dict[int, Replica] = {}
        self.default: int | None = None
        self.pinned = False


class ModelRepository:
    """Replicas by the name and version of their model. Thread-safe.

    A replica in use stays open: one that was removed is closed when the last `hold` on it ends. Requests that start after the
    removal get another version.

    Example:
        >>> repository = ModelRepository()
        >>> repository.names()
        ()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}
        self._uses: dict[int, int] = {}
        self._leaving: dict[int, Replica] = {}

    def add(self, replica: Replica, *, default: bool | None = None) -> None:
        """Add a replica, which the repository closes in the end.

        Args:
            replica: Ready to answer: what it needs to warm up should be done.
            default: Whether it is the version for clients that name none. By default the greatest version is, unless
                `set_default` chose one.

        Raises:
            InvalidArgumentError: the model has this version already.
        """
        with self._lock:
            model = self._models.setdefault(replica.name, _Model())
            if replica.version in model.versions:
                raise InvalidArgumentError(f"model {replica.name!r}: has version {replica.version} already")
            model.versions[replica.version] = replica
            self._uses[id(replica)] = 0
            if default:
                model.default, model.pinned = replica.version, True
            elif default is None and not model.pinned:
                model.default = max(model.versions)
            elif model.default is None:
                model.default = replica.version

    def get(self, name: str, version: int | None = None) -> Replica:
        """Return the replica of a version, or of the default version. Use it inside `hold`, or it may be closed meanwhile.

        Raises:
            ModelNotFoundError: there is no such model or version.
        """
        with self._lock:
            model = self._model(name)
            wanted = model.default if version is None else version
            try:
                return model.versions[wanted]  # type: ignore[index]  # None is in no dict
            except KeyError:
                known = ", ".join(map(str, sorted(model.versions)))
                raise ModelNotFoundError(f"model {name!r}: has no version {version}; it has {known}") from None

    def acquire(self, replica: Replica) -> bool:
        """Keep `replica` open until `release`. Returns False if it has been removed: ask for another one."""
        with self._lock:
            key = id(replica)
            if key not in self._uses or key in self._leaving:
                return False
            self._uses[key] += 1
            return True

    def release(self, replica: Replica) -> None:
        """End what `acquire` began. Closes the replica if it was removed and this was its last use."""
        with self._lock:
            key = id(replica)
            self._uses[key] -= 1
            if self._uses[key] or key not in self._leaving:
                return
            del self._leaving[key], self._uses[key]
        replica.close()

    @contextmanager
    def hold(self, name: str, version: int | None = None) -> Iterator[Replica]:
        """Keep the replica of a version, or of the default version, open during the block.

        Raises:
            ModelNotFoundError: there is no such model or version.
        """
        replica = self.get(name, version)
        while not self.acquire(replica):  # another thread has replaced it between the two calls
            replica = self.get(name, version)
        try:
            yield replica
        finally:
            self.release(replica)

    def remove(self, name: str, version: int) -> None:
        """Take a version out. It is closed at once, or when the last request that uses it has ended.

        If it was the default version, the greatest other one becomes it. With its last version the model is gone.

        Raises:
            ModelNotFoundError: there is no such model or version.
        """
        replica = self.get(name, version)
        with self._lock:
            model = self._models.get(name)
            if model is None or model.versions.pop(version, None) is None:
                raise ModelNotFoundError(f"model {name!r}: version {version} has just been removed by another thread")
            if model.default == version:
                model.default, model.pinned = max(model.versions, default=None), False
            if not model.versions:
                del self._models[name]
            if self._uses[id(replica)]:
                self._leaving[id(replica)] = replica
                return
            del self._uses[id(replica)]
        replica.close()

    def replace(self, replica: Replica) -> None:
        """Add a version, make it the default one, and remove all others of the same model."""
        self.add(replica, default=None)
        with self._lock:
            model = self._model(replica.name)
            model.default, model.pinned = replica.version, False
            others = [version for version in model.versions if version != replica.version]
        for version in others:
            self.remove(replica.name, version)

    def names(self) -> tuple[str, ...]:
        """Return the names of all models, sorted."""
        with self._lock:
            return tuple(sorted(self._models))

    def versions(self, name: str) -> tuple[int, ...]:
        """Return the versions of a model, ascending.

        Raises:
            ModelNotFoundError: there is no such model.
        """
        with self._lock:
            return tuple(sorted(self._model(name).versions))

    def ready(self, name: str, version: int | None = None) -> bool:
        """Whether the model, and this version of it, can be asked."""
        with self._lock:
            model = self._models.get(name)
            return model is not None and (version is None or version in model.versions)

    def default(self, name: str) -> int:
        """Return the version for clients that name none.

        Raises:
            ModelNotFoundError: there is no such model.
        """
        return self.get(name).version

    def set_default(self, name: str, version: int | None) -> None:
        """Choose the version for clients that name none. None: always the greatest there is.

        Raises:
            ModelNotFoundError: there is no such model or version.
        """
        if version is not None:
            self.get(name, version)
        with self._lock:
            model = self._model(name)
            model.default = max(model.versions) if version is None else version
            model.pinned = version is not None

    def close(self) -> None:
        """Remove every model."""
        for name in self.names():
            for version in self.versions(name):
                self.remove(name, version)

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            near = nearest_name(name, self._models)
            known = ", ".join(sorted(self._models))
            hint = f"did you mean {near!r}?" if near else f"it has {known}" if known else "this server has no models"
            raise ModelNotFoundError(f"model {name!r}: there is no such model; {hint}")
        return model

    def __repr__(self) -> str:
        return f"ModelRepository({', '.join(self.names())})"
