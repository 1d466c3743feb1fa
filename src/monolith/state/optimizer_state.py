"""The state of a dense optimizer in a checkpoint: slots by parameter name, and hyperparameters both declared and current.

A checkpoint never overrules the code. It has the hyperparameters as the code had declared them and as they were when it was
made. On restore, one that the code declares differently now takes the code's value. One that the code declares as before, and
that something has moved since (a learning-rate scheduler), continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from monolith.errors import CheckpointMismatchError, CorruptFileError

__all__ = [
    "OptimizerPlan",
    "Settings",
    "complete_slots",
    "declared_settings",
    "leaves",
    "optimizer_name",
    "optimizer_state",
    "other_optimizer",
    "parameter_names",
    "plain_setting",
    "plan_optimizer",
    "plan_scheduler",
    "scheduler_state",
]

Settings = Mapping[str, Any]
"""Hyperparameters by name."""

_NO_SETTINGS = ("params", "param_names", "initial_lr")
_MISSING = object()
_SLOT_OF = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""The additional slot that an optimizer of torch expects once this hyperparameter is switched on."""


def optimizer_name(kind: type) -> str:
    """Return the public name of a class, by which checkpoints and servers know an optimizer or a scheduler.

    Example:
        >>> optimizer_name(torch.optim.AdamW)
        'torch.optim.AdamW'
    """
    package = ".".join(kind.__module__.split(".")[:2])
    if package in ("torch.optim", "monolith.optim"):
        return f"{package}.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def parameter_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return the names of each parameter of `model` by its `id`. Layers that share one give it several names.

    Example:
        >>> list(parameter_names(nn.Linear(2, 1)).values())
        [('weight',), ('bias',)]
    """
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)] = (*found.get(id(parameter), ()), name)
    return found


def declared_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group as the code declares them.

    A scheduler changes `lr` already when it is made, and keeps the declared rate as `initial_lr`.

    Example:
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> _ = torch.optim.lr_scheduler.ConstantLR(sgd, factor=0.1)
        >>> sgd.param_groups[0]["lr"], declared_settings(sgd)[0]["lr"]
        (0.05, 0.5)
    """
    groups = [_settings(group) for group in optimizer.param_groups]
    for settings, group in zip(groups, optimizer.param_groups, strict=True):
        if "initial_lr" in group:
            settings["lr"] = plain_setting(group["initial_lr"])
    return groups


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]], declared: Sequence[Settings]
) -> dict[str, Any]:
    """Return what a checkpoint stores of `optimizer`.

    Args:
        optimizer: that of the dense parameters.
        names: of the parameters, as `parameter_names` returns them. A parameter that is not in it is known by its position.
        declared: what `declared_settings` returned when the run began.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> state = optimizer_state(sgd, parameter_names(model), declared_settings(sgd))
        >>> state["class"], state["groups"][0]["parameters"], state["groups"][0]["declared"]["lr"]
        ('torch.optim.SGD', ['weight', 'bias'], 0.5)
    """
    packed = optimizer.state_dict()
    known = _names_by_group(optimizer, names)
    by_index = {
        index: own[0]
        for group, members in zip(packed["param_groups"], known, strict=True)
        for index, own in zip(group["params"], members, strict=True)
    }
    groups = [
        {
            "parameters": [own[0] for own in members],
            "declared": dict(first),
            "current": _settings(group),
            "initial_lr": plain_setting(group.get("initial_lr")),
        }
        for group, members, first in zip(optimizer.param_groups, known, declared, strict=True)
    ]
    slots = {by_index[index]: slots for index, slots in packed["state"].items() if index in by_index}
    return {"class": optimizer_name(type(optimizer)), "groups": groups, "state": slots}


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """What a restore does, or would do, to an optimizer or a scheduler. Nothing has changed until `apply` is called."""

    notes: tuple[str, ...] = ()
    """What continues where it was."""
    changes: tuple[str, ...] = ()
    """What differs from the saved run, for a person to see."""
    problems: tuple[str, ...] = ()
    """Why it cannot be done."""
    slots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The slots of each parameter, by its name now."""
    apply: Callable[[], None] = lambda: None
    """Changes the optimizer or scheduler."""

    def require(self, source: object = "checkpoint") -> None:
        """Raise `CheckpointMismatchError` with all problems, if there are any."""
        if self.problems:
            raise CheckpointMismatchError("\n".join([f"{source}: does not fit the code:", *self.problems]))


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: object,
    names: Mapping[int, Sequence[str]],
    declared: Sequence[Settings],
    *,
    renamed: Mapping[str, str] | None = None,
) -> OptimizerPlan:
    """Plan how `saved`, which `optimizer_state` returned, is restored into `optimizer`. Changes nothing.

    Args:
        optimizer: that of the dense parameters, as the code has made it.
        saved: the state in the checkpoint.
        names: of the parameters, as `parameter_names` returns them.
        declared: what `declared_settings` returns before the restore.
        renamed: for parameters that have another name now, the saved name by the new one.

    Raises:
        CorruptFileError: `saved` is no state of an optimizer.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> was, now = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.1))
        >>> saved = optimizer_state(was, parameter_names(model), declared_settings(was))
        >>> plan_optimizer(now, saved, parameter_names(model), declared_settings(now)).changes
        ("optimizer: lr was declared as 0.5, the code now says 0.1: the code's value is used",)
    """
    was = _checked(saved)
    now = optimizer_name(type(optimizer))
    if was["class"] != now:
        return OptimizerPlan(problems=(other_optimizer(was["class"], now),))
    known = _names_by_group(optimizer, names)
    old_name = _old_names(known, was, renamed or {})
    if now == "torch.optim.LBFGS" and _saved_order(was) != [old_name[own[0]] for own in _flat(known)]:
        return OptimizerPlan(problems=("LBFGS keeps all parameters in one vector: it needs them in the saved order",))
    groups = _plan_groups(optimizer, was, known, old_name, declared)
    slots = {own[0]: was["state"][old] for own in _flat(known) if (old := old_name[own[0]]) in was["state"]}
    return OptimizerPlan(
        notes=tuple(note for group in groups for note in group.notes),
        changes=(*(change for group in groups for change in group.changes), *_other_parameters(known, old_name, was)),
        slots=slots,
        apply=lambda: _apply(optimizer, known, slots, [group.values for group in groups]),
    )


def scheduler_state(scheduler: LRScheduler, declared: Settings) -> dict[str, Any]:
    """Return what a checkpoint stores of a scheduler. `declared` is its `state_dict()` when the run began.

    Example:
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, gamma=0.9)
        >>> scheduler_state(scheduler, scheduler.state_dict())["current"]["gamma"]
        0.9
    """
    return {"class": optimizer_name(type(scheduler)), "declared": dict(declared), "current": scheduler.state_dict()}


def plan_scheduler(scheduler: LRScheduler, saved: object, declared: Settings) -> OptimizerPlan:
    """Plan how `saved`, which `scheduler_state` returned, is restored into `scheduler`. Changes nothing.

    The rule is that of hyperparameters: what the code declares differently now stays as the code says, and what has moved since
    continues. A scheduler of another class starts from its beginning.
    """
    if saved is None:
        return OptimizerPlan(changes=("scheduler: the checkpoint has none: it starts from its beginning",))
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), dict) for key in ("declared", "current")):
        raise CorruptFileError("scheduler: expected its declared and current state")
    now = optimizer_name(type(scheduler))
    if saved.get("class") != now:
        text = f"scheduler: was {saved.get('class')}, the code now has {now}: it starts from its beginning"
        return OptimizerPlan(changes=(text,))
    here = scheduler.state_dict()
    was, last, mine = (dict(leaves(state)) for state in (saved["declared"], saved["current"], declared))
    moved = _reconcile("scheduler", [was], [last], mine, dict(leaves(here)))

    def apply() -> None:
        scheduler.load_state_dict(_with_leaves(here, moved.values))
        if isinstance(scheduler, LambdaLR):
            # A pure function of the step: the rate of this one is the code's, even if the function was another before.
            for group, base, rate in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                _put(group, "lr", base * rate(scheduler.last_epoch))

    return OptimizerPlan(notes=moved.notes, changes=moved.changes, apply=apply)


def leaves(state: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested state, each with its path. A list of plain values is one value.

    Example:
        >>> list(leaves({"betas": [0.9, 0.99], "inner": [{"gamma": 0.5}]}))
        [('betas', [0.9, 0.99]), ('inner.0.gamma', 0.5)]
    """
    if isinstance(state, dict):
        items: Iterable[tuple[object, object]] = state.items()
    elif isinstance(state, list) and any(isinstance(item, dict) for item in state):
        items = enumerate(state)
    else:
        yield path, state
        return
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def _with_leaves(state: Any, leaves: Settings, path: str = "") -> Any:  # noqa: ANN401 - nested state
    """Return a copy of `state` with other values at some paths."""
    if path in leaves:
        return leaves[path]
    if isinstance(state, dict):
        return {key: _with_leaves(value, leaves, f"{path}.{key}" if path else str(key)) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(item, dict) for item in state):
        return [_with_leaves(value, leaves, f"{path}.{place}") for place, value in enumerate(state)]
    return state


