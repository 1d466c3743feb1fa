"""`nn.Module`s over one `EmbeddingTable`: differentiable lookups whose backward runs the table's optimizer.

The rows live in the table, not in `parameters()`: a dense optimizer does not see them, and `backward()` updates them. The
update is made with the gradient as it arrives, so clip or scale the loss, not the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from monolith.table.embedding_table import EmbeddingTable, PoolingMode

__all__ = ["Embedding", "EmbeddingBag"]


class _Lookup(torch.autograd.Function):
    """`anchor` is an empty tensor that requires grad: without one autograd would not call backward for integer ids."""

    @staticmethod
    def forward(ctx: FunctionCtx, module: _TableModule, ids: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.ids = module, ids  # type: ignore[attr-defined]
        rows = module.table.lookup(ids)
        ctx.snapshot = rows if module.table.config.needs_snapshot else None  # type: ignore[attr-defined]
        # A copy, if there is a snapshot: whoever changes the answer must not change it.
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
        out: torch.Tensor = _Lookup.apply(self, ids, self._anchor())  # type: ignore[no-untyped-call]
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
        out: torch.Tensor = _PooledLookup.apply(self, ids, offsets, self._anchor())  # type: ignore[no-untyped-call]
        return out
