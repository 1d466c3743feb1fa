"""Ready models on the layers of `monolith.nn`, each of which fits on a screen and can be named in a YAML file.

    model: monolith.models:DeepFM
    model_args: {ids: [user_id, item_id], numbers: [age], dim: 16, hidden: [64, 32], heads: [{name: click, label: clicked}]}

Every model takes the fields of `Inputs` besides its own arguments, returns the logits of its heads, and can be trained, exported
and served like one of your own. Copy a class into your code to change it. A model that is called like its main layer has `Model`
in its name.

Shapes: B examples, n columns of ids, k = dim, m columns of numbers, T steps of a history.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, JsonValue
from torch import Tensor, nn
from torch.nn.functional import normalize

from monolith.config import Config, nearest_name
from monolith.errors import ConfigError
from monolith.features import Batch, Feature
from monolith.nn import (
    CGC,
    CIN,
    DCN,
    DIEN,
    DIN,
    FM,
    MLP,
    AutoInt,
    CausalAttention,
    DotInteraction,
    EmbeddingBagCollection,
    Head,
    MMoE,
)
from monolith.nn.heads import column

__all__ = [
    "AutoIntModel",
    "DCNv2",
    "DIENModel",
    "DINModel",
    "DLRM",
    "DeepFM",
    "Inputs",
    "MMoEModel",
    "PLE",
    "RankingModel",
    "Read",
    "SASRec",
    "TwoTower",
    "XDeepFM",
]

_SIDES = ("user side", "item side")

Name = Annotated[str, Field(min_length=1)]


class Inputs(Config):
    """What a model reads and predicts.

    Example:
        >>> Inputs(ids=("user", "item"), dim=8, feature={"expire_seconds": 86400}).heads[0].label
        'label'
    """

    ids: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Columns of ids. Each gets a table of embeddings, and of several ids in a row the embeddings are pooled."""
    numbers: tuple[Name, ...] = ()
    """Columns of numbers, [B] or [B, 1], best between -1 and 1 or so."""
    dim: Annotated[int, Field(gt=0)] = 16
    """k, the size of each embedding."""
    feature: dict[str, JsonValue] = {}
    """Further fields of the `Feature` of every column of ids, such as optimizer, initializer, pooling ("mean" by default),
    occurrence_threshold or expire_seconds."""
    history: Name | None = None
    """For models of sequences: the column of the ids that the user chose before, the last one newest."""
    item: Name | None = None
    """For models of sequences: the one of `ids` that the history has earlier ids of."""
    max_length: Annotated[int, Field(gt=0)] = 20
    """T: the newest ids of the history that are read."""
    heads: Annotated[tuple[Head, ...], Field(min_length=1)] = (Head(),)
    """What is predicted. Models of one task take one."""


class Read(NamedTuple):
    """A batch as a model reads it."""

    x: Tensor
    """Embeddings, [B, n, k]."""
    bias: Tensor | None
    """Numbers per id, [B, n, 1], where the model has first-order terms."""
    numbers: Tensor
    """Columns of numbers, [B, m]."""
    item: Tensor | None
    """Embeddings of the item, [B, k], in models of sequences."""
    history: Tensor | None
    """Embeddings of the history, [B, T, k], zeros where it is shorter."""
    mask: Tensor | None
    """Which steps of the history exist, bool [B, T]."""

    @property
    def flat(self) -> Tensor:
        """All embeddings and numbers side by side, [B, n * k + m]."""
        return torch.cat([self.x.flatten(1), self.numbers], dim=1)


