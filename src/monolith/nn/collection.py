"""`EmbeddingBagCollection`: the embeddings of all features of a batch, one lookup per table, trained by an explicit step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.features.declaration import Declaration, declare_tables
from monolith.features.feature import Feature
from monolith.nn.bags import BagPlan
from monolith.table.admission import AdmissionFilter
from monolith.table.bags import Gradient, single_ids
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.packed import LearningRates, PackedBags, PackedGradients
from monolith.table.store import LocalStore, Store

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
        self.plan = BagPlan(self.declaration, self.features)
        self._rates = _Rates(self.declaration)
        self._pending: list[PackedGradients] = []
        self._collected = 0
        self._warned = False
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Mapping[str, object]) -> Batch:
        """Look up every feature."""
        bags = self.plan.bags(batch)
        arrays: Sequence[torch.Tensor]
        if self.training and torch.is_grad_enabled():
            arrays = _Lookup.apply(self, bags.packed, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        else:
            arrays = self.plan.layout.pack(self.store.lookup(bags.packed))
        return self.plan.outputs(bags, arrays)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """What `backward` has collected and `step` will apply: the gradients of the pooled lookups, one per table and pass."""
        return tuple(gradient for gradients in self._pending for gradient in gradients)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the collected gradients by `factor`."""
        self._pending = [
            gradients.changed(lambda values: values * factor, by_table=False) for gradients in self._pending
        ]

    def change_gradients(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `change` of the collected gradients in their place, float32 [bags, dim] each, one per table and pass.

        `change` must leave its argument as it is: autograd may share or expand the tensors it hands over.
        """
        self._pending = [gradients.changed(change, by_table=True) for gradients in self._pending]

    def discard_gradients(self) -> None:
        """Forget the collected gradients, as `zero_grad` does for dense ones."""
        self._pending, self._collected = [], 0

    def take_gradients(self, step: int) -> Sequence[Gradient]:
        """Hand over the collected gradients, with the learning rates of global step `step`, and count the step.

        For those who apply them to `store` themselves, elsewhere or later.
        """
        rates = self._rates.at(step)
        passes = [gradients.with_rates(rates) for gradients in self._pending]
        taken = passes[0] if len(passes) == 1 else [gradient for gradients in passes for gradient in gradients]
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

    def _collect(self, gradients: PackedGradients) -> None:
        if self._collected >= MAX_PENDING:
            raise InvalidArgumentError(
                f"{MAX_PENDING} backward passes wait to be applied; call step() of the EmbeddingBagCollection after backward, "
                "or discard_gradients()"
            )
        self._collected += 1
        if len(gradients):
            self._pending.append(gradients)

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
        ctx: FunctionCtx, collection: EmbeddingBagCollection, bags: PackedBags, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.collection, ctx.bags = collection, bags  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        arrays = bags.layout.pack(collection.store.lookup(bags))
        ctx.snapshots = {}  # type: ignore[attr-defined]
        if collection._compensated:
            singles = [single_ids(one.table, one.ids) for one in bags if one.table in collection._compensated]
            rows = collection.store.lookup(singles)
            ctx.snapshots = dict(zip((one.table for one in singles), rows, strict=True))  # type: ignore[attr-defined]
        return tuple(arrays)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        # The core reads rows at any distance, as in a slice of the gradient of a concatenation, but without gaps inside.
        arrays = [grad if grad is None or grad.stride(1) == 1 else grad.contiguous() for grad in grads]
        ctx.collection._collect(PackedGradients(ctx.bags, arrays, snapshots=ctx.snapshots))  # type: ignore[attr-defined]
        return None, None, None


class _Rates:
    """The learning rates of all tables by step. A schedule that several tables share is asked once."""

    def __init__(self, declaration: Declaration) -> None:
        keys = [(*map(id, table.schedules), table.config.learning_rates) for table in declaration.tables]
        self._distinct = dict(zip(keys, declaration.tables, strict=True))
        self._keys = keys
        is_constant = all(schedule is None for table in declaration.tables for schedule in table.schedules)
        self._constant = self._at(0) if is_constant else None

    def at(self, step: int) -> LearningRates:
        """Those of the global step `step`."""
        return self._at(step) if self._constant is None else self._constant

    def _at(self, step: int) -> LearningRates:
        rates = {key: table.learning_rates(step) for key, table in self._distinct.items()}
        return LearningRates.of([rates[key] for key in self._keys])


def _local_store(declaration: Declaration) -> LocalStore:
    return LocalStore(
        EmbeddingTable(table.config, admission=None if table.admission is None else AdmissionFilter(table.admission))
        for table in declaration.tables
    )
