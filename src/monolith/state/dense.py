"""Whether saved dense parameters fit a model, under their own names or others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.state.alias import DEFAULT_RULES, AliasRules, generate_aliases, whole_name

__all__ = ["DenseReport", "plan_dense"]


@dataclass(frozen=True, kw_only=True)
class DenseReport:
    """What a restore does, or would do, to the dense parameters of a model."""

    values: Mapping[str, torch.Tensor]
    """What each parameter becomes; empty when they are initialised anew."""
    step: int
    """The global step to go on from."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The saved name of each parameter that has another one now."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    problems: tuple[str, ...] = ()
    """Everything that does not fit."""

    def require(self, source: object = "checkpoint", *, cleared: str | None = None) -> None:
        """Raise `CheckpointMismatchError` with all problems, if there are any.

        `cleared` is the file that says that `clear_nn` has been done before, if it has: it is then not done again.
        """
        if self.problems:
            again = "" if cleared is None else f", which has been done once: remove {cleared} to do it again"
            raise CheckpointMismatchError(
                f"{source}: does not fit the model: {'; '.join(self.problems)}. To keep the tables and start with new dense "
                f"parameters, set clear_nn (--clear-nn){again}; to start with a new model, use another model_dir"
            )

    def also(self) -> str:
        """What to add to an error about tables: the problems, with what to do about them. Nothing if there are none."""
        if not self.problems:
            return ""
        return f". Nor do dense parameters fit: {'; '.join(self.problems)}; clear_nn (--clear-nn) starts them again"


def plan_dense(
    current: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    *,
    step: int = 0,
    aliases: Mapping[str, str] | None = None,
    auto_alias: bool = True,
    rules: AliasRules = DEFAULT_RULES,
    allow_unused: bool = False,
    clear_nn: bool = False,
    continue_training: bool = False,
) -> DenseReport:
    """What restoring the parameters `saved` into those of a model, `current`, means; changes nothing.

    Args:
        current: the model's parameters and buffers by name, as `state_dict()` gives them.
        saved: those of the checkpoint.
        step: that of the checkpoint.
        aliases: old names by new ones. Not used if every name of the model is in the checkpoint as it is.
        auto_alias: without `aliases`, guess old names if some are missing; see `generate_aliases`.
        rules: for guessing.
        allow_unused: saved parameters that the model does not have are left out, instead of being a problem.
        clear_nn: initialise the parameters anew and restore only tables.
        continue_training: with `clear_nn`, keep counting steps from the checkpoint instead of from 0.

    Example:
        >>> report = plan_dense({"tower/dense_1/bias": torch.zeros(1)}, {"tower/dense/bias": torch.ones(1)}, step=7)
        >>> report.values, report.problems
        ({'tower/dense_1/bias': tensor([1.])}, ())
    """
    if clear_nn:
        if aliases:
            raise InvalidArgumentError("aliases: of no use with clear_nn, which restores no dense parameter")
        cleared = ("dense parameters are initialised anew",)
        return DenseReport(values={}, step=step if continue_training else 0, notes=cleared)
    names = _old_names(current, saved, aliases, auto_alias, rules)
    values: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, parameter in current.items():
        try:
            values[name] = _value(name, parameter, names.get(whole_name(name), whole_name(name)), current, saved)
        except CheckpointMismatchError as error:
            problems.append(str(error))
    used = {names.get(whole_name(name), whole_name(name)) for name in current} | set(current)
    unused = [f"{name!r} is not in the model" for name in saved if name not in used]
    notes = [f"{new!r} is restored from {old!r}" for new, old in names.items()]
    return DenseReport(
        values=values,
        step=step,
        aliases=names,
        notes=(*notes, *(unused if allow_unused else ())),
        problems=(*problems, *(() if allow_unused else unused)),
    )


def _old_names(
    current: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str] | None,
    auto_alias: bool,
    rules: AliasRules,
) -> dict[str, str]:
    if all(name in saved or whole_name(name) in saved for name in current):
        return {}
    if aliases:
        unknown = [name for name in aliases if name not in {whole_name(n) for n in current}]
        if unknown:
            raise InvalidArgumentError(f"aliases: the model has no parameter {unknown[0]!r}")
        return dict(aliases)
    return (generate_aliases(current, saved, rules=rules) or {}) if auto_alias else {}


def _value(
    name: str,
    parameter: torch.Tensor,
    old: str,
    current: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    if name in saved:
        found = saved[name]
    elif old in saved:
        found = saved[old] if whole_name(name) == name else _part(name, saved[old], current)
    else:
        raise CheckpointMismatchError(
            f"{name!r} is not in the checkpoint; give its old name in reload_alias_map if it was renamed"
        )
    if found.shape != parameter.shape:
        raise CheckpointMismatchError(f"{name!r} has shape {list(parameter.shape)}, saved with {list(found.shape)}")
    return found


def _part(name: str, whole: torch.Tensor, current: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows of `whole` that belong to one of the parts it is divided into now."""
    parts = sorted((n for n in current if whole_name(n) == whole_name(name)), key=lambda n: int(n.rpartition("_")[2]))
    before = sum(len(current[part]) for part in parts[: parts.index(name)])
    if sum(len(current[part]) for part in parts) != len(whole):
        raise CheckpointMismatchError(
            f"{name!r} is a part of {len(whole)} saved rows, which the parts do not add up to"
        )
    return whole[before : before + len(current[name])]
