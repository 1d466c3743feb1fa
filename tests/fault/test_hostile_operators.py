"""Danger: an allowed operator that trusts its arguments, so that a forged export reads or writes outside of a tensor.

Every allowed operator is called with valid arguments of torch's own tests, then with damaged ones: other shapes, dtypes, strides
and numbers, indices out of range. Each may compute or refuse; none may end the process, hang, or raise anything but our error.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import types
import unittest
import warnings
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monolith.errors import InvalidArgumentError
from monolith.serve.bound import OPERATOR_ERRORS, Ref
from monolith.serve.costs import tensors_in
from monolith.serve.operators import ALLOWED, fast_form
from monolith.serve.program import Budget, _Step

Calls = dict[str, list[tuple[list[Any], dict[str, Any]]]]
X, W = torch.randn(5, 7), torch.randn(7)
INTS, MASK = torch.arange(20).reshape(4, 5), torch.rand(4, 5) > 0.5
SEQUENCE, STATE = torch.randn(6, 3, 4), torch.randn(1, 3, 5)


def recurrent(gates: int) -> list[torch.Tensor]:
    sizes = [(gates * 5, 4), (gates * 5, 5), (gates * 5,), (gates * 5,)]
    return [torch.randn(size) for size in sizes]


def cell(gates: int) -> list[torch.Tensor]:
    return [torch.randn(gates * 5, 4), torch.randn(gates * 5, 5), torch.randn(gates * 5), torch.randn(gates * 5)]


OPTIONS = (True, 1, 0.0, False, False, False)
# Of what torch's own tests do not call by this name.
BY_HAND: dict[str, tuple[Any, ...]] = {
    "_native_batch_norm_legit.no_stats": (X, W, W, True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training.default": (X, W, W, W, W.abs(), 0.1, 1e-5),
    "_weight_norm.default": (X, torch.randn(5, 1), 0),
    "_to_copy.default": (X,),
    "_softmax.default": (X, 1, False),
    "_log_softmax.default": (X, 1, False),
    "_unsafe_view.default": (X, [7, 5]),
    "_reshape_copy.default": (X, [7, 5]),
    "bucketize.Scalar": (3.0, W.sort()[0]),
    "conv2d.padding": (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), None, [1, 1], "same"),
    "copy.default": (X, X),
    "fill.Tensor": (X, torch.tensor(1.0)),
    "gru.input": (SEQUENCE, STATE, recurrent(3), *OPTIONS),
    "lstm.input": (SEQUENCE, [STATE, STATE], recurrent(4), *OPTIONS),
    "rnn_tanh.input": (SEQUENCE, STATE, recurrent(1), *OPTIONS),
    "rnn_relu.input": (SEQUENCE, STATE, recurrent(1), *OPTIONS),
    "gru_cell.default": (SEQUENCE[0], STATE[0], *cell(3)),
    "lstm_cell.default": (SEQUENCE[0], [STATE[0], STATE[0]], *cell(4)),
    "rnn_tanh_cell.default": (SEQUENCE[0], STATE[0], *cell(1)),
    "rnn_relu_cell.default": (SEQUENCE[0], STATE[0], *cell(1)),
    "isin.Tensor_Scalar": (INTS, 3),
    "meshgrid.default": ([W, W],),
    "moveaxis.int": (X, 0, 1),
    "movedim.int": (X, 0, 1),
    "norm.Scalar": (X, 2),
    "norm.ScalarOpt_dim": (X, 2, [1]),
    "pow.Scalar": (2, X),
    "quantile.default": (X, 0.5),
    "reflection_pad1d.default": (SEQUENCE, [1, 1]),
    "reflection_pad2d.default": (SEQUENCE, [1, 1, 1, 1]),
    "replication_pad1d.default": (SEQUENCE, [1, 1]),
    "replication_pad2d.default": (SEQUENCE, [1, 1, 1, 1]),
    "repeat_interleave.Tensor": (torch.tensor([1, 2, 0]),),
    "scatter.value": (X, 1, torch.zeros(5, 1, dtype=torch.int64), 1.0),
    "searchsorted.Scalar": (W.sort()[0], 0.5),
    "where.Scalar": (MASK, 1, 2),
    "where.ScalarOther": (MASK, INTS, 2),
    "where.ScalarSelf": (MASK, 2, INTS),
    "xlogy.Scalar_Self": (2, X),
    "remainder.Scalar_Tensor": (2, X),
    "swapaxes.default": (X, 0, 1),
    "swapdims.default": (X, 0, 1),
    "sym_size.int": (X, 0),
    "type_as.default": (X, INTS),
}


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        found = self._calls[str(function)]
        if len(found) < 12:
            found.append((list(args), dict(kwargs or {})))
        return function(*args, **(kwargs or {}))


def record() -> Calls:
    calls: Calls = defaultdict(list)
    if "expecttest" not in sys.modules:
        # A package that torch's tests of its own need, and that is not needed to read their examples.
        stub = types.ModuleType("expecttest")
        stub.__dict__.update(TestCase=unittest.TestCase, assert_expected_inline=None)
        sys.modules["expecttest"] = stub
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    for operator in methods.op_db:
        for dtype in {torch.float32, torch.int64, torch.bool} & operator.supported_dtypes("cpu"):
            try:
                for _, sample in zip(range(8), operator.sample_inputs("cpu", dtype), strict=False):
                    # Outside of inference mode, an operator that consists of others would not be seen itself.
                    with torch.inference_mode(), _Recorder(calls):
                        operator(sample.input, *sample.args, **sample.kwargs)
            except Exception:
                continue
    for name, arguments in BY_HAND.items():
        calls[f"aten.{name}"].append((list(arguments), {}))
    for name in ALLOWED - calls.keys():
        # Operators of one tensor, or of a tensor and a tensor or number.
        scalar = any(word in name for word in ("Scalar", "default"))
        calls[name] += [
            ([X.clone(), 2 if scalar else X.clone()], {}),
            ([X.clone()], {}),
            ([[X, X]], {}),
            ([INTS, 2], {}),
        ]
    return calls


NUMBERS = (-1, 0, 1, 2, 3, 5, 100, -100, -2, 2**31, -(2**31), 65537, 2**40)
INDICES = (-1, 7, 10**6, -(10**9), 2**62, -(2**62))
FLOATS = (0.0, -1.0, 1e30, float("nan"), float("inf"))
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.float16, torch.uint8)


def damaged_tensor(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    kind = chance.randrange(7)
    if kind <= 1:
        shape = list(tensor.shape) or [2]
        place = chance.randrange(len(shape))
        size = shape[place]
        shape[place] = chance.choice([0, 1, 2, size + 1, max(0, size - 1), 3 * size + 7, 1000])
        return torch.randn(shape).mul(3).to(tensor.dtype) if torch.Size(shape).numel() < 10**6 else tensor
    if kind == 2 and tensor.numel():
        changed = tensor.clone().contiguous()
        value = chance.choice(INDICES) if tensor.dtype == torch.int64 else chance.choice([1, 100])
        changed.view(-1)[chance.randrange(tensor.numel())] = value
        return changed
    if kind == 3:
        return tensor.to(chance.choice(DTYPES))
    if kind == 4:
        return chance.choice([tensor.reshape(-1), tensor.unsqueeze(0)])
    if kind == 5 and tensor.ndim >= 2:
        return tensor.transpose(0, -1)
    return tensor[:1].expand(5, *tensor.shape[1:]) if tensor.ndim and tensor.shape[0] else tensor


def damaged(value: Any, chance: random.Random) -> Any:  # noqa: ANN401 - arguments of operators
    if isinstance(value, list | tuple):
        items = [damaged(item, chance) for item in value]
        if items and chance.random() < 0.1:
            items.pop(chance.randrange(len(items)))
        if items and chance.random() < 0.1:
            items.append(chance.choice(items))
        return items
    if isinstance(value, dict):
        return {key: damaged(item, chance) for key, item in value.items()}
    if chance.random() > 0.4:
        return value
    if isinstance(value, torch.Tensor):
        return damaged_tensor(value, chance)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(NUMBERS)
    return chance.choice(FLOATS) if isinstance(value, float) else value


def referred(value: Any, values: dict[str, Any]) -> Any:  # noqa: ANN401 - arguments of operators
    """Put the tensors of arguments into `values`, and references to them into their places."""
    if isinstance(value, torch.Tensor):
        name = f"tensor {len(values)}"
        values[name] = value
        return Ref(name)
    if isinstance(value, list | tuple):  # a program has lists only
        return [referred(item, values) for item in value]
    return {key: referred(item, values) for key, item in value.items()} if isinstance(value, dict) else value


def attack(name: str, calls: list[tuple[list[Any], dict[str, Any]]], times: int, seed: int) -> None:
    chance = random.Random(f"{name} {seed}")
    step = _Step({"name": "step", "operator": name, "args": [], "kwargs": {}}, set())
    for number in range(times + 1):
        args, kwargs = chance.choice(calls)
        if number:  # the first is as torch's own tests have it
            args, kwargs = damaged(args, chance), damaged(kwargs, chance)
        tensors = list(tensors_in([args, list(kwargs.values())]))
        values: dict[str, Any] = {}
        try:
            step.connect(referred(args, values), referred(kwargs, values))
            step.run(values, Budget(sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)))
        except (InvalidArgumentError, ValueError):
            continue
        # What was accepted once is called in its quick form from then on.
        with suppress(*OPERATOR_ERRORS):
            fast_form(name)(*args, **kwargs)


def in_a_process(name: str, calls: list[tuple[list[Any], dict[str, Any]]], times: int, seed: int) -> int:
    """The exit code of a process that attacks an operator; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(120)
            attack(name, calls, times, seed)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_no_operator_can_be_made_to_leave_its_tensors() -> None:
    seed = int(os.environ.get("MONOLITH_TEST_SEED", random.SystemRandom().randrange(10**6)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no others
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = record()
            failed = {name: code for name in sorted(ALLOWED) if (code := in_a_process(name, calls[name], 200, seed))}
    finally:
        torch.set_num_threads(threads)
    assert not failed, f"seed {seed}"
