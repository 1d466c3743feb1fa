"""`PartialRecoverySaver`: named tensors and objects to checkpoints and back, with retention, in the words of the original."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

import torch
from torch import Tensor, nn

from monolith.errors import CheckpointMismatchError, CorruptFileError, InvalidArgumentError, StorageError
from monolith.state.index import CHECKPOINT_INDEX, MONOLITH_INDEX, RESTORE_MARKER, get_monolith_checkpoint_state
from monolith.state.locks import in_use
from monolith.state.model_dir import ModelDir, remove_assets
from monolith.state.paths import base_name, parent_folder, reading_below
from monolith.state.retention import CheckpointHistory
from monolith.state.save import write_checkpoint
from monolith.state.storage import StrPath, open_folder, safe_name
from monolith.state_bytes import State, Stateful
from monolith.table.store import Store
from monolith.urls import is_remote

__all__ = [
    "PartialRecoverySaver",
    "PsMonitor",
    "Restartable",
    "Saveable",
    "Variable",
    "Variables",
    "load_variables",
    "named_variables",
    "saved_value",
]

Variable = Tensor | Stateful
Saveable = Variable | Store
Variables = Mapping[str, Saveable] | Iterable[tuple[str, Saveable]]
"""By name, or pairs of name and value, as `module.named_parameters()` gives them."""


def named_variables(variables: Variables) -> dict[str, Saveable]:
    """Return `variables` by name. Two of one name, or one under two names, are an error.

    Example:
        >>> list(named_variables(nn.Linear(2, 1).named_parameters()))
        ['weight', 'bias']
        >>> named_variables([("v1", torch.zeros(1)), ("v1", torch.ones(1))])
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: variables: two have the same name: 'v1'
    """
    named: dict[str, Saveable] = {}
    names_of: dict[int, str] = {}
    for name, value in variables.items() if isinstance(variables, Mapping) else variables:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"variables: expected names, got {name!r}")
        if not isinstance(value, Tensor | Stateful | Store):
            raise InvalidArgumentError(
                f"variables[{name!r}]: expected a tensor, a store, or an object with state_dict and load_state_dict, "
                f"got {type(value).__name__}"
            )
        if name in named:
            raise InvalidArgumentError(f"variables: two have the same name: {name!r}")
        if id(value) in names_of:
            raise InvalidArgumentError(
                f"variables: the same one would be restored by two names: {names_of[id(value)]!r} and {name!r}"
            )
        named[name], names_of[id(value)] = value, name
    return named


def saved_value(variable: Variable) -> State:
    """Return what is written for a variable."""
    return variable.detach() if isinstance(variable, Tensor) else dict(variable.state_dict())


def load_variables(
    variables: Mapping[str, Variable], saved: Mapping[str, State], *, reshape: bool = False, where: str
) -> None:
    """Give `variables` the values that were `saved`. Everything is checked before anything changes.

    Example:
        >>> v0 = torch.zeros(2)
        >>> load_variables({"v0": v0}, {"v0": torch.tensor([1.0, 2.0])}, where="model.ckpt-3")
        >>> v0
        tensor([1., 2.])
    """
    problems = [p for name, value in variables.items() for p in _problems(name, value, saved, reshape)]
    if problems:
        raise CheckpointMismatchError(f"{where}: does not fit: " + "; ".join(problems))
    for name, value in variables.items():
        found: Any = saved[name]
        if not isinstance(value, Tensor):
            value.load_state_dict(found)
    with torch.no_grad():
        for name, value in variables.items():
            if isinstance(value, Tensor):
                found = saved[name]
                value.copy_(found.reshape(value.shape))


def _problems(name: str, value: Variable, saved: Mapping[str, State], reshape: bool) -> list[str]:
    if name not in saved:
        return [f"{name!r} was not found in the checkpoint, which has {', '.join(map(repr, saved)) or 'nothing'}"]
    found = saved[name]
    if isinstance(value, Tensor):
        return _tensor_problems(repr(name), value, found, reshape)
    if not isinstance(found, dict):
        return [f"{name!r} was saved as a {_kind(found)}, and is a {type(value).__name__} here"]
    if not isinstance(value, nn.Module):
        return []
    here = value.state_dict()
    missing = [f"'{name}.{key}' was not found in the checkpoint" for key in here if key not in found]
    strange = [f"'{name}.{key}' is not in the model" for key in found if key not in here]
    both = [(key, tensor) for key, tensor in here.items() if key in found and isinstance(tensor, Tensor)]
    return missing + strange + [p for k, t in both for p in _tensor_problems(f"'{name}.{k}'", t, found[k], reshape)]


def _tensor_problems(label: str, here: Tensor, found: State, reshape: bool) -> list[str]:
    if not isinstance(found, Tensor):
        return [f"{label} was saved as a {_kind(found)}, and is a tensor here"]
    if found.dtype != here.dtype:
        return [f"{label} is of {here.dtype}, but its original dtype is {found.dtype}"]
    if found.shape == here.shape or (reshape and found.numel() == here.numel()):
        return []
    advice = "" if reshape or found.numel() != here.numel() else "; reshape=True would allow it"
    return [f"{label} has shape {list(here.shape)}, but was saved with {list(found.shape)}{advice}"]


def _kind(found: State) -> str:
    return "state" if isinstance(found, dict) else type(found).__name__


@runtime_checkable
class Restartable(Protocol):
    """A shard, which is a store or a server, that knows whether it has been given its state since it started."""

    def is_initialised(self) -> bool:
        """Return False if it has just started."""

    def mark_initialised(self) -> None:
        """Record that it has state to keep, until it is started again."""


class PsMonitor:
    """Knows which shards have lost their state. The mark is in the shard itself, so it is lost exactly when the state is.

    Example:
        >>> from monolith.table import LocalStore
        >>> shards = [LocalStore([]), LocalStore([])]
        >>> monitor = PsMonitor(shards)
        >>> monitor.setup_ps_initialized_state()
        >>> shards[1] = LocalStore([])                                              # the second is started again
        >>> monitor = PsMonitor(shards)
        >>> monitor.is_ps_uninitialized(0), monitor.is_ps_uninitialized(1)
        (False, True)
    """

    def __init__(self, shards: Sequence[Restartable]) -> None:
        self.shards = tuple(shards)

    def is_ps_uninitialized(self, shard: int | None) -> bool:
        """Return whether shard number `shard` must be restored. None, or a number that does not exist, counts as fresh."""
        if shard is None or not 0 <= shard < len(self.shards):
            return True
        return not self.shards[shard].is_initialised()

    def setup_ps_initialized_state(self) -> None:
        """Mark all shards, which have been initialised or restored."""
        for shard in self.shards:
            shard.mark_initialised()


def _save_stores(path: StrPath, stores: Mapping[str, Store]) -> dict[str, str]:
    """Save each store into a folder of its own. Returns their names in the assets of the checkpoint `path`."""
    if not stores:
        return {}
    if is_remote(path):
        raise InvalidArgumentError(f"save_path: stores are saved to a local disk, got {str(path)!r}")
    # New names each time: what a checkpoint of this name has now stays whole until it is replaced.
    generation = secrets.token_hex(4)
    names = {name: f"{generation}/{quote(name, safe=' ')}" for name in stores}
    with reading_below(parent_folder(path)):
        for name, store in stores.items():
            store.save(_folder(path, names[name]))
    return names


def _prepare_stores(
    path: StrPath, saved: Mapping[str, object], stores: Mapping[str, Store], *, only_fresh: bool
) -> list[Callable[[], None]]:
    """Read and check the state for `stores`. Returns functions that install it.

    With `only_fresh`, the shards or servers of a store that have their state keep it.
    """
    prepared: list[Callable[[], None]] = []
    for name, store in stores.items():
        if name not in saved:
            known = ", ".join(map(repr, saved)) or "none"
            raise CheckpointMismatchError(f"{path}: store {name!r} was not found in the checkpoint, which has {known}")
        folder = _folder(path, str(saved[name]))
        if not folder.is_dir():
            raise CorruptFileError(f"{folder}: is missing, but belongs to the checkpoint {str(path)!r}")
        # A store in this process is one shard: whether it is fresh was decided before.
        prepared.append(store.prepare_restore(folder, only_fresh=only_fresh and store.remote))
    return prepared


def _folder(path: StrPath, name: str) -> Path:
    return Path(f"{path}.assets") / safe_name(name, path)


class PartialRecoverySaver:
    """Saves `variables` under names with the step, keeps the newest, and restores all, or only what restarted shards lost.

    A variable is a tensor, restored in place, anything with `state_dict` and `load_state_dict`, or a store, saved with all rows
    in `<checkpoint>.assets/` on a local disk.

    Args:
        variables: by name, or pairs of name and value such as `model.named_parameters()`.
        max_to_keep: checkpoints that stay, see `CheckpointHistory`. None or 0 keeps all.
        keep_checkpoint_every_n_hours: one checkpoint in this many hours is kept for good.
        sharded: write the variables of each shard (see `shard_of`) as a state of its own. Any saver restores either form.
        shard_of: number of the shard of a variable, by its name. A variable that is not named has none.
        reshape: let a tensor be restored into one with as many elements in another shape.
        pad_step_number: write steps with 8 digits, so that names sort.
        allow_empty: let a saver have no variables, and save and restore nothing.
        defer_build: use no variables until `build` names them.
        save_relative_paths: name checkpoints in the index relative to it, so that the folder may be moved.
        skip_save: let `save` write nothing and return None.
        exempt_checkpoint_paths: checkpoints that are never removed and do not count for `max_to_keep`.
        model_dir: where `monolith_checkpoint` names further ones, by default the folder of each save.
        ps_monitor: restore only variables of shards that are not initialised, and of a sharded store only such shards. By
            default all.
        clock: seconds since 1970.

    Example:
        >>> import tempfile
        >>> import torch
        >>> v0 = torch.tensor([10.0])
        >>> saver = PartialRecoverySaver({"v0": v0})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = saver.save(f"{folder}/model.ckpt", global_step=3)
        ...     _ = v0.zero_()
        ...     saver.restore(path)
        >>> path.endswith("/model.ckpt-3"), v0
        (True, tensor([10.]))
    """

    def __init__(
        self,
        variables: Variables | None = None,
        *,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        sharded: bool = False,
        shard_of: Mapping[str, int] | None = None,
        reshape: bool = False,
        pad_step_number: bool = False,
        allow_empty: bool = False,
        defer_build: bool = False,
        save_relative_paths: bool = True,
        skip_save: bool = False,
        exempt_checkpoint_paths: Iterable[StrPath] = (),
        model_dir: StrPath | None = None,
        ps_monitor: PsMonitor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if defer_build and variables is not None:
            raise InvalidArgumentError("variables: expected none with defer_build=True; give them to build()")
        self.sharded, self.reshape, self.pad_step_number = sharded, reshape, pad_step_number
        self.allow_empty, self.save_relative_paths, self.skip_save = allow_empty, save_relative_paths, skip_save
        self.model_dir, self.ps_monitor = model_dir, ps_monitor
        self._exempt = _names_of_exempt(exempt_checkpoint_paths)
        self._shard_of = dict(shard_of or {})
        self._clock = clock
        self._history = CheckpointHistory(
            max_to_keep=max_to_keep, keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours, clock=clock
        )
        self._variables: dict[str, Saveable] | None = None
        if not defer_build:
            self.build(variables or {})

    def build(self, variables: Variables) -> None:
        """Name what is saved, once."""
        if self._variables is not None:
            raise InvalidArgumentError("build: the saver has its variables already")
        named = named_variables(variables)
        if not named and not self.allow_empty:
            raise InvalidArgumentError("variables: there are none to save; give some, or allow_empty=True")
        unknown = [name for name in self._shard_of if name not in named]
        if unknown:
            raise InvalidArgumentError(f"shard_of: there is no variable {unknown[0]!r}")
        self._variables = named

    @property
    def last_checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are counted, oldest first."""
        return self._history.last_checkpoints

    def set_last_checkpoints_with_time(self, last_checkpoints_with_time: Iterable[tuple[str, float]]) -> None:
        """Take over the history of another saver, so that retention continues where it stopped."""
        self._history.set_last_checkpoints_with_time(last_checkpoints_with_time)

    def recover_last_checkpoints(self, checkpoint_paths: Iterable[StrPath]) -> None:
        """Take over those of `checkpoint_paths`, oldest first, that are still there."""
        self._history.recover(checkpoint_paths)

    def exempt_checkpoint_paths(self, folder: StrPath) -> tuple[str, ...]:
        """What the saver was given and what `monolith_checkpoint` says now: checkpoints exempt from removal."""
        state = get_monolith_checkpoint_state(self.model_dir or folder)
        return (*self._exempt, *(() if state is None else state.exempt_model_checkpoint_paths))

    def save(
        self,
        save_path: StrPath,
        global_step: int | None = None,
        *,
        latest_filename: str = CHECKPOINT_INDEX,
        write_state: bool = True,
    ) -> str | None:
        """Write a checkpoint at `save_path`, followed by "-<global_step>" if there is one. Returns its path when it is durable.

        A missing folder is created. `write_state=False` leaves index and retention alone.
        """
        variables = self._built("save")
        if self.skip_save or not variables:
            return None
        _require_plain_name("latest_filename", latest_filename)
        path = self._path(save_path, global_step, latest_filename)
        stores = {name: value for name, value in variables.items() if isinstance(value, Store)}
        saved_stores = _save_stores(path, stores)
        state, parts = self._states({name: value for name, value in variables.items() if not isinstance(value, Store)})
        state["stores"] = saved_stores
        write_checkpoint(path, state=state, parts=parts, step=global_step or 0, time=self._clock())
        if stores:
            remove_assets(path, keep={name.split("/")[0] for name in saved_stores.values()})
        if write_state:
            folder = parent_folder(path)
            self._history.record(
                path,
                folder,
                exempt=self.exempt_checkpoint_paths(folder),
                filename=latest_filename,
                relative=self.save_relative_paths,
            )
        return path

    def restore(self, save_path: StrPath) -> None:
        """Give the variables the values of the checkpoint at `save_path`. On an error none has changed."""
        variables = self._built("restore")
        if not variables:
            return
        model_dir = ModelDir.around(save_path)
        with in_use(save_path):
            try:
                model_dir.check(base_name(save_path))
            except (CorruptFileError, StorageError) as error:
                raise InvalidArgumentError(
                    f"save_path: {str(save_path)!r} is not a valid checkpoint: {error}"
                ) from None
            wanted = {name: value for name, value in variables.items() if self._is_fresh(name)}
            stores = {name: value for name, value in wanted.items() if isinstance(value, Store)}
            others = {name: value for name, value in wanted.items() if not isinstance(value, Store)}
            saved, saved_stores = _saved(model_dir, base_name(save_path))
            prepared = _prepare_stores(save_path, saved_stores, stores, only_fresh=self.ps_monitor is not None)
            load_variables(others, saved, reshape=self.reshape, where=str(save_path))
            for put_in_place in prepared:
                put_in_place()

    def setup_ps_initialized_state(self) -> None:
        """Mark all shards of the monitor, if there is one, as having state to keep."""
        if self.ps_monitor is not None:
            self.ps_monitor.setup_ps_initialized_state()

    def _built(self, call: str) -> dict[str, Saveable]:
        if self._variables is None:
            raise InvalidArgumentError(f"{call}: the saver has no variables yet; call build() first")
        return self._variables

    def _path(self, save_path: StrPath, step: int | None, latest_filename: str) -> str:
        path = str(save_path)
        if not base_name(path) or base_name(path) in (".", "..") or path.endswith("/"):
            raise InvalidArgumentError(f"save_path: expected the path of a checkpoint, got {path!r}")
        if step is not None and step < 0:
            raise InvalidArgumentError(f"global_step: expected at least 0, got {step}")
        _require_folder(parent_folder(path))
        if step is not None:
            path = f"{path}-{step:08}" if self.pad_step_number else f"{path}-{step}"
        _require_free_name(path, latest_filename)
        return path

    def _states(self, variables: Mapping[str, Variable]) -> tuple[dict[str, State], dict[str, State]]:
        """Return the state of the variables without a shard, and one part per shard."""
        values = {name: saved_value(value) for name, value in variables.items()}
        if not self.sharded:
            return {"variables": values}, {}
        shards = sorted({self._shard_of[name] for name in values if name in self._shard_of})
        parts: dict[str, State] = {}
        for place, shard in enumerate(shards):
            own = {name: value for name, value in values.items() if self._shard_of.get(name) == shard}
            parts[f"shard-{place:05}-of-{len(shards):05}"] = {"variables": own}
        rest = {name: value for name, value in values.items() if name not in self._shard_of}
        return {"variables": rest}, parts

    def _is_fresh(self, name: str) -> bool:
        return self.ps_monitor is None or self.ps_monitor.is_ps_uninitialized(self._shard_of.get(name))


