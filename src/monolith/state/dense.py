"""Whether saved dense parameters are compatible with a model, under their own names or under older ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from monolith.errors import CheckpointMismatchError, InvalidArgumentError

__all__ = ["AliasRules", "DEFAULT_RULES", "DenseReport", "generate_aliases", "plan_dense", "whole_name"]

_PART = re.compile(r"[./]part_(\d+)$")
_LAYER = re.compile(r"^(?P<prefix>.*?)(?P<layer>dense(_(?P<number>\d+))?)(?P<rest>[./][^./]+)$")


@dataclass(frozen=True)
class AliasRules:
    """How current names are turned into older ones, as regular expressions for a whole name and their replacements.

    Example:
        >>> rules = AliasRules().add_mapping_rules({r"tower_(\\d+)/(.*)": r"mlp_\\1/\\2"})
        >>> list(rules.candidates("tower_3/bias"))
        ['mlp_3/bias']
    """

    rules: Mapping[str, str] = field(default_factory=dict)

    def add_mapping_rules(self, rules: Mapping[str, str]) -> AliasRules:
        """Return these rules with `rules` added, which are tried first."""
        return AliasRules({**rules, **{old: new for old, new in self.rules.items() if old not in rules}})

    def candidates(self, name: str) -> Iterator[str]:
        """Yield the older names that `name` may have had."""
        for pattern, replacement in self.rules.items():
            found = re.fullmatch(pattern, name)
            if found is not None:
                yield found.expand(replacement)


DEFAULT_RULES = AliasRules(
    {
        r"(.*)c_dot/mlp/(.*)": r"\1c_dot/compress_tower/\2",
        r"(.*)dcn/kernel_(\d+)/trainable_norm": r"\1dcn_\2/kernel/trainable_norm",
        r"(.*)dcn/kernel_(\d+)": r"\1dcn_\2/kernel",
        r"(.*)dcn/bias_(\d+)": r"\1dcn_\2/bias",
    }
)
"""Older names of layers of the original."""


def whole_name(name: str) -> str:
    """Return the name of the parameter that `name` is a part of, which is itself unless it ends with `part_<n>`.

    Example:
        >>> whole_name("tower/kernel/part_3"), whole_name("tower.weight")
        ('tower/kernel', 'tower.weight')
    """
    return _PART.sub("", name)


def generate_aliases(
    current: Collection[str], saved: Collection[str], *, rules: AliasRules = DEFAULT_RULES
) -> dict[str, str] | None:
    """Return the saved name of every current parameter that was renamed, or None if one of them cannot be found.

    Tried in turn: a component of the path that is repeated, layers `dense_<n>` that were numbered differently, and `rules`.

    Example:
        >>> generate_aliases(["tower.dense_1.weight", "tower.dense_2.weight"], ["tower.dense.weight", "tower.dense_5.weight"])
        {'tower.dense_1.weight': 'tower.dense.weight', 'tower.dense_2.weight': 'tower.dense_5.weight'}
        >>> generate_aliases(["a/a/bias"], ["a/bias"]), generate_aliases(["a"], ["b"])
        ({'a/a/bias': 'a/bias'}, None)
    """
    old = {whole_name(name) for name in saved}
    missing = sorted({whole_name(name) for name in current} - old)
    free = old - {whole_name(name) for name in current}
    renumbered = _renumbered(current, old)
    found: dict[str, str] = {}
    for name in missing:
        candidates = [*_without_repeats(name, free), *renumbered.get(name, ()), *rules.candidates(name)]
        taken = set(found.values())
        match = next((other for other in candidates if other in old and other not in taken), None)
        if match is None:
            return None
        found[name] = match
    return found


def _without_repeats(name: str, free: Collection[str]) -> list[str]:
    """Return saved names that are equal once repeated components are removed."""
    return sorted(other for other in free if _collapsed(other) == _collapsed(name))


def _collapsed(name: str) -> tuple[str, ...]:
    parts = re.split(r"[./]", name)
    return tuple(part for place, part in enumerate(parts) if place == 0 or parts[place - 1] != part)


def _renumbered(current: Collection[str], saved: Collection[str]) -> dict[str, list[str]]:
    """Map the n-th layer of a tower to the n-th saved one and, if there are more now, to the n-th that was removed."""
    now, then = _towers(current), _towers(saved)
    found: dict[str, list[str]] = {}
    for tower, names in now.items():
        before = then.get(tower, [])
        gone, new = [n for n in before if n not in names], [n for n in names if n not in before]
        pairs = [*zip(names, before, strict=False)] if len(names) == len(before) else []
        for name, other in (*pairs, *zip(new, gone, strict=False)):
            found.setdefault(name, []).append(other)
    return found


def _towers(names: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """Group the parameters of `dense`, `dense_1`, ... by prefix and suffix, in the order of their numbers."""
    towers: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in {whole_name(name) for name in names}:
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            key = layer["prefix"], re.sub(r"[./]", "/", layer["rest"])
            towers.setdefault(key, []).append((int(layer["number"] or 0), name))
    return {key: [name for _, name in sorted(layers)] for key, layers in towers.items()}


@dataclass(frozen=True, kw_only=True)
class DenseReport:
    """What a restore does, or would do, to the dense parameters of a model."""

    values: Mapping[str, torch.Tensor]
    """The new value of each parameter. Empty when they are initialised again."""
    step: int
    """The global step to continue from."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The saved name of each renamed parameter."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    problems: tuple[str, ...] = ()
    """Everything that is incompatible."""

    def require(self, source: object = "checkpoint", *, cleared: str | None = None) -> None:
        """Raise `CheckpointMismatchError` with all problems, if there are any.

        `cleared` is the file that says that `clear_nn` has been done before, if it has. It is then not done again.
        """
        if self.problems:
            again = "" if cleared is None else f", which has been done once: remove {cleared} to do it again"
            raise CheckpointMismatchError(
                f"{source}: does not fit the model: {'; '.join(self.problems)}. To keep the tables and start with new dense "
                f"parameters, set clear_nn (--clear-nn){again}; to start with a new model, use another model_dir"
            )

    def also(self) -> str:
        """Return what to add to an error about tables: the problems, with what to do about them."""
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
    """Plan how the parameters `saved` are restored into those of a model, `current`. Changes nothing.

    Args:
        current: The model's parameters and buffers by name, as `state_dict()` returns them.
        saved: Those of the checkpoint.
        step: The step of the checkpoint.
        aliases: Old names by new ones. Not used if every name of the model is in the checkpoint as it is.
        auto_alias: Without `aliases`, guess old names with `generate_aliases` if some are missing.
        rules: For guessing.
        allow_unused: Ignore saved parameters that the model does not have, instead of reporting a problem.
        clear_nn: Initialise the parameters again and restore only tables.
        continue_training: With `clear_nn`, keep counting steps from the checkpoint instead of from 0.

    Example:
        >>> report = plan_dense({"tower/dense_1/bias": torch.zeros(1)}, {"tower/dense/bias": torch.ones(1)}, step=7)
        >>> report.values, report.problems
        ({'tower/dense_1/bias': tensor([1.])}, ())
    """
    if clear_nn:
        if aliases:
            raise InvalidArgumentError("aliases: of no use with clear_nn, which restores no dense parameter")
        cleared = ("dense parameters are initialised again",)
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
    """Return the rows of `whole` that belong to one of the parts it is divided into now."""
    parts = sorted((n for n in current if whole_name(n) == whole_name(name)), key=lambda n: int(n.rpartition("_")[2]))
    before = sum(len(current[part]) for part in parts[: parts.index(name)])
    if sum(len(current[part]) for part in parts) != len(whole):
        raise CheckpointMismatchError(
            f"{name!r} is a part of {len(whole)} saved rows, which the parts do not add up to"
        )
    return whole[before : before + len(current[name])]
