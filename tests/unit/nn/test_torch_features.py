"""Danger: a page for users of nn.Embedding that promises torch.compile, DDP or AMP, and rows that are not trained under them."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.models import DeepFM
from monolith.nn import Embedding, EmbeddingBag

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = {"user": torch.tensor([1, 2, 2**60]), "item": torch.tensor([3, 4, 4]), "label": torch.tensor([1.0, 0.0, 1.0])}


def model() -> DeepFM:
    torch.manual_seed(0)
    return DeepFM(ids=["user", "item"], dim=4, hidden=[8])


def train(trained: DeepFM, call: Callable[[dict[str, Tensor]], Tensor], steps: int = 3) -> list[float]:
    """Losses of a loop in plain PyTorch."""
    adam = torch.optim.Adam(trained.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = binary_cross_entropy_with_logits(call(BATCH).float(), BATCH["label"])
        adam.zero_grad()
        loss.backward()
        adam.step()
        trained.embeddings.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def plain() -> list[float]:
    eager = model()
    return train(eager, eager)


# torch's own: its compiler looks at .grad of what a lookup returned.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_trains_rows_and_dense_part_as_an_eager_one(plain: list[float]) -> None:
    trained = model()
    compiled = torch.compile(trained, backend="aot_eager")  # no C++ compiler needed
    assert train(trained, compiled) == pytest.approx(plain, rel=1e-5)
    assert train(model(), compiled, steps=1) != plain, "the compiled model is the one that was trained"


def test_modules_of_one_table_are_compiled_too() -> None:
    table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=2),)))
    ids, offsets = torch.tensor([5, 6, 6]), torch.tensor([0, 1, 3])
    for module, arguments in ((Embedding(table), (ids,)), (EmbeddingBag(table), (ids, offsets))):
        compiled = torch.compile(
            nn.Sequential(module, nn.Tanh()) if len(arguments) == 1 else module, backend="aot_eager"
        )
        before = module(*arguments).detach()
        compiled(*arguments).sum().backward()
        assert not torch.equal(module(*arguments), before), "the rows have made a step"


def test_the_compiler_is_not_loaded_with_the_package() -> None:
    script = "import sys, monolith.nn, monolith.models; assert 'torch._dynamo' not in sys.modules, 'loaded'"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_autocast_leaves_rows_in_float32(plain: list[float]) -> None:
    trained = model()

    def call(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert trained.embeddings(batch)["ids"].dtype == torch.float32
            return trained(batch)

    losses = train(trained, call)
    assert losses == pytest.approx(plain, rel=0.03)
    assert losses != plain, "some of it was computed in bfloat16"


def test_ddp_in_one_process_is_the_loop_without_it(plain: list[float], tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trained = model()
        wrapped = nn.parallel.DistributedDataParallel(trained)
        assert train(trained, wrapped) == plain
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_dict_without_rows_fits_a_model_whose_rows_come_from_elsewhere(plain: list[float]) -> None:
    trained, other = model(), model()
    train(trained, trained)
    with pytest.warns(UserWarning, match="the dense parameters alone"):
        dense = trained.state_dict()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other(BATCH), trained(BATCH))
    other.load_state_dict(dense)
    for name, table in other.embeddings.store.tables.items():
        table.take_over(copy.deepcopy(trained).embeddings.store.tables[name])
    torch.testing.assert_close(other(BATCH), trained(BATCH), rtol=0, atol=0)


def test_a_model_cast_to_bfloat16_is_refused_by_torch_and_rows_are_no_parameters() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        model().bfloat16()(BATCH)
    assert [name for name, _ in model().named_parameters() if "embeddings" in name] == []
