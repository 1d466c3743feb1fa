"""Dense optimizers: Adamom, RMSprop and Shampoo, and the step that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from monolith.errors import InvalidArgumentError

__all__ = [
    "Adamom",
    "DenseGradientOptimizer",
    "RMSprop",
    "Shampoo",
    "apply_sparse_precond",
    "eigen_inverse_root",
    "require",
]

_CHUNK_NUMBERS = 1 << 15

_Tensors = list[Tensor] | tuple[Tensor, ...]


class DenseGradientOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for parameters with dense gradients. Parameters without a gradient do not change.

    Works with parameter groups, learning-rate schedulers, `state_dict` and closures as every torch optimizer does.
    """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters. `closure`, if given, first computes the gradients and the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All groups are checked before any is changed.
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, parameters in work:
            self._refuse_sparse(parameters)
        for group, parameters in work:
            for chunk in _chunks(parameters):
                self._update(chunk, [p.grad for p in chunk if p.grad is not None], group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], gradients: _Tensors, group: dict[str, Any]) -> None:
        """Update the parameters of a group in place, without changing `gradients`."""

    def _slots(self, parameters: list[Tensor], *names: str) -> list[list[Tensor]]:
        """Return for each name the state tensors of all parameters, initially zeros."""
        for parameter in parameters:
            state = self.state[parameter]
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [[self.state[parameter][name] for parameter in parameters] for name in names]

    def _refuse_sparse(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise InvalidArgumentError(
                    f"{type(self).__name__}: expected dense gradients, got one of layout {parameter.grad.layout} for a "
                    f"parameter of shape {list(parameter.shape)}; build the embedding with sparse=False, or keep its rows in "
                    "a monolith.EmbeddingTable, which has sparse optimizers of its own"
                )


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split into lists to be updated by one call per operation.

    On a CPU, lists save the calls of many small tensors, but over large ones every operation would go through all memory
    again, where one tensor at a time stays in the cache (benchmarks/dense_optimizers.py). A GPU takes them all at once.
    """
    chunk: list[Tensor] = []
    size = 0
    for parameter in parameters:
        numbers = parameter.numel() if parameter.device.type == "cpu" else 0
        if chunk and size + numbers > _CHUNK_NUMBERS:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += numbers
    if chunk:
        yield chunk


def require(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a hyperparameter outside [low, high]."""
    if not low <= value <= high:
        bounds = f"a number >= {low:g}" if high == float("inf") else f"a number in [{low:g}, {high:g}]"
        raise InvalidArgumentError(f"{name}: expected {bounds}, got {value}")


class Adamom(DenseGradientOptimizer):
    """Momentum over the root of a decaying average of squared gradients, which needs no bias correction.

    With g the gradient after coupled weight decay, g + weight_decay * w:

        m = mom_decay * m + (1 - mom_decay) * g
        v = ada_decay * v + g²
        c = ada_decay * c + 1
        w = w - lr * m / sqrt(v / c + epsilon)

    State per parameter, each of its shape: `m`, `v`, `c`. The rule for rows of a table is `monolith.table.Adamom`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.1]))
        >>> optimizer = Adamom([weight], lr=0.1, ada_decay=0.99, mom_decay=0.9, weight_decay=0.01)
        >>> (0.12 * weight).sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.09
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-6,
        ada_decay: float = 0.9999,
        mom_decay: float = 0.99,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        require("lr", lr, 0)
        require("ada_decay", ada_decay, 0, 1)
        require("mom_decay", mom_decay, 0, 1)
        require("epsilon", epsilon, 0)
        require("weight_decay", weight_decay, 0)
        defaults = {
            "lr": lr,
            "ada_decay": ada_decay,
            "mom_decay": mom_decay,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def _update(self, parameters: list[Tensor], gradients: _Tensors, group: dict[str, Any]) -> None:
        m, v, c = self._slots(parameters, "m", "v", "c")
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_lerp_(m, gradients, 1 - group["mom_decay"])
        torch._foreach_mul_(v, group["ada_decay"])
        torch._foreach_addcmul_(v, gradients, gradients)
        torch._foreach_mul_(c, group["ada_decay"])
        torch._foreach_add_(c, 1)
        scale = torch._foreach_div(v, c)
        torch._foreach_add_(scale, group["epsilon"])
        torch._foreach_sqrt_(scale)
        torch._foreach_addcdiv_(parameters, m, scale, value=-group["lr"])


class RMSprop(DenseGradientOptimizer):
    """RMSprop whose momentum holds steps, learning rate included: a new rate acts on new gradients only.

    With g the gradient after coupled weight decay, g + weight_decay * w:

        v = beta2 * v + (1 - beta2) * g²                  with use_v2: v = beta2 * v + g²
        m = beta1 * m + lr * g / sqrt(v + epsilon)        with use_v2: m = beta1 * m + lr * g / (sqrt(v) + epsilon)
        w = w - m

    State per parameter, each of its shape: `m`, `v`. The rules for rows of a table are `monolith.table.RMSprop` and
    `RMSpropV2`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.1]))
        >>> optimizer = RMSprop([weight], lr=0.1, beta1=0.9, beta2=0.9, epsilon=0.1, weight_decay=1.0, use_v2=True)
        >>> (0.12 * weight).sum().backward()
        >>> optimizer.step()
        >>> round(weight.item(), 6)
        0.03125
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-6,
        beta1: float = 0.99,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        use_v2: bool = False,
    ) -> None:
        require("lr", lr, 0)
        require("beta1", beta1, 0, 1)
        require("beta2", beta2, 0, 1)
        require("epsilon", epsilon, 0)
        require("weight_decay", weight_decay, 0)
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
            "weight_decay": weight_decay,
            "use_v2": use_v2,
        }
        super().__init__(params, defaults)

    def _update(self, parameters: list[Tensor], gradients: _Tensors, group: dict[str, Any]) -> None:
        m, v = self._slots(parameters, "m", "v")
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_mul_(v, group["beta2"])
        if group["use_v2"]:
            torch._foreach_addcmul_(v, gradients, gradients)
            scale = torch._foreach_sqrt(v)
            torch._foreach_add_(scale, group["epsilon"])
        else:
            torch._foreach_addcmul_(v, gradients, gradients, value=1 - group["beta2"])
            scale = torch._foreach_add(v, group["epsilon"])
            torch._foreach_sqrt_(scale)
        torch._foreach_mul_(m, group["beta1"])
        torch._foreach_addcdiv_(m, gradients, scale, value=group["lr"])
        torch._foreach_sub_(parameters, m)


