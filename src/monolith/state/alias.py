"""Old names of dense parameters, guessed where a model was rearranged since it was saved."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["AliasRules", "DEFAULT_RULES", "generate_aliases", "whole_name"]

_PART = re.compile(r"[./]part_(\d+)$")
_LAYER = re.compile(r"^(?P<prefix>.*?)(?P<layer>dense(_(?P<number>\d+))?)(?P<rest>[./][^./]+)$")


@dataclass(frozen=True)
class AliasRules:
    """How names of now are turned into older ones: regular expressions for a whole name, and what stands for it.

    Example:
        >>> rules = AliasRules().add_mapping_rules({r"tower_(\\d+)/(.*)": r"mlp_\\1/\\2"})
        >>> list(rules.candidates("tower_3/bias"))
        ['mlp_3/bias']
    """

    rules: Mapping[str, str] = field(default_factory=dict)

    def add_mapping_rules(self, rules: Mapping[str, str]) -> AliasRules:
        """These rules and `rules`, which are tried first."""
        return AliasRules({**rules, **{old: new for old, new in self.rules.items() if old not in rules}})

    def candidates(self, name: str) -> Iterator[str]:
        """Older names `name` may have had."""
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
"""Names that layers of the original had before."""


def whole_name(name: str) -> str:
    """The name of the parameter that `name` is a part of: itself, unless it ends with `part_<n>`.

    Example:
        >>> whole_name("tower/kernel/part_3"), whole_name("tower.weight")
        ('tower/kernel', 'tower.weight')
    """
    return _PART.sub("", name)


def generate_aliases(
    current: Collection[str], saved: Collection[str], *, rules: AliasRules = DEFAULT_RULES
) -> dict[str, str] | None:
    """The saved name of every current parameter that has another one now; None if one of them cannot be found.

    Tried in turn: a component of the path that is there twice, layers `dense_<n>` that were counted otherwise, and `rules`.

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
    """Saved names that are the same once a component that follows itself is taken out."""
    return sorted(other for other in free if _collapsed(other) == _collapsed(name))


def _collapsed(name: str) -> tuple[str, ...]:
    parts = re.split(r"[./]", name)
    return tuple(part for place, part in enumerate(parts) if place == 0 or parts[place - 1] != part)


def _renumbered(current: Collection[str], saved: Collection[str]) -> dict[str, list[str]]:
    """The n-th layer of a tower now for the n-th one then, and, where there are more now, for the n-th that is gone."""
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
    """Parameters of `dense`, `dense_1`, ... by what is before and behind, in the order of their numbers."""
    towers: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in {whole_name(name) for name in names}:
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            key = layer["prefix"], re.sub(r"[./]", "/", layer["rest"])
            towers.setdefault(key, []).append((int(layer["number"] or 0), name))
    return {key: [name for _, name in sorted(layers)] for key, layers in towers.items()}
