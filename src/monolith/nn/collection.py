"""`EmbeddingBagCollection`: the embeddings of all features of a batch, trained by an explicit step, and modules of one
table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.features.declaration import Declaration, declare_tables
from monolith.features.feature import Feature
from monolith.nn.bags import BagPlan
from monolith.table.admission import AdmissionFilter
from monolith.table.bags import Gradient, LearningRates, PackedBags, PackedGradients, single_ids
from monolith.table.embedding_table import EmbeddingTable, PoolingMode
from monolith.table.store import LocalStore, Store

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "dense_state_dict", "embedding_collections"]

_rows_saved_otherwise: ContextVar[bool] = ContextVar("rows_saved_otherwise", default=False)

MAX_PENDING = 256
"""Backward passes that may wait for `step`: more than any accumulation of gradients, few enough to notice a forgotten call."""


@_disable_dynamo  # torch.compiler.disable would load the compiler with the package, which takes seconds
def _uncompiled(module: nn.Module, *arguments: object) -> Any:  # noqa: ANN401 - whatever forward returns
    """Call `forward` as it is where `torch.compile` would compile it: tables are not tensors."""
    return module.forward(*arguments)


class EmbeddingBagCollection(nn.Module):
    """Embeddings of every feature of a batch: dict of columns -> dict of tensors, by feature name.

    Shapes: a column is int64 [rows], [rows, n], or a `Ragged` of int64. NumPy arrays and lists are converted. A pooled feature
    gives float32 [rows, dim]. "first_n" and "last_n" give [rows, max_length, dim] and, as `<name>.mask`, bool [rows,
    max_length]. "none" gives a `Ragged` of [rows, (n), dim]. A bias comes as `<name>.bias`, with 1 in place of dim. Features
    with the same `stack` give one tensor [rows, features, dim] under that name. All are on the device that the module was moved
    to, or else on that of the batch. Ids are best left in main memory, where the rows are.

    The rows live in `store`, not in `parameters()`. `backward` only collects their gradients, and `step` applies them, so that
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
    """int64 []: the global step of the next `step()` without a number. It is saved with the dense parameters."""

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
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, batch)  # type: ignore[no-any-return]
        bags = self.plan.bags(batch)
        arrays: Sequence[torch.Tensor]
        if self.training and torch.is_grad_enabled():
            arrays = _Lookup.apply(self, bags.packed, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        else:
            arrays = self.plan.layout.pack(self.store.lookup(bags.packed))
        device = self.steps.device
        return self.plan.outputs(bags, arrays, None if device.type == "cpu" else device)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Return the gradients that `backward` has collected and `step` will apply, one per table and pass, at the pooled
        lookups."""
        return tuple(gradient for gradients in self._pending for gradient in gradients)

    def gradient_values(self) -> list[torch.Tensor]:
        """Return the values of `gradients`, float32 [bags, dim] each."""
        return [values for gradients in self._pending for values in gradients.values()]

    @property
    def num_passes(self) -> int:
        """Backward passes whose gradients wait to be applied."""
        return len(self._pending)

    def gradient_squares(self, *, since: int = 0) -> np.ndarray:
        """Return the sum of squares of the collected gradients by table, float64 [tables], from pass `since` on."""
        squares = (gradients.squares() for gradients in self._pending[since:])
        return sum(squares, start=np.zeros(len(self.plan.layout.tables)))

    def scale_tables(self, factors: Sequence[float]) -> None:
        """Multiply the collected gradients of each table by its factor, in the order of `gradient_squares`."""
        self._pending = [gradients.scaled(factors) for gradients in self._pending]

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the collected gradients by `factor`."""
        self._pending = [
            gradients.changed(lambda values: values * factor, by_table=False) for gradients in self._pending
        ]

    def change_gradients(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the collected gradients by `change` of them, float32 [bags, dim] each, one per table and pass.

        `change` must not modify its argument: autograd may share or expand these tensors.
        """
        self._pending = [gradients.changed(change, by_table=True) for gradients in self._pending]

    def discard_gradients(self) -> None:
        """Forget the collected gradients, as `zero_grad` does for dense ones."""
        self._pending, self._collected = [], 0

    def take_gradients(self, step: int) -> Sequence[Gradient]:
        """Remove and return the collected gradients, with the learning rates of global step `step`, and count the step. For
        callers that apply them to `store` themselves, elsewhere or later.
        """
        passes = self.take_passes(step)
        return passes[0] if len(passes) == 1 else [gradient for gradients in passes for gradient in gradients]

    def take_passes(self, step: int) -> list[PackedGradients]:
        """Do the same, and return the gradients of each backward pass by themselves."""
        rates = self._rates.at(step)
        passes = [gradients.with_rates(rates) for gradients in self._pending]
        self._pending, self._collected = [], 0
        self.steps.fill_(step + 1)
        return passes

    def step(self, step: int | None = None, *, event_time: int = 0) -> None:
        """Apply the collected gradients, one optimizer step per table and id, and forget them.

        `step` is the global step, which schedules and some optimizers read. None counts the calls. `event_time` is that of the
        batch, in seconds since 1970, and becomes the last-update time of the rows.
        """
        now = int(self.steps) if step is None else step
        self.store.apply(self.take_gradients(now), step=now, event_time=event_time)

    def use_store(self, store: Store) -> None:
        """Take rows from `store`, such as one on servers, from now on. It must have the tables of the features.

        Refused while gradients wait, or if rows in this process would be lost. Rows that are elsewhere stay there.
        """
        if self._pending:
            raise InvalidArgumentError(
                "use_store: gradients wait to be applied; call step() or discard_gradients() first"
            )
        rows = sum(map(len, self.store.tables.values()))
        if rows:
            raise InvalidArgumentError(
                f"use_store: the collection has {rows:,} rows in this process, which would be lost; choose its store "
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
        """Return the features and where their rows are, for `repr`."""
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
    """Return every collection inside a model, or inside several, each once.

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
    """Return the `state_dict` of `model`, for a caller that saves the rows of its tables by other means.

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
        # The core reads rows at any stride, as in a slice of the gradient of a concatenation, but without gaps inside.
        arrays = [grad if grad is None or grad.stride(1) == 1 else grad.contiguous() for grad in grads]
        ctx.collection._collect(PackedGradients(ctx.bags, arrays, snapshots=ctx.snapshots))  # type: ignore[attr-defined]
        return None, None, None


class _Rates:
    """The learning rates of all tables by step. A schedule that several tables share is evaluated once."""

    def __init__(self, declaration: Declaration) -> None:
        keys = [(*map(id, table.schedules), table.config.learning_rates) for table in declaration.tables]
        self._distinct = dict(zip(keys, declaration.tables, strict=True))
        self._keys = keys
        is_constant = all(schedule is None for table in declaration.tables for schedule in table.schedules)
        self._constant = self._at(0) if is_constant else None

    def at(self, step: int) -> LearningRates:
        """Return those of the global step `step`."""
        return self._at(step) if self._constant is None else self._constant

    def _at(self, step: int) -> LearningRates:
        rates = {key: table.learning_rates(step) for key, table in self._distinct.items()}
        return LearningRates.of([rates[key] for key in self._keys])


def _local_store(declaration: Declaration) -> LocalStore:
    return LocalStore(
        EmbeddingTable(table.config, admission=None if table.admission is None else AdmissionFilter(table.admission))
        for table in declaration.tables
    )


class _RowLookup(torch.autograd.Function):
    """`anchor` is an empty tensor that requires grad: without one autograd would not call backward for integer ids."""

    @staticmethod
    def forward(ctx: FunctionCtx, module: _TableModule, ids: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.ids = module, ids  # type: ignore[attr-defined]
        rows = module.table.lookup(ids)
        ctx.snapshot = rows if module.table.config.needs_snapshot else None  # type: ignore[attr-defined]
        # A copy, if there is a snapshot: a caller that changes the result must not change the snapshot.
        return rows.to(ids.device, copy=module.table.config.needs_snapshot)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[None, None, None]:
        module: _TableModule = ctx.module  # type: ignore[attr-defined]
        module.table.apply_gradients(
            ctx.ids,  # type: ignore[attr-defined]
            grad,
            learning_rates=module.learning_rates,
            step=module.step,
            event_time=module.event_time,
            snapshot=ctx.snapshot,  # type: ignore[attr-defined]
        )
        return None, None, None


class _PooledLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, module: EmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.module, ctx.ids, ctx.offsets = module, ids, offsets  # type: ignore[attr-defined]
        ctx.snapshot = module.table.lookup(ids) if module.table.config.needs_snapshot else None  # type: ignore[attr-defined]
        return module.table.lookup_pooled(ids, offsets, mode=module.mode).to(ids.device)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[None, None, None, None]:
        module: EmbeddingBag = ctx.module  # type: ignore[attr-defined]
        module.table.apply_pooled_gradients(
            ctx.ids,  # type: ignore[attr-defined]
            ctx.offsets,  # type: ignore[attr-defined]
            grad,
            mode=module.mode,
            learning_rates=module.learning_rates,
            step=module.step,
            event_time=module.event_time,
            snapshot=ctx.snapshot,  # type: ignore[attr-defined]
        )
        return None, None, None, None


class _TableModule(nn.Module):
    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        self.table = table
        self.learning_rates: Sequence[float] | None = None
        """One per segment, for the next backward. None takes the table's own."""
        self.step = 0
        """The global step passed to the optimizer."""
        self.event_time = 0
        """Event time of the next backward, seconds since 1970."""

    def _anchor(self) -> torch.Tensor:
        return torch.empty(0, requires_grad=self.training and torch.is_grad_enabled())

    def extra_repr(self) -> str:
        return f"{self.table!r}"


class Embedding(_TableModule):
    """One vector per id: ids int64 [*] -> float32 [*, dim]. `backward` steps the rows of `ids`, but not in eval mode.

    Example:
        >>> import torch
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import SGD, Zeros
        >>> from monolith.nn import Embedding
        >>> segment = Segment(dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
        >>> embedding = Embedding(EmbeddingTable(TableConfig(name="user", segments=(segment,))))
        >>> embedding(torch.tensor([3, 3])).sum().backward()
        >>> embedding(torch.tensor([3])).tolist()
        [[-2.0, -2.0]]
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up `ids`."""
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, ids)  # type: ignore[no-any-return]
        out: torch.Tensor = _RowLookup.apply(self, ids, self._anchor())  # type: ignore[no-untyped-call]
        return out


class EmbeddingBag(_TableModule):
    """One pooled vector per bag: ids int64 [n], offsets int64 [bags + 1] -> float32 [bags, dim].

    Lookup and pooling are one pass, and so are the backward, the summing of duplicates and the optimizer step.

    Example:
        >>> import torch
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import Ones
        >>> from monolith.nn import EmbeddingBag
        >>> segment = Segment(dim=2, initializer=Ones())
        >>> bag = EmbeddingBag(EmbeddingTable(TableConfig(name="tags", segments=(segment,))), mode="mean")
        >>> bag(torch.tensor([1, 2, 3]), torch.tensor([0, 3, 3])).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, table: EmbeddingTable, *, mode: PoolingMode = "sum") -> None:
        super().__init__(table)
        self.mode = mode

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Pool `ids` by bag."""
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, ids, offsets)  # type: ignore[no-any-return]
        out: torch.Tensor = _PooledLookup.apply(self, ids, offsets, self._anchor())  # type: ignore[no-untyped-call]
        return out