class RankingModel(nn.Module):
    """The embeddings and heads of a model: what all models of this module share.

    A subclass has the classes it needs set to true: `first_order` for a bias per id, `sequence` for a history, and `multitask`
    for several heads.
    """

    first_order = False
    sequence = False
    multitask = False

    def __init__(
        self,
        *,
        _stacks: Mapping[str, str] | None = None,
        **fields: Any,  # noqa: ANN401 - the fields of Inputs, which checks them
    ) -> None:
        super().__init__()
        self.inputs = given = self._checked(fields)
        self.heads = given.heads
        own: dict[str, JsonValue] = {"pooling": "mean", "dim": given.dim, "bias": self.first_order, **given.feature}
        # TwoTower keeps its sides apart, so that one can be exported without the other.
        stacks = {name: "ids" if _stacks is None else _stacks.get(name, _SIDES[1]) for name in given.ids}
        features = [
            Feature.from_json(json.dumps({**own, "name": name, "stack": stack})) for name, stack in stacks.items()
        ]
        if self.sequence:
            features.append(
                Feature(
                    name=given.history or "",
                    shared_with=given.item,
                    pooling="last_n",
                    max_length=given.max_length,
                )
            )
        self.embeddings = EmbeddingBagCollection(features)
        self.width = len(given.ids) * given.dim + len(given.numbers)

    def read(self, batch: Batch) -> Read:
        """Look up the ids of a batch and collect its numbers."""
        rows, given = self.embeddings(batch), self.inputs
        x = rows["ids"]
        return Read(
            x=x,
            bias=rows["ids.bias"] if self.first_order else None,
            numbers=self.numbers(batch, given.numbers, x),
            item=x[:, given.ids.index(given.item or "")] if self.sequence else None,
            history=rows[given.history or ""] if self.sequence else None,
            mask=rows[f"{given.history}.mask"] if self.sequence else None,
        )

    def numbers(self, batch: Batch, names: Sequence[str], x: Tensor) -> Tensor:
        """Return columns of numbers side by side, [B, m], in the type and on the device of `x`, [B, ...]."""
        columns = [column(batch, name, f"{type(self).__name__}.numbers").reshape(-1, 1) for name in names]
        return torch.cat(columns, dim=1).to(x) if columns else x.new_zeros(x.shape[0], 0)

    def _checked(self, fields: Mapping[str, Any]) -> Inputs:
        model = type(self).__name__
        own = [name for name in inspect.signature(type(self)).parameters if name != "fields"]
        known = [*own, *Inputs.model_fields]
        for name in fields:
            if name not in known:
                near = nearest_name(name, known)
                hint = f"did you mean {near!r}?" if near else f"known fields: {', '.join(known)}"
                raise ConfigError(f"{model}.{name}: unknown field; {hint}")
        try:
            text = json.dumps(fields, default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{model}: expected fields as in a YAML file: {error}") from None
        given = Inputs.from_json(text)
        if len(given.heads) > 1 and not self.multitask:
            raise ConfigError(
                f"{model}.heads: predicts one task, got {len(given.heads)}; MMoEModel and PLE take several"
            )
        if self.sequence and (given.history is None or given.item not in given.ids):
            raise ConfigError(
                f"{model}.item, {model}.history: expected one of the ids {list(given.ids)} and a column of its earlier ids, "
                f"got {given.item!r} and {given.history!r}"
            )
        if not self.sequence and given.history is not None:
            raise ConfigError(
                f"{model}.history: reads no sequence; DINModel, DIENModel and SASRec do, got {given.history!r}"
            )
        return given


def _plain(value: object) -> object:
    if isinstance(value, Config):
        return value.model_dump(mode="json", exclude_unset=True)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def tower(width: int, hidden: Sequence[int], out: int = 1) -> MLP:
    """Return a plain MLP with relu between its layers, [*, width] -> [*, out].

    Example:
        >>> tower(4, [8, 8])(torch.zeros(2, 4)).shape
        torch.Size([2, 1])
    """
    return MLP(width, [*hidden, out], weight_norm=None)


def _logits(*terms: Tensor) -> Tensor:
    """Return the sum of terms [B, 1] as [B]."""
    return torch.cat(terms, dim=1).sum(1)


class DeepFM(RankingModel):
    """First-order weights, a factorization machine and an MLP, added (Guo et al. 2017).

    z = sum_i b_i + w · numbers + FM(x) + MLP([x, numbers]).

    Args:
        hidden: units of the MLP's hidden layers.
        fields: of `Inputs`.

    Example:
        >>> DeepFM(ids=["user", "item"])({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}).shape
        torch.Size([2])
    """

    first_order = True

    def __init__(self, *, hidden: Sequence[int] = (128, 64), **fields: Any) -> None:  # noqa: ANN401
        super().__init__(**fields)
        self.fm = FM()
        self.linear = nn.Linear(len(self.inputs.numbers), 1) if self.inputs.numbers else None
        self.mlp = tower(self.width, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        assert read.bias is not None
        linear = [] if self.linear is None else [self.linear(read.numbers)]
        return _logits(read.bias.sum(1), self.fm(read.x), self.mlp(read.flat), *linear)


class _Constant(nn.Module):
    """[B, 0] -> the same learned vector [B, k] for all."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.rand(k) / k**0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.vector.expand(numbers.shape[0], -1)


class DLRM(RankingModel):
    """Dot products of all pairs of embeddings and of an MLP of the numbers (Naumov et al. 2019).

    d = relu(bottom(numbers)), z = top([d, x_i · x_j, d · x_i]). Without numbers, relu(learned vector) is d.

    Args:
        bottom: units of the hidden layers of the MLP of the numbers.
        hidden: units of the hidden layers of the MLP of the products.
        fields: of `Inputs`.

    Example:
        >>> model = DLRM(ids=["user", "item"], numbers=["age"])
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4]), "age": torch.tensor([0.1, 0.2])}
        >>> model(batch).shape
        torch.Size([2])
    """

    def __init__(
        self,
        *,
        bottom: Sequence[int] = (64,),
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        n, k, m = len(self.inputs.ids), self.inputs.dim, len(self.inputs.numbers)
        self.bottom: nn.Module = tower(m, bottom, k) if m else _Constant(k)
        self.pairs = DotInteraction()
        self.top = tower(k + n * (n + 1) // 2, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        return _logits(self.top(self.pairs(read.x, self.bottom(read.numbers).relu())))


class DCNv2(RankingModel):
    """Crosses of the input with itself, next to an MLP (Wang et al. 2021, the parallel form).

    z = w · [cross(x_0), MLP(x_0)] with x_0 = [x, numbers].

    Args:
        num_layers: crosses, see `monolith.nn.DCN`.
        low_rank: rank of the crosses' matrices, or None for full ones.
        hidden: units of the MLP's layers.
        fields: of `Inputs`.

    Example:
        >>> DCNv2(ids=["user", "item"])({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}).shape
        torch.Size([2])
    """

    def __init__(
        self,
        *,
        num_layers: int = 2,
        low_rank: int | None = None,
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        if low_rank is None:
            self.cross = DCN(self.width, num_layers)
        else:
            self.cross = DCN(self.width, num_layers, dcn_type="mixed", low_rank=low_rank)
        self.mlp = MLP(self.width, hidden, activations=["relu"] * len(hidden), weight_norm=None)
        self.last = nn.Linear(self.width + hidden[-1], 1)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        flat = self.read(batch).flat
        return _logits(self.last(torch.cat([self.cross(flat), self.mlp(flat)], dim=1)))


class XDeepFM(RankingModel):
    """First-order weights, a compressed interaction network and an MLP, added (Lian et al. 2018).

    z = sum_i b_i + w · CIN(x) + MLP([x, numbers]).

    Args:
        cin: feature maps of each layer of `monolith.nn.CIN`.
        hidden: units of the MLP's hidden layers.
        fields: of `Inputs`.

    Example:
        >>> XDeepFM(ids=["user", "item"])({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}).shape
        torch.Size([2])
    """

    first_order = True

    def __init__(
        self,
        *,
        cin: Sequence[int] = (32, 32),
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        self.cin = CIN(len(self.inputs.ids), cin)
        self.last = nn.Linear(sum(cin), 1)
        self.mlp = tower(self.width, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        assert read.bias is not None
        return _logits(read.bias.sum(1), self.last(self.cin(read.x)), self.mlp(read.flat))


class AutoIntModel(RankingModel):
    """Columns attend to each other, next to an MLP (Song et al. 2019, AutoInt+).

    z = w · [AutoInt(x)] + MLP([x, numbers]).

    Args:
        num_layers: how many times columns attend, see `monolith.nn.AutoInt`.
        num_heads: a divisor of dim.
        hidden: units of the MLP's hidden layers.
        fields: of `Inputs`.

    Example:
        >>> AutoIntModel(ids=["user", "item"])({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}).shape
        torch.Size([2])
    """

    def __init__(
        self,
        *,
        num_layers: int = 2,
        num_heads: int = 2,
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        self.attention = AutoInt(self.inputs.dim, num_layers, num_heads=num_heads)
        self.last = nn.Linear(len(self.inputs.ids) * self.inputs.dim, 1)
        self.mlp = tower(self.width, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        return _logits(self.last(self.attention(read.x).flatten(1)), self.mlp(read.flat))


class DINModel(RankingModel):
    """The history, weighed by how well each step fits the item (Zhou et al. 2018).

    z = MLP([x, numbers, DIN(item, history)]).

    Args:
        attention: units of the hidden layers that weigh a step, see `monolith.nn.DIN`.
        hidden: units of the MLP's hidden layers.
        fields: of `Inputs`, with history and item.

    Example:
        >>> from monolith.features import Ragged
        >>> model = DINModel(ids=["user", "item"], item="item", history="seen")
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4]), "seen": Ragged.from_lists([[4, 5], []])}
        >>> model(batch).shape
        torch.Size([2])
    """

    sequence = True

    def __init__(
        self,
        *,
        attention: Sequence[int] = (32,),
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        self.interest = DIN(self.inputs.dim, [*attention, 1], weight_norm=None)
        self.mlp = tower(self.width + self.inputs.dim, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        interest = self.interest(read.item, read.history, read.mask)
        return _logits(self.mlp(torch.cat([read.flat, interest], dim=1)))


class DIENModel(RankingModel):
    """The interest as it evolves along the history towards the item (Zhou et al. 2019, without the auxiliary loss).

    z = MLP([x, numbers, DIEN(item, history)]), by default with an attentional update gate (AUGRU).

    Args:
        num_units: of the recurrences, see `monolith.nn.DIEN`.
        att_type: "AUGRU", "AGRU" or "GRU".
        hidden: units of the MLP's hidden layers.
        fields: of `Inputs`, with history and item.

    Example:
        >>> from monolith.features import Ragged
        >>> model = DIENModel(ids=["user", "item"], item="item", history="seen")
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4]), "seen": Ragged.from_lists([[4, 5], []])}
        >>> model(batch).shape
        torch.Size([2])
    """

    sequence = True

    def __init__(
        self,
        *,
        num_units: int = 16,
        att_type: str = "AUGRU",
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        k = self.inputs.dim
        self.interest = DIEN(k, k, num_units, att_type=att_type, activation="tanh")  # type: ignore[arg-type] # it checks
        self.mlp = tower(self.width + num_units, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        interest = self.interest(read.item, read.history, read.mask)
        return _logits(self.mlp(torch.cat([read.flat, interest], dim=1)))


class SASRec(RankingModel):
    """Self-attention along the history, and its last state against the item (after Kang and McAuley 2018).

    h = blocks(history + positions), z = h_last · item + MLP([x, numbers]). The paper has no MLP and trains with sampled
    negatives, here the examples have labels like those of the other models.

    Args:
        num_layers: blocks, see `monolith.nn.CausalAttention`.
        num_heads: a divisor of dim.
        hidden: units of the MLP's hidden layers.
        fields: of `Inputs`, with history and item.

    Example:
        >>> from monolith.features import Ragged
        >>> model = SASRec(ids=["user", "item"], item="item", history="seen")
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4]), "seen": Ragged.from_lists([[4, 5], []])}
        >>> model(batch).shape
        torch.Size([2])
    """

    sequence = True

    def __init__(
        self,
        *,
        num_layers: int = 1,
        num_heads: int = 1,
        hidden: Sequence[int] = (128, 64),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        k = self.inputs.dim
        self.positions = nn.Parameter(0.01 * torch.randn(self.inputs.max_length, k))
        self.blocks = nn.Sequential(*(CausalAttention(k, num_heads=num_heads) for _ in range(num_layers)))
        self.mlp = tower(self.width, hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        read = self.read(batch)
        assert read.item is not None
        assert read.mask is not None
        assert read.history is not None
        states = self.blocks(read.history + self.positions)
        # Of the steps that exist, which come first, the last one. A history without steps adds nothing.
        last = read.mask & (read.mask.cumsum(1) == read.mask.sum(1, keepdim=True))
        taste = (states * last.unsqueeze(2)).sum(1)
        return _logits((taste * read.item).sum(1, keepdim=True), self.mlp(read.flat))


class MMoEModel(RankingModel):
    """Experts shared by all tasks, mixed by a gate per task (Ma et al. 2018).

    z_t = MLP_t(MMoE(x_0)_t) with x_0 = [x, numbers].

    Args:
        num_experts: see `monolith.nn.MMoE`.
        experts: units of the layers of each expert.
        hidden: units of the hidden layers of each task's MLP.
        fields: of `Inputs`, with one of heads per task.

    Example:
        >>> model = MMoEModel(ids=["user", "item"], heads=[{"name": "click"}, {"name": "buy", "label": "bought"}])
        >>> sorted(model({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}))
        ['buy', 'click']
    """

    multitask = True

    def __init__(
        self,
        *,
        num_experts: int = 4,
        experts: Sequence[int] = (64, 32),
        hidden: Sequence[int] = (32,),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        self.experts = MMoE(self.width, len(self.heads), experts, num_experts=num_experts, weight_norm=None)
        self.towers = nn.ModuleList(tower(experts[-1], hidden) for _ in self.heads)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Columns -> logits [B] of each head."""
        mixed = [torch.relu(task) for task in self.experts(self.read(batch).flat)]
        return {h.name: t(x).squeeze(1) for h, t, x in zip(self.heads, self.towers, mixed, strict=True)}


