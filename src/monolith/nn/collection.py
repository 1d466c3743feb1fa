"""`EmbeddingBagCollection`: the embeddings of all features of a batch, one lookup per table, trained by an explicit step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.features.declaration import Declaration, declare_tables
from monolith.features.feature import Feature
from monolith.nn.bags import TableBags, bags_of
from monolith.table.admission import AdmissionFilter
from monolith.table.bag_parts import single_ids
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.store import Bags, Gradient, LocalStore, Store

__all__ = ["EmbeddingBagCollection", "dense_state_dict", "embedding_collections"]

_rows_saved_otherwise: ContextVar[bool] = ContextVar("rows_saved_otherwise", default=False)

MAX_PENDING = 256
"""Backward passes that may wait for `step`: more than any accumulation of gradients, few enough to notice a forgotten call."""


class EmbeddingBagCollection(nn.Module):
    """Embeddings of every feature of a batch: dict of columns -> dict of tensors, by feature name.

    Shapes: a column is int64 [rows], [rows, n], or a `Ragged` of int64; NumPy arrays and lists are converted. A pooled
    feature gives float32 [rows, dim]; "first_n" and "last_n" give [rows, max_length, dim] and, as `<name>.mask`, bool
    [rows, max_length]; "none" gives a `Ragged` of [rows, (n), dim]. A bias comes as `<name>.bias`, with 1 in place of dim.
    Features with the same `stack` give one tensor [rows, features, dim] under that name. All are on the device of the batch.

    The rows live in `store`, not in `parameters()`. `backward` only collects their gradients; `step` applies them, so that
    they can be clipped together with the dense ones first. A loop in plain PyTorch:

        loss.backward()
        monolith.nn.clip_grad_norm_(model, 1000.0)
        dense_optimizer.step()
        model.embeddings.step()

    An id without a row reads its initial value, and gets a row in the first `step` that has a gradient for it. In eval mode,
    and where torch records no gradients, nothing is collected.

    Example:
        >>> import torch
        >>> from monolith.features import Feature, Ragged
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.table import SGD, Zeros
        >>> user = Feature(name="user", dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
        >>> embeddings = EmbeddingBagCollection([user, Feature(name="tags", dim=3, pooling="mean")])
        >>> batch = {"user": torch.tensor([3, 4]), "tags": Ragged.from_lists([[1, 2], []])}
        >>> {name: list(output.shape) for name, output in embeddings(batch).items()}
        {'user': [2, 2], 'tags': [2, 3]}
        >>> embeddings(batch)["user"].sum().backward()
        >>> embeddings.step()
        >>> embeddings(batch)["user"].tolist()
        [[-1.0, -1.0], [-1.0, -1.0]]
    """

    steps: torch.Tensor
    """int64 []: the global step that the next `step()` without a number has; saved with the dense parameters."""

    def __init__(self, features: Sequence[Feature], store: Store | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.features = tuple(features)
        self.declaration: Declaration = declare_tables(self.features, seed=seed)
        self.store: Store = _local_store(self.declaration) if store is None else store
        self._check_store(self.store)
        self._compensated = frozenset(
            table.config.name for table in self.declaration.tables if table.config.needs_snapshot
        )
        self._spread_stacks = _spread_stacks(self.declaration, self.features)
        self._pending: list[Gradient] = []
        self._collected = 0
        self._warned = False
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Mapping[str, object]) -> Batch:
        """Look up every feature."""
        tables = bags_of(self.declaration, batch)
        requests = [table.bags for table in tables]
        anchor = torch.empty(0, requires_grad=self.training and torch.is_grad_enabled())
        pooled: tuple[torch.Tensor, ...] = _Lookup.apply(self, requests, anchor)  # type: ignore[no-untyped-call]
        outputs = self._outputs(tables, pooled)
        return {name: outputs[name] for feature in self.features for name in feature.outputs}

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """What `backward` has collected and `step` will apply: the gradients of the pooled lookups, one per table and pass."""
        return tuple(self._pending)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the collected gradients by `factor`."""
        self.change_gradients(lambda values: values * factor)

    def change_gradients(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `change` of the collected gradients in their place, float32 [bags, dim] each, one per table and pass.

        `change` must leave its argument as it is: autograd may share or expand the tensors it hands over.
        """
        self._pending = [replace(gradient, values=change(gradient.values)) for gradient in self._pending]

    def discard_gradients(self) -> None:
        """Forget the collected gradients, as `zero_grad` does for dense ones."""
        self._pending, self._collected = [], 0

    def take_gradients(self, step: int) -> list[Gradient]:
        """Hand over the collected gradients, with the learning rates of global step `step`, and count the step.

        For those who apply them to `store` themselves, elsewhere or later.
        """
        rates = {table.config.name: table.learning_rates(step) for table in self.declaration.tables}
        taken = [replace(gradient, learning_rates=rates[gradient.bags.table]) for gradient in self._pending]
        self.discard_gradients()
        self.steps.fill_(step + 1)
        return taken

    def step(self, step: int | None = None, *, event_time: int = 0) -> None:
        """Apply the collected gradients, one optimizer step per table and id, and forget them.

        `step` is the global step, which schedules and some optimizers read; None counts the calls. `event_time` is that of the
        batch, in seconds since 1970, and becomes the last-update time of the rows.
        """
        now = int(self.steps) if step is None else step
        self.store.apply(self.take_gradients(now), step=now, event_time=event_time)

    def use_store(self, store: Store) -> None:
        """Take rows from `store`, as one on servers, from now on; it must have the tables of the features.

        Refused while gradients wait, or where rows in this process would be left behind. Rows that are elsewhere stay there.
        """
        if self._pending:
            raise InvalidArgumentError(
                "use_store: gradients wait to be applied; call step() or discard_gradients() first"
            )
        rows = sum(map(len, self.store.tables.values()))
        if rows:
            raise InvalidArgumentError(
                f"use_store: the collection has {rows:,} rows in this process, which would be left behind; choose its store "
                "before training, or restore a checkpoint into the other one"
            )
        self._check_store(store)
        self.store = store

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        has_rows = self.store.remote or any(map(len, self.store.tables.values()))
        if has_rows and not (_rows_saved_otherwise.get() or self._warned):
            self._warned = True
            warnings.warn(
                "state_dict() has the dense parameters alone: the rows of an EmbeddingBagCollection are in its tables. Save both "
                "with monolith.train.ModelCheckpoints(folder, model, optimizer), or the rows with embeddings.store.save(folder)",
                UserWarning,
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        """Features and where their rows are, for `repr`."""
        return "\n".join(f"{feature.name} -> {table}" for feature, table in self._assignment())

    def _assignment(self) -> Iterable[tuple[Feature, str]]:
        return ((feature, self.declaration.assignment[feature.name]) for feature in self.features)

    def _collect(self, gradients: Iterable[Gradient]) -> None:
        if self._collected >= MAX_PENDING:
            raise InvalidArgumentError(
                f"{MAX_PENDING} backward passes wait to be applied; call step() of the EmbeddingBagCollection after backward, "
                "or discard_gradients()"
            )
        self._collected += 1
        self._pending.extend(gradients)

    def _outputs(self, tables: Sequence[TableBags], pooled: Sequence[torch.Tensor]) -> Batch:
        outputs: Batch = {}
        for table, rows in zip(tables, pooled, strict=True):
            rows = rows.to(table.device)
            # The gradient of a split is a concatenation, a copy of everything, even if there is one part.
            vectors = (rows,) if len(table.parts) == 1 else torch.split(rows, table.counts)
            for part, vector in zip(table.parts, vectors, strict=True):
                outputs |= part.outputs(vector)
        for stack, names in self._spread_stacks.items():
            for ending in ("", ".bias") if f"{names[0]}.bias" in outputs else ("",):
                outputs[stack + ending] = torch.stack([outputs[name + ending] for name in names], dim=1)  # type: ignore[misc]
        return outputs

    def _check_store(self, store: Store) -> None:
        there = store.configs()
        for table in self.declaration.tables:
            name = table.config.name
            if name not in there:
                raise ConfigError(
                    f"store: it has no table {name!r} for feature {table.features[0].name!r}; "
                    f"it has {', '.join(map(repr, there)) or 'none'}"
                )
            if there[name].segments != table.config.segments:
                raise ConfigError(
                    f"store: the segments of its table {name!r} are not those of feature {table.features[0].name!r}: "
                    f"{there[name].segments!r}, expected {table.config.segments!r}"
                )
            if table.config.needs_snapshot and store.remote:
                raise ConfigError(
                    f"store: feature {table.features[0].name!r} has DelayCompensation, which needs its rows in this process; "
                    "give it another optimizer to train on servers"
                )


def embedding_collections(modules: nn.Module | Iterable[nn.Module]) -> list[EmbeddingBagCollection]:
    """Every collection inside a model, or inside several, each once.

    Example:
        >>> from monolith.features import Feature
        >>> embeddings = EmbeddingBagCollection([Feature(name="user", dim=2)])
        >>> embedding_collections(nn.Sequential(embeddings, nn.Linear(2, 1))) == [embeddings]
        True
    """
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    found = {id(module): module for root in roots for module in root.modules()}
    return [module for module in found.values() if isinstance(module, EmbeddingBagCollection)]


def dense_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The `state_dict` of `model`, for a caller that saves the rows of its tables by other means.

    Example:
        >>> list(dense_state_dict(nn.Linear(2, 1, bias=False)))
        ['weight']
    """
    token = _rows_saved_otherwise.set(True)
    try:
        return dict(model.state_dict())
    finally:
        _rows_saved_otherwise.reset(token)


class _Lookup(torch.autograd.Function):
    """`anchor` is an empty tensor that requires grad: without one autograd would not call backward for integer ids."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, collection: EmbeddingBagCollection, requests: list[Bags], anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.collection, ctx.requests = collection, requests  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        compensated = collection._compensated if anchor.requires_grad else frozenset()
        singles = [single_ids(bags.table, bags.ids) for bags in requests if bags.table in compensated]
        rows = collection.store.lookup([*requests, *singles])
        ctx.snapshots = {  # type: ignore[attr-defined]
            single.table: row for single, row in zip(singles, rows[len(requests) :], strict=True)
        }
        return tuple(rows[: len(requests)])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        pairs = zip(ctx.requests, grads, strict=True)  # type: ignore[attr-defined]
        ctx.collection._collect(  # type: ignore[attr-defined]
            Gradient(bags=bags, values=grad.contiguous(), snapshot=ctx.snapshots.get(bags.table))  # type: ignore[attr-defined]
            for bags, grad in pairs
            if grad is not None
        )
        return None, None, None


def _local_store(declaration: Declaration) -> LocalStore:
    return LocalStore(
        EmbeddingTable(table.config, admission=None if table.admission is None else AdmissionFilter(table.admission))
        for table in declaration.tables
    )


def _spread_stacks(declaration: Declaration, features: Sequence[Feature]) -> dict[str, list[str]]:
    """Names of the features of each stack that lies in more than one table, in the order of declaration."""
    groups = [group for table in declaration.tables for group in table.groups if group.stack is None]
    spread = dict.fromkeys(group.features[0].stack for group in groups)
    return {stack: [f.name for f in features if f.stack == stack] for stack in spread if stack is not None}
