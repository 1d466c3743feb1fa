"""Danger: layers that are right one by one and do not fit the embeddings, each other, or a plain training loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from monolith.features import Feature, Ragged
from monolith.nn import (
    DCN,
    DIN,
    MLP,
    EmbeddingBagCollection,
    MMoE,
    auxiliary_loss,
    clip_grad_norm_,
    correct_logits,
)
from monolith.table import Adagrad, RandomUniform

DIM, HISTORY, RATE = 8, 4, 0.25
INITIAL = RandomUniform(low=-0.5, high=0.5)


class Model(nn.Module):
    """Will the user click the item (it is like one of the history) and, apart from that, is the item a good one?"""

    def __init__(self) -> None:
        super().__init__()
        item = Feature(name="item", dim=DIM, initializer=INITIAL, optimizer=Adagrad(learning_rate=0.1))
        history = Feature(name="history", shared_with="item", pooling="last_n", max_length=HISTORY)
        self.embeddings = EmbeddingBagCollection([item, history])
        self.interest = DIN(DIM, [16, 1])
        self.cross = DCN(2 * DIM, 2)
        self.experts = MMoE(2 * DIM, 2, [16, 8], num_experts=3, gate_type="noise_topk", top_k=2, balance_weight=0.01)
        self.heads = nn.ModuleList(MLP(8, [1]) for _ in range(2))

    def forward(self, batch: dict[str, torch.Tensor | Ragged]) -> list[torch.Tensor]:
        found = self.embeddings(batch)
        item, history, mask = found["item"], found["history"], found["history.mask"]
        crossed = self.cross(torch.cat([item, self.interest(item, history, mask)], dim=1))
        return [head(task).squeeze(1) for head, task in zip(self.heads, self.experts(crossed), strict=True)]


def make_batch(
    generator: torch.Generator, rows: int = 256
) -> tuple[dict[str, torch.Tensor | Ragged], list[torch.Tensor]]:
    item = torch.randint(20, (rows,), generator=generator)
    lengths = torch.randint(HISTORY + 1, (rows,), generator=generator)
    values = torch.randint(20, (int(lengths.sum()),), generator=generator)
    history = Ragged(values, F.pad(lengths.cumsum(0), (1, 0)))
    same = (values % 4 == item[history.value_rowids()] % 4).float()
    clicked = torch.zeros(rows).index_add(0, history.value_rowids(), same).clamp(max=1)
    return {"item": item, "history": history}, [clicked, (item < 10).float()]


def test_a_model_of_layers_learns_both_tasks_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        batch, labels = make_batch(generator)
        corrected = [correct_logits(logits, RATE) for logits in model(batch)]
        losses = [F.binary_cross_entropy_with_logits(z, y) for z, y in zip(corrected, labels, strict=True)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() + auxiliary_loss(model)).backward()
        clip_grad_norm_(model, 1000.0)
        optimizer.step()
        model.embeddings.step()
    model.eval()
    batch, labels = make_batch(generator, 2000)
    with torch.no_grad():
        for logits, label in zip(model(batch), labels, strict=True):
            accuracy = ((correct_logits(logits, RATE) > 0) == (label > 0)).float().mean().item()
            assert accuracy > 0.9
