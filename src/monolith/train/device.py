"""Where the dense part of a model computes: which device that is, and what of a batch goes there.

Tables stay in main memory on any device. So the columns of ids stay there too, the vectors of their rows are copied to the
device, and the gradients of the vectors are copied back.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Ragged
from monolith.features.batch import Batch, BatchColumn, num_rows
from monolith.nn import embedding_collections

__all__ = ["BatchPlacement", "device_of", "find_device", "move_model", "probe_backend", "require_same_parameters"]

_BACKENDS = {"tpu": "torch_tpu"}
_PROBE_SECS = 120.0


def find_device(name: str) -> torch.device:
    """Return the device that `name` means: "auto" is the accelerator that torch has found, or "cpu" if there is none.

    "tpu" loads the package torch_tpu, after a process of its own has shown that it can be loaded here. No other name loads a
    package.

    Raises:
        ConfigError: there is no such device on this machine.

    Example:
        >>> find_device("cpu"), find_device("auto")
        (device(type='cpu'), device(type='cpu'))
        >>> find_device("tpus")
        Traceback (most recent call last):
        monolith.errors.ConfigError: RunConfig.device: torch knows no device 'tpus'; expected auto, cpu, cuda, cuda:1, tpu
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = _BACKENDS.get(name.partition(":")[0])
    if backend is not None and backend not in sys.modules:
        problem = probe_backend(backend)
        if problem is not None:
            raise ConfigError(f"RunConfig.device: {name!r} needs the package {backend}: {problem}")
        import_module(backend)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"RunConfig.device: torch knows no device {name!r}; expected auto, cpu, cuda, cuda:1, tpu"
        ) from None
    _require_available(device)
    return device


def _require_available(device: torch.device) -> None:
    if device.type in ("cpu", "meta"):
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None or found.type != device.type else torch.accelerator.device_count()
    if (device.index or 0) >= count:
        there = "no accelerator" if found is None else f"{torch.accelerator.device_count()} of type {found.type!r}"
        raise ConfigError(
            f"RunConfig.device: {str(device)!r} is not on this machine, where torch finds {there}; with device='auto' a run "
            "takes what there is"
        )


