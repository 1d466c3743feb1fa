"""The service of a run's chief that `monolith control` talks to: stop, resume, save, status, dense values and rows."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field

from monolith.cluster.net import concat_ip_and_port, get_local_host
from monolith.config import Config, Positive
from monolith.errors import InvalidArgumentError, StorageError, UnavailableError
from monolith.follow.run_service import (
    ADDRESS_FILE,
    TOKEN_FILE,
    announce_servers,
    service_address,
    service_token,
    write_private,
)
from monolith.state.storage import LocalFolder, open_folder
from monolith.table.arrays import Ids, id_array
from monolith.table.entries import Entries
from monolith.train.control import (
    ANSWER_SECS,
    BlockStatus,
    Controller,
    FeatureRows,
    ModelDescription,
    TrainingStatus,
)
from monolith.train.distributed.config import ControllerConfig
from monolith.train.forgetting import Forgotten, ForgottenTable
from monolith.transport.calls import Answer, BasicCall, CallNumber, FrameCalls, Handlers, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, read_pem
from monolith.transport.tokens import Token, new_token, reveal
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.train.run_feed import RunFeed
    from monolith.train.trainer import Trainer

__all__ = ["ControlCall", "ControlClient", "ControlServer", "controlled"]

CONNECT_SECS = 5.0
"""Seconds in which the service must answer that it is there."""
_ANY_ADDRESS = ("0.0.0.0", "::")
_log = logging.getLogger(__name__)


class ControlCall(CallNumber):
    """The calls of the service of a run's chief."""

    STATUS = 144
    BLOCK_STATUS = 145
    STOP = 146
    RESUME = 147
    SAVE = 148
    END_RUN = 149
    DESCRIBE = 150
    VARIABLES = 151
    FEATURES = 152
    FORGET = 153
    DROP_CHECKPOINTS = 154

    @property
    def changes_state(self) -> bool:
        """Whether the call changes the rows or the files of the run."""
        return self in (ControlCall.FORGET, ControlCall.DROP_CHECKPOINTS)


class _Ask(Config):
    timeout: Annotated[Positive, Field(le=86400)] = ANSWER_SECS
    """Seconds that the service may wait until the run is between two steps."""


_Names = Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=10_000)]


class _AskNames(_Ask):
    names: _Names


class _AskForget(_Ask):
    tables: _Names = ()
    features: _Names = ()
    renew: bool = False