class PLE(RankingModel):
    """Experts of each task and shared ones, extracted in levels (Tang et al. 2020).

    z_t = MLP_t(levels(x_0)_t) with x_0 = [x, numbers], each level a `monolith.nn.CGC`.

    Args:
        levels: units of the experts of each level: [64, 32] has two levels.
        num_experts: experts of each task, and shared ones, in each level.
        hidden: units of the hidden layers of each task's MLP.
        fields: of `Inputs`, with one of heads per task.

    Example:
        >>> model = PLE(ids=["user", "item"], heads=[{"name": "click"}, {"name": "buy", "label": "bought"}])
        >>> sorted(model({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}))
        ['buy', 'click']
    """

    multitask = True

    def __init__(
        self,
        *,
        levels: Sequence[int] = (64, 32),
        num_experts: int = 2,
        hidden: Sequence[int] = (32,),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**fields)
        widths = [self.width, *levels[:-1]]
        self.levels = nn.ModuleList(
            CGC(width, len(self.heads), units, num_experts=num_experts)
            for width, units in zip(widths, levels, strict=True)
        )
        self.towers = nn.ModuleList(tower(levels[-1], hidden) for _ in self.heads)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Columns -> logits [B] of each head."""
        xs = [self.read(batch).flat] * (len(self.heads) + 1)
        for level in self.levels:
            xs = level(xs)
        return {h.name: t(x).squeeze(1) for h, t, x in zip(self.heads, self.towers, xs[:-1], strict=True)}


class TwoTower(RankingModel):
    """A vector of the user and one of the item, compared by their angle: items can be found by nearest neighbours.

    z = s cos(MLP(user columns), MLP(item columns)) + b with learned s > 0 and b.

    Args:
        user: the columns of `ids` and `numbers` that belong to the user. The others belong to the item.
        out: size of both vectors.
        hidden: units of the hidden layers of both MLPs.
        fields: of `Inputs`.

    Example:
        >>> model = TwoTower(ids=["user", "item"], user=["user"], out=8)
        >>> batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}
        >>> model.item_vectors(batch).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        *,
        user: Sequence[str],
        out: int = 32,
        hidden: Sequence[int] = (64,),
        **fields: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(_stacks=dict.fromkeys(user, _SIDES[0]), **fields)
        given = self.inputs
        unknown = [name for name in user if name not in (*given.ids, *given.numbers)]
        if unknown or not set(user) & set(given.ids) or set(given.ids) <= set(user):
            raise ConfigError(
                f"TwoTower.user: expected some but not all of the ids {list(given.ids)}, and any of the numbers "
                f"{list(given.numbers)}, got {list(user)}"
            )
        self.columns = [[name for name in given.numbers if (name in user) is side] for side in (True, False)]
        widths = [given.dim * sum((name in user) is side for name in given.ids) for side in (True, False)]
        self.towers = nn.ModuleList(
            tower(width + len(numbers), hidden, out) for width, numbers in zip(widths, self.columns, strict=True)
        )
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(0.0))

    def user_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the users, [B, out], of length 1. Exported by `export_model(..., vectors="user_vectors")`."""
        return self._side(0, batch)

    def item_vectors(self, batch: Batch) -> Tensor:
        """Return the vectors of the items, [B, out], of length 1. Exported by `export_model(..., vectors="item_vectors")`."""
        return self._side(1, batch)

    def _side(self, side: int, batch: Batch) -> Tensor:
        x = self.embeddings(batch)[_SIDES[side]].flatten(1)
        return normalize(self.towers[side](torch.cat([x, self.numbers(batch, self.columns[side], x)], dim=1)), dim=1)

    def forward(self, batch: Batch) -> Tensor:
        """Columns -> logits [B]."""
        return self.scale.exp() * (self.user_vectors(batch) * self.item_vectors(batch)).sum(1) + self.bias