def other_optimizer(was: str, now: str) -> str:
    """Explain why an optimizer of class `now` cannot continue from the state of class `was`, and what to do.

    Example:
        >>> print(other_optimizer("torch.optim.SGD", "torch.optim.Adam")[:81])
        optimizer: it was trained with torch.optim.SGD, the code now has torch.optim.Adam
    """
    return (
        f"optimizer: it was trained with {was}, the code now has {now}, which cannot continue from that state. Continue with "
        f"{was}; or restore the tables and start dense parameters and optimizer again with RunConfig(clear_nn=True); or start a "
        "new model_dir with the weights and rows of this one with RunConfig(warm_start_from=...)"
    )


def _checked(saved: object) -> dict[str, Any]:
    if not isinstance(saved, dict) or not _is_state(saved):
        raise CorruptFileError("optimizer: expected its class, groups of named parameters, and state")
    return saved


def _is_state(saved: Mapping[str, Any]) -> bool:
    if not isinstance(saved.get("class"), str) or not isinstance(saved.get("state"), dict):
        return False
    groups = saved.get("groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and all(isinstance(group.get(key), dict) for key in ("declared", "current"))
        and all(isinstance(name, str) for name in group.get("parameters", [None]))
        for group in groups
    )


def _names_by_group(
    optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]]
) -> list[list[tuple[str, ...]]]:
    """Return all names of every parameter, group by group. Those that are not in the model are named by their position."""
    return [
        [
            tuple(names.get(id(parameter), (f"group {number} parameter {place}",)))
            for place, parameter in enumerate(group["params"])
        ]
        for number, group in enumerate(optimizer.param_groups)
    ]