class _ControlCalls(FrameCalls):
    def __init__(self, controller: Controller, *, max_frame_bytes: int) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self._controller = controller
        calls: Handlers = {
            BasicCall.HEALTH: lambda frame: Answer(),
            ControlCall.STATUS: lambda frame: json_answer(**asdict(controller.status())),
            ControlCall.BLOCK_STATUS: lambda frame: json_answer(**asdict(controller.block_status())),
            ControlCall.DESCRIBE: lambda frame: json_answer(**asdict(controller.describe())),
            ControlCall.STOP: self._stop,
            ControlCall.RESUME: self._resume,
            ControlCall.SAVE: self._save,
            ControlCall.END_RUN: self._end_run,
            ControlCall.VARIABLES: self._variables,
            ControlCall.FEATURES: self._features,
            ControlCall.FORGET: self._forget,
            ControlCall.DROP_CHECKPOINTS: self._drop_checkpoints,
            **controller.feed.calls.calls(),
        }
        # Without SHUTDOWN: the service lives as long as the run.
        self._handlers = calls

    def stop(self, *, grace: float) -> bool:
        """As of every server. Followers that wait are answered first."""
        self._controller.feed.feed.release()
        return super().stop(grace=grace)

    def _stop(self, frame: Frame) -> Answer:
        return json_answer(**asdict(self._controller.stop(timeout=message_of(_Ask, frame).timeout)))

    def _resume(self, frame: Frame) -> Answer:
        self._controller.resume(timeout=message_of(_Ask, frame).timeout)
        return Answer()

    def _save(self, frame: Frame) -> Answer:
        return json_answer(path=self._controller.save(timeout=message_of(_Ask, frame).timeout))

    def _end_run(self, frame: Frame) -> Answer:
        self._controller.end_run(timeout=message_of(_Ask, frame).timeout)
        return Answer()

    def _variables(self, frame: Frame) -> Answer:
        ask = message_of(_AskNames, frame)
        found = self._controller.variables(ask.names, timeout=ask.timeout)
        return Answer(
            text=json.dumps({"names": list(found), "types": [str(value.dtype) for value in found.values()]}),
            arrays=tuple(map(_sendable, found.values())),
        )

    def _features(self, frame: Frame) -> Answer:
        ask = message_of(_AskNames, frame)
        found = self._controller.features(ask.names, _ids_in(frame), timeout=ask.timeout)
        about = [
            {"feature": name, "table": rows.table, "slots": list(rows.entries.slots)} for name, rows in found.items()
        ]
        arrays = [array for rows in found.values() for array in _entry_arrays(rows.entries)]
        return Answer(text=json.dumps({"features": about}), arrays=tuple(arrays))

    def _forget(self, frame: Frame) -> Answer:
        ask = message_of(_AskForget, frame)
        found = self._controller.forget(
            _ids_in(frame), tables=ask.tables, features=ask.features, renew=ask.renew, timeout=ask.timeout
        )
        return json_answer(**asdict(found))

    def _drop_checkpoints(self, frame: Frame) -> Answer:
        ask = message_of(_AskNames, frame)
        self._controller.drop_checkpoints(ask.names, timeout=ask.timeout)
        return Answer()


def _ids_in(frame: Frame) -> np.ndarray:
    if len(frame.arrays) != 1 or frame.arrays[0].dtype != np.dtype("<i8") or frame.arrays[0].ndim != 1:
        raise InvalidArgumentError("ids: expected one array int64 [n]")
    return frame.arrays[0]


def _sendable(value: torch.Tensor) -> np.ndarray:
    """Return `value` in a type that frames have. Those of fewer than 32 bits become float32, others int64 or float64."""
    if value.dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
        return value.numpy()
    return value.to(torch.float32 if value.dtype.is_floating_point else torch.int64).numpy()


def _entry_arrays(entries: Entries) -> list[np.ndarray]:
    columns = (entries.ids, entries.found.to(torch.uint8), entries.values, entries.times, *entries.slots.values())
    return [column.numpy() for column in columns]


class ControlServer(FrameServer):
    """Answers `ControlClient` until `close`, on behalf of `controller`.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> with ControlServer(Controller(Trainer(nn.Identity()))) as server, ControlClient(server.address) as client:
        ...     client.status().step
        0
    """

    def __init__(self, controller: Controller, config: ControllerConfig | None = None) -> None:
        config = config or ControllerConfig()
        super().__init__(config, _ControlCalls(controller, max_frame_bytes=config.max_message_bytes))


@contextmanager
def controlled(
    trainer: Trainer,
    config: ControllerConfig,
    *,
    num_workers: int = 1,
    token: Token = None,
    feed: RunFeed | None = None,
) -> Iterator[Controller]:
    """Yield the `Controller` of a run, and let `monolith control MODEL_DIR` reach it during the block.

    The address is in the file `controller_server_addr.txt` of the model_dir. A client sends `config.token` or, if there is none,
    the token that is drawn here and written to the file `controller_token`, which only its owner can read. A remote model_dir
    cannot keep a token secret: there it is `token`, that of the run, and a run without one cannot be reached. Neither can a run
    without a model_dir. Replicas follow `feed`, by default the rows of the trainer.
    """
    controller = Controller(trainer, num_workers=num_workers, feed=feed)
    folder = trainer.config.model_dir
    secret = reveal(config.token) or (reveal(token) if folder is not None and is_remote(folder) else None)
    try:
        if folder is None or not config.enabled:
            yield controller
        elif is_remote(folder) and secret is None:
            _log.info("`monolith control` cannot reach this run: with a remote model_dir it needs MONOLITH_PS_TOKEN")
            yield controller
        else:
            drawn = None if secret is not None else new_token()
            listens = config.model_copy(update={"token": secret or drawn})
            with ControlServer(controller, listens) as server, _announced(folder, server, listens.host, drawn):
                if reveal(token) is not None and not is_remote(folder):
                    announce_servers(folder, reveal(token))
                yield controller
    finally:
        controller.close()