def _saved(model_dir: ModelDir, name: str) -> tuple[dict[str, State], dict[str, State]]:
    """Read the variables of all shards, however many there were, and the folders of the stores."""
    variables: dict[str, State] = {}
    stores: dict[str, State] = {}
    for part in model_dir.manifest(name).states:
        state = model_dir.state(name, part)
        found, places = state.get("variables"), state.get("stores", {})
        if not isinstance(found, dict) or not isinstance(places, dict):
            raise CorruptFileError(f"{model_dir}/{name}: its state {part!r} was not written by a saver of variables")
        variables |= found
        stores |= places
    return variables, stores


def _require_plain_name(what: str, name: str) -> None:
    if not name or "/" in name or name in (".", ".."):
        raise InvalidArgumentError(f"{what}: expected the name of a file, got {name!r}")


def _names_of_exempt(paths: Iterable[StrPath]) -> tuple[str, ...]:
    if isinstance(paths, str):
        raise InvalidArgumentError(f"exempt_checkpoint_paths: expected several paths, got the text {paths!r}")
    return tuple(str(path) for path in paths)


def _require_free_name(path: str, index: str) -> None:
    """Refuse the name of a file that a folder of checkpoints has, or will have."""
    name = base_name(path)
    if name in (index, CHECKPOINT_INDEX, MONOLITH_INDEX, RESTORE_MARKER) or name.startswith("ckpt.info-"):
        raise InvalidArgumentError(
            f"save_path: {name!r} is the name of another file in a folder of checkpoints; use another name, such as "
            f"{parent_folder(path)}/model.ckpt"
        )
    if open_folder(parent_folder(path)).size(name) is not None:
        raise InvalidArgumentError(f"save_path: {path!r} is a file, expected a new name or a checkpoint")


def _require_folder(folder: str) -> None:
    """Refuse a parent that cannot be a folder, in words that name it."""
    if is_remote(folder):
        return
    parent = open_folder(folder)
    above = open_folder(parent_folder(folder))
    if above.size(base_name(folder)) is not None:
        raise InvalidArgumentError(f"save_path: parent directory {str(parent)!r} is a file, expected a folder")