def probe_backend(package: str, *, timeout: float = _PROBE_SECS) -> str | None:
    """Import `package` in a process of its own. Returns None if that works, otherwise what is wrong.

    A backend of torch may abort the process that imports it, as torch_tpu does without its driver.

    Example:
        >>> probe_backend("no_such_backend")
        'it is not installed'
    """
    if find_spec(package) is None:
        return "it is not installed"
    command = [sys.executable, "-c", f"import torch, {package}"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {timeout:g} seconds"
    if ended.returncode == 0:
        return None
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
    lines = ended.stderr.strip().splitlines()
    return f"importing it ends the process with {how}{': ' + lines[-1] if lines else ''}"


def device_of(model: nn.Module) -> torch.device:
    """Return where the dense parameters are, or the buffers if there are none, by the first of them.

    Example:
        >>> device_of(nn.Linear(1, 1, device="meta"))
        device(type='meta')
    """
    first: Tensor | None = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def move_model(model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None) -> None:
    """Move the dense part of `model` to `device`.

    Raises:
        InvalidArgumentError: torch has made new parameters there, and `optimizer` has the old ones.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> move_model(model, torch.device("cpu"), torch.optim.SGD(model.parameters()))
    """
    if device_of(model) == device:
        return
    model.to(device)
    if optimizer is not None:
        require_same_parameters(model, optimizer)


def require_same_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if `optimizer` has none of the parameters of `model`. It would train nothing.

    Example:
        >>> require_same_parameters(  # doctest: +ELLIPSIS
        ...     nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters())
        ... )
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: optimizer: it has none of the model's parameters, which are on cpu; ...
    """
    known = {id(parameter) for parameter in model.parameters()}
    if known and not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidArgumentError(
            f"optimizer: it has none of the model's parameters, which are on {device_of(model)}; on some devices "
            "model.to(device) makes new parameters, so move the model first and then make the optimizer"
        )


class BatchPlacement:
    """Copies to `device` what a model reads of a batch, and pads it to `static_rows` rows.

    The columns that the model's `EmbeddingBagCollection`s read stay in main memory, and so do those that the model names in an
    attribute `host_columns`, because it makes ids of them. A row of padding has no ids and zeros in
    all other columns, and `real` removes what the model makes of it. So no padding is trained on, and no table gets a row for
    it. Layers that mix the rows of a batch, such as `BatchNorm`, do see the padding.

    Example:
        >>> placement = BatchPlacement(nn.Linear(1, 1), torch.device("cpu"), static_rows=3)
        >>> batch = placement({"x": torch.ones(2, 1)})
        >>> batch["x"].tolist()
        [[1.0], [1.0], [0.0]]
    """

    def __init__(self, model: nn.Module, device: torch.device, *, static_rows: int | None = None) -> None:
        self.device, self.static_rows = device, static_rows
        features = [feature for collection in embedding_collections(model) for feature in collection.features]
        self.host_columns = frozenset([*(feature.name for feature in features), *getattr(model, "host_columns", ())])
        """Columns that stay in main memory."""
        unpooled = [feature.name for feature in features if feature.pooling == "none"]
        if static_rows is not None and unpooled:
            raise ConfigError(
                f"RunConfig.static_rows: feature {unpooled[0]!r} has pooling 'none', whose output has another shape in every "
                "batch; use 'first_n' or 'last_n'"
            )

    @classmethod
    def needed(cls, model: nn.Module, device: torch.device, static_rows: int | None) -> BatchPlacement | None:
        """Return a placement, or None where batches can be used as they are."""
        if device.type == "cpu" and static_rows is None:
            return None
        return cls(model, device, static_rows=static_rows)

    def __call__(self, batch: Batch) -> Batch:
        """Return `batch` as the model reads it."""
        rows = num_rows(batch)
        missing = 0 if self.static_rows is None else self.static_rows - rows
        if missing < 0:
            raise InvalidArgumentError(
                f"batch: it has {rows} rows, RunConfig.static_rows is {self.static_rows}; make the batches of the source at "
                "most that large"
            )
        return {name: self._column(name, column, missing) for name, column in batch.items()}

    def real(self, batch: Batch, placed: Batch, logits: dict[str, Tensor]) -> tuple[Batch, dict[str, Tensor]]:
        """Return what a loss reads without the padding: the columns of `placed`, made of `batch`, and the model's logits."""
        rows = num_rows(batch)
        if self.static_rows is None or rows == self.static_rows:
            return placed, logits
        kept = {
            name: batch[name] if name in self.host_columns or not isinstance(column, Tensor) else column[:rows]
            for name, column in placed.items()
        }
        return kept, {name: tensor[:rows] for name, tensor in logits.items()}

    def _column(self, name: str, column: BatchColumn, missing: int) -> BatchColumn:
        if name in self.host_columns:
            return _with_empty_rows(column, missing) if missing else column
        if isinstance(column, Ragged):
            if self.static_rows is not None:
                raise InvalidArgumentError(
                    f"batch[{name!r}]: rows of different lengths have no static shape, and no feature of the model is called "
                    "so; make it a tensor of a fixed width, or leave RunConfig.static_rows unset"
                )
            return Ragged(column.values.to(self.device, non_blocking=True), column.offsets)
        if not isinstance(cast("object", column), Tensor):
            return column  # texts or the like, which no model reads
        if missing:
            column = torch.cat([column, column.new_zeros(missing, *column.shape[1:])])
        return column.to(self.device, non_blocking=True)


def _with_empty_rows(column: BatchColumn, count: int) -> Ragged:
    if isinstance(column, Ragged):
        return Ragged(column.values, _extended(column.offsets, count))
    rows, width = len(column), 1 if column.ndim == 1 else column.shape[1]
    return Ragged(column.reshape(-1), _extended(torch.arange(rows + 1) * width, count))


def _extended(offsets: Tensor, count: int) -> Tensor:
    return torch.cat([offsets, offsets[-1:].expand(count)])