@contextmanager
def _announced(folder: str, server: ControlServer, host: str, token: str | None) -> Iterator[None]:
    """Write the files by which clients find the service, and remove them after the block if they are still its own."""
    home = open_folder(folder)
    if isinstance(home, LocalFolder):
        # A folder that cannot hold the run is an error now, instead of a warning here and an error at the first save.
        home.make()
        if not os.access(home.path, os.W_OK | os.X_OK):
            raise StorageError(f"RunConfig.model_dir: {folder}: permission to write is denied")
    address = concat_ip_and_port(get_local_host(), server.port) if host in _ANY_ADDRESS else server.address
    try:
        if token is not None:
            write_private(Path(folder), TOKEN_FILE, token)
        home.write(ADDRESS_FILE, address.encode())
    except StorageError as error:
        # The run itself can do without, and reports a disk that fails when it saves.
        _log.warning("`monolith control` cannot reach this run: %s", error)
    try:
        yield
    finally:
        # A successor may have written its own.
        with suppress(StorageError):
            if home.size(ADDRESS_FILE) is not None and home.read(ADDRESS_FILE) == address.encode():
                home.remove(ADDRESS_FILE)
                home.remove(TOKEN_FILE)


class ControlClient:
    """Talks to the chief of a run. Every method waits at most `timeout` seconds until the run is between two steps.

    Args:
        address: host:port of its service.
        token: what the service requires.
        timeout: seconds.
        tls_root_certs: CA bundle (PEM) that signed its certificate.

    Raises:
        UnavailableError: no run answers there.
        AuthenticationError: the token is missing or wrong.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        timeout: float = ANSWER_SECS,
        tls_root_certs: Path | None = None,
    ) -> None:
        pem = None if tls_root_certs is None else read_pem(tls_root_certs, "tls_root_certs")
        self._timeout = timeout
        self._link = Link(address, timeout=timeout + CONNECT_SECS, token=token, tls_root_certs=pem, max_streams=1)
        try:
            self._link.call(BasicCall.HEALTH, timeout=CONNECT_SECS)
        except BaseException:
            self._link.close()
            raise

    @classmethod
    def of_run(
        cls,
        model_dir: str,
        *,
        token: str | None = None,
        timeout: float = ANSWER_SECS,
        tls_root_certs: Path | None = None,
    ) -> Self:
        """Return a client of the run in `model_dir`, with its address and, unless `token` is given, its token.

        A run with a remote model_dir has the token of $MONOLITH_PS_TOKEN.

        Raises:
            InvalidArgumentError: no run is going on there, or none that answers.
        """
        address = service_address(model_dir)
        if address is None:
            raise InvalidArgumentError(
                f"{model_dir}: no run answers here, there is no {ADDRESS_FILE}. It has ended, has not begun, or was started "
                "without its service: `Estimator`, `monolith train` and `monolith launch` have one in runs with a model_dir"
            )
        try:
            return cls(address, token=service_token(model_dir, token), timeout=timeout, tls_root_certs=tls_root_certs)
        except UnavailableError as error:
            raise InvalidArgumentError(
                f"{model_dir}: its run does not answer at {address}: it was killed, or that is an address of another machine "
                f"(a loopback address is that of the chief's machine): {error}"
            ) from None

    def status(self) -> TrainingStatus:
        """Return how far the run is."""
        return TrainingStatus(**self._ask(ControlCall.STATUS))

    def block_status(self) -> BlockStatus:
        """Return which workers are held."""
        return _block_status(self._ask(ControlCall.BLOCK_STATUS))

    def stop(self) -> BlockStatus:
        """Hold all workers between two steps. Returns which are held already."""
        return _block_status(self._ask(ControlCall.STOP))

    def resume(self) -> None:
        """Let the workers continue."""
        self._ask(ControlCall.RESUME)

    def save(self) -> str:
        """Save a checkpoint now. Returns its path."""
        return str(self._ask(ControlCall.SAVE)["path"])

    def end_run(self) -> None:
        """End the run with a checkpoint."""
        self._ask(ControlCall.END_RUN)

    def describe(self) -> ModelDescription:
        """Return what can be asked of the model."""
        found = self._ask(ControlCall.DESCRIBE)
        shapes = {name: tuple(shape) for name, shape in found["variables"].items()}
        return ModelDescription(**{**found, "servers": tuple(found["servers"]), "variables": shapes})

    def variables(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return dense values by name, those that exist. Those of 16 bits come as float32."""
        frame = self._call(ControlCall.VARIABLES, _AskNames(timeout=self._timeout, names=tuple(names)))
        found = json.loads(frame.text)["names"]
        return {name: torch.from_numpy(array.copy()) for name, array in zip(found, frame.arrays, strict=True)}

    def features(self, names: Sequence[str], ids: Ids) -> dict[str, FeatureRows]:
        """Return the rows of features with optimizer state. Features that do not exist are left out."""
        wanted = id_array(ids).reshape(-1)
        frame = self._call(ControlCall.FEATURES, _AskNames(timeout=self._timeout, names=tuple(names)), [wanted])
        left = iter(torch.from_numpy(array.copy()) for array in frame.arrays)
        found: dict[str, FeatureRows] = {}
        for one in json.loads(frame.text)["features"]:
            keys, there, values, times = (next(left) for _ in range(4))
            slots = {name: next(left) for name in one["slots"]}
            entries = Entries(ids=keys, found=there.bool(), values=values, slots=slots, times=times)
            found[one["feature"]] = FeatureRows(
                feature=one["feature"], table=one["table"], ids=tuple(map(int, wanted)), entries=entries
            )
        return found

    def forget(
        self, ids: Ids, *, tables: Sequence[str] = (), features: Sequence[str] = (), renew: bool = False
    ) -> Forgotten:
        """Remove the rows of `ids` from the run. The arguments are those of `forget_rows`."""
        ask = _AskForget(timeout=self._timeout, tables=tuple(tables), features=tuple(features), renew=renew)
        found = json.loads(self._call(ControlCall.FORGET, ask, [id_array(ids).reshape(-1)]).text)
        removed = {
            name: ForgottenTable(features=tuple(one["features"]), ids=tuple(one["ids"]), removed=one["removed"])
            for name, one in found.pop("tables").items()
        }
        return Forgotten(tables=removed, **found)

    def drop_checkpoints(self, names: Sequence[str]) -> None:
        """Remove older checkpoints of the run by name."""
        self._call(ControlCall.DROP_CHECKPOINTS, _AskNames(timeout=self._timeout, names=tuple(names)))

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, call: ControlCall) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._call(call, _Ask(timeout=self._timeout)).text)
        return answer

    def _call(self, call: ControlCall, ask: _Ask, arrays: Sequence[np.ndarray] = ()) -> Frame:
        return self._link.call(call, ask.model_dump_json(), arrays)


def _block_status(found: dict[str, Any]) -> BlockStatus:
    return BlockStatus(stopped=found["stopped"], blocked=tuple(found["blocked"]), unblocked=tuple(found["unblocked"]))