def eigen_inverse_root(
    mat: Tensor, p: int, head: int, tail: int, damping: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """Approximate mat ** (-1 / p) of a symmetric matrix [n, n] by some eigenvectors and a multiple of the identity.

    Eigenvalues are raised to at least `damping`. The `head` smallest of those above `damping` and the `tail` largest are kept,
    or all n if head + tail >= n. Returns vectors [n, k], values [k] and an offset [], so that mat ** (-1 / p) ≈ vectors @
    diag(values) @ vectors.T + offset * I, the offset being the mean of the roots left out.

    Example:
        >>> vectors, values, offset = eigen_inverse_root(torch.diag(torch.tensor([4.0, 16.0])), p=2, head=1, tail=1)
        >>> root = vectors @ values.diag() @ vectors.T + offset * torch.eye(2)
        >>> [round(x, 4) for x in root.diag().tolist()]
        [0.5, 0.25]
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(mat)
    roots = eigenvalues.clamp(min=damping) ** (-1.0 / p)
    n = len(mat)
    if head + tail >= n:
        return eigenvectors, roots, roots.new_zeros(())
    tiny = int((eigenvalues <= damping).sum())
    start = min(tiny if tiny < n else 0, n - head - tail)
    left_out = roots[start + head : n - tail]
    offset = left_out.mean() if len(left_out) else roots.new_zeros(())
    values = torch.cat([roots[start : start + head], roots[n - tail :]])
    vectors = torch.cat([eigenvectors[:, start : start + head], eigenvectors[:, n - tail :]], dim=1)
    return vectors, values - offset, offset


def apply_sparse_precond(tensor: Tensor, pvec: Tensor, pval: Tensor, offset: Tensor) -> Tensor:
    """Multiply axis 0 of `tensor` [n, ...] by pvec @ diag(pval) @ pvec.T + offset * I and move it to the end: [..., n].

    After one call per axis, all axes are multiplied and in their original order.

    Example:
        >>> apply_sparse_precond(torch.ones(2, 3), torch.eye(2), torch.tensor([1.0, 2.0]), torch.tensor(1.0)).tolist()
        [[2.0, 3.0], [2.0, 3.0], [2.0, 3.0]]
    """
    projected: Tensor = torch.tensordot(tensor, pvec, dims=([0], [0])) * pval
    multiplied: Tensor = torch.tensordot(projected, pvec, dims=([-1], [-1]))
    return multiplied + tensor.movedim(0, -1) * offset


class Shampoo(DenseGradientOptimizer):
    """Shampoo with AdaGrad step sizes and an AdaGrad start.

    Along each axis i of a parameter of rank r, with step counting from 0:

        G_i = gradient contracted with itself over all other axes, computed again every tau_2 steps S_i = S_i + G_i, or beta_2 *
        S_i + (1 - beta_2) * G_i if beta_2 < 1, every step P_i = S_i ** (-1 / 2r) by `eigen_inverse_root`, every tau_1 steps
        once step > warmup

    The direction is the momentum `pm` of the gradient multiplied by all P_i, rescaled to the norm of `m`, the momentum of
    AdaGrad's direction g / sqrt(d) with d = Σ g². Both momenta decay by beta_1. Up to `warmup` steps the step is lr * m. Over
    as many steps again it changes linearly to the preconditioned one.

    Memory is two n x n matrices for every axis of length n, so this is for parameters of moderate size.
    State per parameter: `step`, `d`, `m`, `pm`, and for every axis `s0`, `g0`, `pvec0`, `pval0`, `o0`, and so on.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer = Shampoo([weight], lr=0.1, beta_1=0.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> round(weight[0, 0].item(), 4)
        0.9
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.03,
        beta_1: float = 0.9,
        beta_2: float = 1.0,
        warmup: int = 5000,
        tau_1: int = 200,
        tau_2: int = 20,
        eigen_head: int = 100,
        eigen_tail: int = 100,
        damping_epsilon: float = 1e-3,
    ) -> None:
        require("lr", lr, 0)
        require("beta_1", beta_1, 0, 1)
        require("beta_2", beta_2, 0, 1)
        require("warmup", warmup, 0)
        require("tau_1", tau_1, 1)
        require("tau_2", tau_2, 1)
        require("eigen_head", eigen_head, 0)
        require("eigen_tail", eigen_tail, 0)
        if not damping_epsilon > 0:
            raise InvalidArgumentError(f"damping_epsilon: expected a number > 0, got {damping_epsilon}")
        defaults = {
            "lr": lr,
            "beta_1": beta_1,
            "beta_2": beta_2,
            "warmup": warmup,
            "tau_1": tau_1,
            "tau_2": tau_2,
            "eigen_head": eigen_head,
            "eigen_tail": eigen_tail,
            "damping_epsilon": damping_epsilon,
        }
        super().__init__(params, defaults)

    def _update(self, parameters: list[Tensor], gradients: _Tensors, group: dict[str, Any]) -> None:
        self._slots(parameters, "d", "m", "pm")
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
                state.update(_axis_slots(parameter, group["eigen_head"] + group["eigen_tail"]))
            step = int(state["step"])
            # A scalar is a vector of one.
            preconditioned = _precondition(gradient.reshape(gradient.shape or (1,)), state, step, group)
            state["d"].addcmul_(gradient, gradient)
            state["m"].lerp_(gradient * (state["d"] + 1e-30).rsqrt(), 1 - group["beta_1"])
            state["pm"].lerp_(preconditioned.reshape(gradient.shape), 1 - group["beta_1"])
            blend = _blend(step, group["warmup"])
            parameter.sub_(state["m"], alpha=group["lr"] * (1 - blend))
            if blend:
                rescaled = state["pm"] * (state["m"].norm() / (state["pm"].norm() + 1e-10))
                parameter.sub_(rescaled, alpha=group["lr"] * blend)
            state["step"] += 1


def _axis_slots(parameter: Tensor, eigenpairs: int) -> dict[str, Tensor]:
    slots: dict[str, Tensor] = {}
    for axis, n in enumerate(parameter.shape or (1,)):
        k = min(n, eigenpairs)
        shapes = {"s": (n, n), "g": (n, n), "pvec": (n, k), "pval": (k,), "o": ()}
        slots |= {f"{name}{axis}": parameter.new_zeros(shape) for name, shape in shapes.items()}
    return slots


def _precondition(gradient: Tensor, state: dict[str, Any], step: int, group: dict[str, Any]) -> Tensor:
    """Add the gradient to the statistics. Returns it multiplied along every axis, zeros before the first preconditioner."""
    rank = gradient.ndim
    # Also on the first step after the warm-up: until then there is no preconditioner to use.
    renew = step > group["warmup"] and (step % group["tau_1"] == 0 or step == group["warmup"] + 1)
    result = gradient
    for axis in range(rank):
        s, g, pvec, pval, offset = (state[f"{name}{axis}"] for name in ("s", "g", "pvec", "pval", "o"))
        if step % group["tau_2"] == 0:
            others = [other for other in range(rank) if other != axis]
            g.copy_(torch.tensordot(gradient, gradient, dims=(others, others)))
        if group["beta_2"] < 1 - 1e-10:
            s.lerp_(g, 1 - group["beta_2"])
        else:
            s.add_(g)
        if renew:
            # LAPACK has no half precision.
            statistics = s.to(torch.promote_types(s.dtype, torch.float32))
            parts = eigen_inverse_root(
                statistics, 2 * rank, group["eigen_head"], group["eigen_tail"], group["damping_epsilon"]
            )
            pvec, pval, offset = (part.to(s.dtype) for part in parts)
            # Not copied into the existing slots: with another eigen_head than in the checkpoint their shape differs.
            state |= {f"pvec{axis}": pvec, f"pval{axis}": pval, f"o{axis}": offset}
        result = apply_sparse_precond(result, pvec, pval, offset)
    return result


def _blend(step: int, warmup: int) -> float:
    """Return the share of the preconditioned step: 0 up to `warmup`, 1 from twice that."""
    if step <= warmup:
        return 0.0
    return min(1.0, step / warmup - 1) if warmup else 1.0