def _flat(known: Iterable[Iterable[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    return [own for members in known for own in members]


def _saved_order(was: Mapping[str, Any]) -> list[str]:
    return [name for group in was["groups"] for name in group["parameters"]]


def _old_names(
    known: Sequence[Sequence[tuple[str, ...]]], was: Mapping[str, Any], renamed: Mapping[str, str]
) -> dict[str, str | None]:
    """Map the first name of each parameter to the one it was saved with, or None if it was not in the optimizer."""
    saved = set(_saved_order(was))
    found: dict[str, str | None] = {}
    for own in _flat(known):
        candidates = (*own, *(renamed[name] for name in own if name in renamed))
        found[own[0]] = next((name for name in candidates if name in saved), None)
    return found


@dataclass(frozen=True, kw_only=True)
class _Reconciled:
    """Hyperparameters to set, and what to log about them."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def _plan_groups(
    optimizer: torch.optim.Optimizer,
    was: Mapping[str, Any],
    known: Sequence[Sequence[tuple[str, ...]]],
    old_name: Mapping[str, str | None],
    declared: Sequence[Settings],
) -> list[_Reconciled]:
    group_of = {name: number for number, group in enumerate(was["groups"]) for name in group["parameters"]}
    found = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, known, strict=True)):
        old = [old_name[own[0]] for own in members]
        sources = [was["groups"][at] for at in sorted({group_of[name] for name in old if name is not None})]
        where = f"optimizer group {number}" if len(known) > 1 else "optimizer"
        one = _reconcile(
            where,
            [source["declared"] for source in sources],
            [source["current"] for source in sources],
            declared[number],
            _settings(group),
        )
        if sources and sources[0].get("initial_lr") is not None and "initial_lr" not in group:
            # A scheduler that is made after the restore, with last_epoch, asks for it.
            same = all(_same(source["declared"].get("lr"), declared[number].get("lr")) for source in sources)
            one.values["initial_lr"] = sources[0]["initial_lr"] if same else declared[number]["lr"]
        found.append(one)
    return found


def _reconcile(
    where: str, declared: Sequence[Settings], current: Sequence[Settings], now: Settings, here: Settings
) -> _Reconciled:
    """Continue what is declared as before, but was at another value than it is here, at that value.

    Args:
        where: begins each note.
        declared: saved, one for each group that parameters come from.
        current: saved, likewise.
        now: as the code declares it.
        here: as it is now. It differs from `now` where a scheduler has been made.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    changes: list[str] = []
    for key in dict.fromkeys([*now, *(key for settings in current for key in settings)]) if declared else ():
        first = [settings.get(key, _MISSING) for settings in declared]
        last = [settings.get(key, _MISSING) for settings in current]
        mine = now.get(key, _MISSING)
        everywhere = (*first, *last, here.get(key))
        if (mine is None or isinstance(mine, float | int | str)) and all(
            type(v) is type(mine) and v == mine for v in everywhere
        ):
            continue
        if not all(_same(value, mine) for value in first):
            changes.append(f"{where}: {key} was declared as {_shown(first)}, {_code_says(mine)}")
        elif not all(_same(value, last[0]) for value in last):
            changes.append(f"{where}: {key} was at {_shown(last)} in several groups, {_code_says(mine)}")
        elif last[0] is not _MISSING:
            if not _same(last[0], here.get(key, _MISSING)):
                values[key] = last[0]
            if not _same(last[0], mine):
                notes.append(f"{where}: {key} continues at {last[0]!r}, declared as {_shown(first)}")
    return _Reconciled(values=values, notes=tuple(notes), changes=tuple(changes))


def _code_says(value: object) -> str:
    return "the code now has none" if value is _MISSING else f"the code now says {value!r}: the code's value is used"


def _shown(values: Sequence[object]) -> str:
    shown = ["unset" if value is _MISSING else repr(value) for value in values]
    return " and ".join(dict.fromkeys(shown))


def _other_parameters(
    known: Sequence[Sequence[tuple[str, ...]]], old_name: Mapping[str, str | None], was: Mapping[str, Any]
) -> list[str]:
    new = [own[0] for own in _flat(known) if old_name[own[0]] is None]
    dropped = sorted(set(_saved_order(was)) - set(old_name.values()))
    notes = [f"optimizer: {name!r} was not trained before: its optimizer state starts from nothing" for name in new]
    return notes + [f"optimizer: {name!r} is not trained any more: its optimizer state is dropped" for name in dropped]


def _apply(
    optimizer: torch.optim.Optimizer,
    known: Sequence[Sequence[tuple[str, ...]]],
    slots: Mapping[str, Mapping[str, Any]],
    changes: Sequence[Settings],
) -> None:
    for group, moved in zip(optimizer.param_groups, changes, strict=True):
        for key, value in moved.items():
            _put(group, key, value)
    groups = optimizer.state_dict()["param_groups"]
    state = {
        index: complete_slots(slots[own[0]], group)
        for group, members in zip(groups, known, strict=True)
        for index, own in zip(group["params"], members, strict=True)
        if own[0] in slots
    }
    held = optimizer.param_groups
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # torch makes new groups. Whoever has the old ones, as a `ServerOptimizer` or a hook, must act on those in use.
    for group, loaded in zip(held, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups = held


def complete_slots(slots: Mapping[str, Any], group: Settings) -> dict[str, Any]:
    """Return the slots of a parameter, and those that a newly enabled hyperparameter of `group` needs.

    Example:
        >>> sorted(complete_slots({"exp_avg_sq": torch.ones(1)}, {"amsgrad": True}))
        ['exp_avg_sq', 'max_exp_avg_sq']
    """
    full = dict(slots)
    for setting, slot in _SLOT_OF.items():
        alike = next((full[name] for name in ("exp_avg_sq", "square_avg") if name in full), None)
        if group.get(setting) and slot not in full and alike is not None:
            full[slot] = torch.zeros_like(alike)
    return full


def _settings(group: Settings) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {
        key: value if value is None or isinstance(value, plain) else plain_setting(value)
        for key, value in group.items()
        if key not in _NO_SETTINGS
    }


def plain_setting(value: Any) -> Any:  # noqa: ANN401 - a hyperparameter is whatever an optimizer takes
    """Return a hyperparameter as a Python value, since a schedule may have computed it with tensors or NumPy.

    Example:
        >>> plain_setting(torch.tensor(0.5)), plain_setting([np.float64(0.9), 0.99])
        (0.5, (0.9, 0.99))
    """
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(plain_setting(item) for item in value)
    return deepcopy(value)


def _put(group: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - see above
    held = group.get(key)
    if isinstance(held, torch.Tensor):
        held.fill_(value)
    else:
        group[key] = value


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
